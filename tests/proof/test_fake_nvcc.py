"""The declared fake: one-kernel ELF cubins, a version text that says what it is."""

import struct
import subprocess
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.proof import fake_nvcc


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    program: Path = fake_nvcc.install(tmp_path / "bin")
    return program


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def symbols(data: bytes) -> list[tuple[str, int, int]]:
    """Return (name, type, st_other) of every symbol but the null one."""
    start, number = struct.unpack_from("<Q", data, 40)[0], data[60]
    tables = {}
    for index in range(number):
        head = struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * index)
        tables[head[1], index] = head
    names = [head for (kind, _), head in tables.items() if kind == 2]
    (table,) = names
    strings = struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * table[6])
    found = []
    for at in range(table[4] + 24, table[4] + table[5], 24):
        name, info, other = struct.unpack_from("<IBB", data, at)
        text = data[strings[4] + name :].partition(b"\0")[0].decode()
        found.append((text, info & 15, other))
    return found


def test_version_has_the_shape_that_is_parsed_and_says_fake(nvcc: Path) -> None:
    done = run(nvcc, "--version")

    assert done.returncode == 0
    assert "release 13.0, V13.0" in done.stdout
    assert "Declared fake" in done.stdout


@pytest.mark.parametrize("flag", ["--cubin", "-cubin"])
def test_a_cubin_holds_the_one_kernel_of_the_source(
    nvcc: Path, tmp_path: Path, flag: str
) -> None:
    source, cubin = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text("void f() { void* p = (void*)&fp8_gemm_kernel_swapAB<1, 2>; }")

    done = run(nvcc, source, "-o", cubin, "-std=c++17", flag, "-O3")

    assert done.returncode == 0, done.stderr
    data = cubin.read_bytes()
    assert data[:5] == b"\x7fELF\x02"
    assert struct.unpack_from("<H", data, 18) == (190,)
    assert symbols(data) == [("fp8_gemm_kernel_swapAB", 2, 0x10)]


@pytest.mark.parametrize(
    ("flag", "sm"), [("--gpu-architecture=sm_90a", 90), ("-arch=sm_120f", 120)]
)
def test_a_cubin_is_for_the_architecture_that_was_asked_for(
    nvcc: Path, tmp_path: Path, flag: str, sm: int
) -> None:
    source, target = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text("__global__ void k() {}")
    assert run(nvcc, str(source), "--cubin", "-o", str(target), flag).returncode == 0
    assert target.read_bytes()[49] == sm


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-c", "a.cu", "-o", "a.o"], "only --version, and --cubin"),
        (["--cubin", "a.cu"], "only --version, and --cubin"),
        (["--cubin", "missing.cu", "-o", "a.cubin"], "no such file: missing.cu"),
    ],
)
def test_any_other_use_fails(nvcc: Path, arguments: list[str], reason: str) -> None:
    done = run(nvcc, *arguments)

    assert done.returncode == 1
    assert reason in done.stderr
