"""Whether the compiler can compile, against fake executables."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import toolchain
from vllm_deep_gemm_warmup.compiling.environment import Unplannable, compiler_text
from vllm_deep_gemm_warmup.toolchain import Facts, Toolchain

from .toolkits import NOWHERE, SAYS, one_line, script


@pytest.mark.parametrize("release", ["12.1", "12.3", "12.8", "11.8"])
def test_too_old(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], release: str
) -> None:
    home = toolkit(release)
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    assert f"{home}/bin/nvcc from CUDA_HOME" in text
    assert f"nvcc {release} is too old, DeepGEMM needs 12.9 or newer" in text


@pytest.mark.parametrize("release", ["12.9", "13.0", "13.5", "14.0"])
def test_new_enough(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], release: str
) -> None:
    home = toolkit(release)
    found = toolchain.describe(facts(CUDA_HOME=home))
    assert isinstance(found, Toolchain)
    assert found.nvcc == home / "bin" / "nvcc"
    assert found.version == tuple(map(int, release.split(".")))
    assert found.headers is None


def test_no_toolkit_anywhere(facts: Callable[..., Facts]) -> None:
    text = one_line(toolchain.describe(facts()))
    assert "there is no CUDA toolkit" in text
    assert "nvidia-cuda-nvcc==13.0.88" in text
    assert "set CUDA_HOME" in text


def test_nvcc_that_exits_one(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit(body="echo 'release 13.0, V13.0.88'\nexit 1\n")
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    assert "`nvcc --version` failed with exit code 1" in text


def test_nvcc_that_prints_nothing(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit(body="exit 0\n")
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    assert "`nvcc --version` names no release" in text


def test_nvcc_that_does_not_answer_is_not_rejected(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    """Only what is known to fail disqualifies; a slow disk is no evidence."""
    home = toolkit(body="exec sleep 30\n")
    given = facts(CUDA_HOME=home)
    found = toolchain.describe(Facts(given.variables, fallback=NOWHERE, patience=0.2))
    assert isinstance(found, Toolchain)
    assert found.version is None


def test_compiler_variable_that_points_nowhere(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], tmp_path: Path
) -> None:
    nowhere = tmp_path / "no" / "nvcc"
    given = facts(CUDA_HOME=toolkit(), DG_JIT_NVCC_COMPILER=nowhere)
    text = one_line(toolchain.describe(given))
    assert f"{nowhere} from DG_JIT_NVCC_COMPILER" in text
    assert "no executable program there" in text


def test_compiler_variable_alone_is_not_enough(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    nvcc = toolkit() / "bin" / "nvcc"
    one_line(toolchain.describe(facts(DG_JIT_NVCC_COMPILER=nvcc)))
    gone = facts(DG_JIT_NVCC_COMPILER=nvcc, CUDA_HOME="/nonexistent")
    assert "alone is not enough" in one_line(toolchain.describe(gone))


def test_not_executable(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit()
    (home / "bin" / "nvcc").chmod(0o644)
    assert "no executable" in one_line(toolchain.describe(facts(CUDA_HOME=home)))


@pytest.mark.parametrize("name", ["my cuda", "cuda(13)", "cuda&co"])
def test_path_that_the_library_s_shell_would_split(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], name: str
) -> None:
    home = toolkit(name=name)
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    assert str(home / "bin" / "nvcc") in text
    assert "without quotes" in text


def test_home_that_is_not_there(facts: Callable[..., Facts]) -> None:
    text = one_line(toolchain.describe(facts(CUDA_PATH="/nonexistent")))
    assert "CUDA_PATH=/nonexistent" in text


@pytest.mark.parametrize("headers", [13000, 12090])
def test_headers_that_do_not_fit(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], headers: int
) -> None:
    home = toolkit("13.5", headers=headers)
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    expected = f"{headers // 1000}.{headers % 1000 // 10}"
    assert f"nvcc 13.5 does not fit the CUDA {expected} headers" in text
    assert "pip install nvidia-cuda-nvcc==" in text


def test_headers_that_fit(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit("13.0", headers=13000)
    found = toolchain.describe(facts(CUDA_HOME=home))
    assert isinstance(found, Toolchain)
    assert found.headers == (13, 0)


@pytest.mark.parametrize("absent", ["g++", "gcc"])
def test_no_host_compiler(
    toolkit: Callable[..., Path],
    facts: Callable[..., Facts],
    compilers: Path,
    absent: str,
) -> None:
    (compilers / absent).unlink()
    given = facts(CUDA_HOME=toolkit())
    text = one_line(toolchain.describe(given))
    assert f"no {absent} on PATH" in text
    assert "apt-get install g++" in text


@pytest.mark.parametrize(
    "variable",
    [("NVCC_CCBIN", "/opt/g++-13"), ("NVCC_APPEND_FLAGS", "-ccbin /opt/g++-13")],
)
def test_host_compiler_named_to_nvcc(
    toolkit: Callable[..., Path],
    facts: Callable[..., Facts],
    compilers: Path,
    variable: tuple[str, str],
) -> None:
    (compilers / "g++").unlink()
    given = facts(CUDA_HOME=toolkit(), **dict([variable]))
    assert isinstance(toolchain.describe(given), Toolchain)


def test_script_without_a_first_line(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit()
    script(home / "bin" / "nvcc", SAYS.format("13.0"), first_line="")
    assert isinstance(toolchain.describe(facts(CUDA_HOME=home)), Toolchain)


def test_replaced_nvcc_is_asked_again(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit("12.8")
    given = facts(CUDA_HOME=home)
    one_line(toolchain.describe(given))
    script(home / "bin" / "nvcc", SAYS.format("13.0") + "# longer\n")
    assert isinstance(toolchain.describe(given), Toolchain)


def test_headers_are_read_once_for_each_of_their_states(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    """Every layer asks; the file has some 700 kB."""
    home = toolkit("13.0", headers=13000)
    header = next(home.rglob("cuda_runtime_api.h"))
    state = header.stat()
    toolchain.describe(facts(CUDA_HOME=home))
    header.write_text(header.read_text().replace("13000", "12090"))
    os.utime(header, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert isinstance(toolchain.describe(facts(CUDA_HOME=home)), Toolchain)
    os.utime(header)
    one_line(toolchain.describe(facts(CUDA_HOME=home)))


def test_nvcc_is_asked_once(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    home = toolkit(body=f"echo x >> {log}\n" + SAYS.format("13.0"))
    for _ in range(5):
        toolchain.describe(facts(CUDA_HOME=home))
        assert "release 13.0" in compiler_text(home / "bin" / "nvcc")
    assert log.read_text() == "x\n"


@pytest.mark.parametrize("body", ["exit 3\n", None])
def test_without_an_answer_nothing_is_planned(
    toolkit: Callable[..., Path], body: str | None
) -> None:
    nvcc = toolkit(body=body or "") / "bin" / "nvcc"
    if body is None:
        nvcc.unlink()
    with pytest.raises(Unplannable, match="nvcc --version"):
        compiler_text(nvcc)
