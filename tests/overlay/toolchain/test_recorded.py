"""Where there is no nvcc, a recorded answer stands in for it; nowhere else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import toolchain
from vllm_deep_gemm_warmup.toolchain import Facts, Toolchain, recorded

from .toolkits import NOWHERE

ANSWER = "nvcc: NVIDIA (R)\nCuda compilation tools, release 13.0, V13.0.88\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache folder with a recorded answer."""
    folder = tmp_path / "cache"
    folder.mkdir()
    recorded.record(folder, ANSWER)
    return folder


def bare(tmp_path: Path, **variables: str) -> Facts:
    """A host without a compiler of any kind."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    given = {"PATH": str(tmp_path / "bin"), **variables}
    return Facts(variables=tuple(given.items()), fallback=NOWHERE)


def with_variables(facts: Facts, added: dict[str, str]) -> Facts:
    return replace(facts, variables=tuple((dict(facts.variables) | added).items()))


def test_a_bare_host_takes_the_recorded_answer(root: Path, tmp_path: Path) -> None:
    """Neither nvcc nor a host compiler is there, and nothing speaks against it."""
    facts = bare(tmp_path)
    assert isinstance(toolchain.describe(facts), toolchain.Unusable)
    set_ = toolchain.recorded_variables(facts, root)
    found = toolchain.describe(with_variables(facts, set_))
    assert isinstance(found, Toolchain)
    assert found.recorded
    assert found.version == (13, 0)
    # FlashInfer must not take it for a compiler.
    assert not Path(set_["CUDA_HOME"], "bin", "nvcc").exists()
    # A child process finds it set, and leaves it.
    assert toolchain.recorded_variables(with_variables(facts, set_), root) == {}


def test_the_home_of_a_runtime_image_stays(root: Path, tmp_path: Path) -> None:
    """A CUDA folder with libraries and without a compiler."""
    (tmp_path / "cuda").mkdir()
    facts = bare(tmp_path, CUDA_HOME=str(tmp_path / "cuda"))
    set_ = toolchain.recorded_variables(facts, root)
    assert set(set_) == {"DG_JIT_NVCC_COMPILER"}
    assert isinstance(toolchain.describe(with_variables(facts, set_)), Toolchain)


def test_any_nvcc_is_preferred(
    root: Path, tmp_path: Path, toolkit: Callable[..., Path]
) -> None:
    home = toolkit("13.0")
    nvcc = home / "bin" / "nvcc"
    for facts in (
        bare(tmp_path, CUDA_HOME=str(home)),
        bare(tmp_path, CUDA_PATH=str(home)),
        bare(tmp_path, DG_JIT_NVCC_COMPILER=str(nvcc)),
        bare(tmp_path, PATH=str(nvcc.parent)),
        replace(bare(tmp_path), fallback=home),
        replace(bare(tmp_path), pip_roots=(home,)),
    ):
        assert toolchain.recorded_variables(facts, root) == {}


def test_without_a_recorded_answer_there_is_none(tmp_path: Path) -> None:
    assert toolchain.recorded_variables(bare(tmp_path), tmp_path) == {}
    assert recorded.recorded_answer(tmp_path) is None


def test_the_program_compiles_nothing(root: Path) -> None:
    program = str(root / recorded.FOLDER / "nvcc")
    line = f"{program} --version 2>&1"
    assert subprocess.check_output(["/bin/sh", "-c", line], text=True) == ANSWER
    done = subprocess.run(
        [program, "x.cu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no nvcc on this host" in done.stderr
