"""Starts that cannot go well end in one line that says why, and in another kernel."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

START = pathlib.Path(__file__).with_name("start.py")
PLAIN = {"VLLM_DISABLED_KERNELS": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"}


def start(environ: dict[str, str], *sizes: int) -> dict[str, Any]:
    """Run one start with a layer of each size N; K is 256."""
    done = subprocess.run(
        [sys.executable, str(START), *map(str, sizes)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compiler(folder: pathlib.Path, line: str) -> dict[str, str]:
    """Environment of a toolkit whose nvcc is a shell script of one line."""
    program = folder / "home" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)
    return {"CUDA_HOME": str(folder / "home")}


@pytest.fixture
def environ(
    fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path
) -> dict[str, str]:
    cache = {"DG_JIT_CACHE_DIR": str(tmp_path / "cache")}
    return {**fake_nvcc_environment, **PLAIN, **cache}


def test_switched_off_means_nothing_registered_and_nothing_imported(
    environ: dict[str, str],
) -> None:
    """G64."""
    result = start({**environ, "VLLM_USE_DEEP_GEMM": "0"}, 256)
    assert result["stamped"] == [False]
    assert not result["library"]
    assert result["warnings"] == []
    assert "DeepGemm" not in result["kernels"][0]


def test_an_old_compiler_is_found_before_the_weights_and_named_once(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G19: two layers, one line, the next kernel."""
    old = compiler(tmp_path, "echo 'Cuda compilation tools, release 12.8, V12.8.1'")
    result = start({**environ, **old}, 256, 512)
    assert result["stamped"] == [False, False]
    (line,) = [line for line in result["warnings"] if "is not used" in line]
    assert any("none is registered" in line for line in result["warnings"])
    assert "12.8 is too old" in line
    assert old["CUDA_HOME"] in line


def test_a_library_that_cannot_be_imported_is_named_and_not_used(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G15, G22: an external package without the symbol, which vLLM prefers."""
    external = tmp_path / "site" / "deep_gemm.py"
    external.parent.mkdir()
    external.write_text("def get_num_sms(): return 132\n")
    path = os.pathsep.join([str(external.parent), environ.get("PYTHONPATH", "")])
    result = start({**environ, "PYTHONPATH": path}, 256)
    assert result["stamped"] == [False]
    (line,) = [line for line in result["warnings"] if "is not used" in line]
    assert "lacks fp8_gemm_nt" in line
    assert str(external) in line


def test_a_kernel_that_does_not_build_is_named_and_the_rest_go_on(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G26, G18: the compiler fails on N=320 only."""
    calls = tmp_path / "calls"
    works = f"{environ['CUDA_HOME']}/bin/nvcc"
    failing = compiler(
        tmp_path,
        f'echo "$*" >> {calls}\n'
        'for file; do case "$file" in *.cu) grep -q "320, 256" "$file" && '
        '{ echo "error: no such luck" >&2; exit 1; };; esac; done\n'
        f'exec {works} "$@"',
    )
    result = start({**environ, **failing}, 256, 320, 512)
    assert result["stamped"] == [True, True, True]
    lines = [line for line in result["warnings"] if "calls failed" in line]
    assert len(lines) >= 1
    assert all("N=320 K=256" in line for line in lines)
    assert all("no such luck" in line for line in lines), lines
    assert not any("N=256" in line or "N=512" in line for line in lines)
    # What the profiling run meets: our message ends the start.
    works, fails, works_too = result["forward"]
    assert (works, works_too) == ("", "")
    assert "DeepGEMM GEMM (fp8_gemm_nt N=320 K=256, M=64)" in fails
    assert "no such luck" in fails
    assert "check the CUDA compiler" in fails
    # The positive control of what a switched-off start must not do.
    assert result["library"]
