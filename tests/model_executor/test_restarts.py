"""What an earlier start left is used; what it did not is named before it is built."""

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from .starts import PLAIN, compiler

RESTARTS = pathlib.Path(__file__).with_name("restarts.py")
FULL = "0 kernels built, all were there"


@pytest.fixture(scope="module")
def starts(
    fake_nvcc_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What came of each case; one import of vLLM for all."""
    folder = tmp_path_factory.mktemp("restarts")
    works = f"{fake_nvcc_environment['CUDA_HOME']}/bin/nvcc"
    count = f'case "$*" in *--cubin*) echo x >> {folder}/compiled;; esac'
    home = compiler(folder, f'{count}\nexec {works} "$@"')
    done = subprocess.run(
        [sys.executable, str(RESTARTS), str(folder)],
        env={**fake_nvcc_environment, **PLAIN, **home},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(it) for it in done.stdout.splitlines() if it[:1] == "{"]
    return {line["case"]: line for line in lines}


def said(line: dict[str, Any], text: str) -> list[str]:
    return [it for it in line["said"] if text in it]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["as it is", "library at another path"])
def test_a_full_cache_is_not_touched(starts: dict[str, Any], case: str) -> None:
    """G53, and G47: the library through a link."""
    line = starts[case]
    assert starts["fill"]["compiled"] > 5
    assert (line["compiled"], line["warned"]) == (0, [])
    assert line["same"]
    assert said(line, FULL)
    assert not said(line, "planned anew")


@pytest.mark.slow
def test_another_variable_is_named_before_its_kernels_are_built(
    starts: dict[str, Any],
) -> None:
    """G36."""
    line = starts["another variable"]
    assert line["compiled"] == starts["fill"]["compiled"]
    # Again, where more is found while the first are built.
    warning, *_ = line["warned"]
    for again in line["warned"]:
        assert "kernels are there as others" in again
        assert "with_line_info false, and this is true" in again
    (plan,) = said(line, "planned anew")
    assert "DG_JIT_WITH_LINEINFO unset, and this is 1" in plan
    to_build = said(line, "kernels to build")
    assert line["said"].index(warning) < line["said"].index(to_build[0])


@pytest.mark.slow
def test_a_switch_to_nvrtc_has_plans_of_its_own(starts: dict[str, Any]) -> None:
    """G46: DeepGEMM 2.8.1 has no NVRTC and does not read its switch.

    What one that has it would build is not taken for nvcc's.
    """
    line = starts["NVRTC"]
    assert line["compiled"] == 0
    (plan,) = said(line, "planned anew")
    assert "DG_JIT_USE_NVRTC unset, and this is 1" in plan


@pytest.mark.slow
def test_kernels_without_plans_are_planned_and_not_built(
    starts: dict[str, Any],
) -> None:
    """G54."""
    line = starts["no plans"]
    assert (line["compiled"], line["warned"]) == (0, [])
    (plan,) = said(line, "planned anew")
    assert "no plan of it is kept" in plan


@pytest.mark.slow
def test_a_size_that_a_compiled_cache_lacks_is_named_first(
    starts: dict[str, Any],
) -> None:
    """G55."""
    line = starts["another size"]
    # Again, where more is found while the first are built.
    warning, *_ = line["warned"]
    for again in line["warned"]:
        assert "compiled beforehand and lacks kernels of" in again
        assert set(re.findall(r"N=(\d+) K=256", again)) == {"768"}
    to_build = said(line, "kernels to build")
    assert line["said"].index(warning) < line["said"].index(to_build[0])


@pytest.mark.slow
def test_a_read_only_cache_serves_a_user_without_a_home(
    starts: dict[str, Any],
) -> None:
    """G56: full, and with one kernel missing, which goes elsewhere and is said once."""
    full, gap = starts["read-only"], starts["read-only with a gap"]
    assert full["same"]
    assert (full["compiled"], full["warned"]) == (0, [])
    assert gap["same"]
    assert gap["compiled"] == 1
    (warning,) = gap["warned"]
    assert "1 kernels are missing in it" in warning
    assert gap["cache"] in warning


@pytest.mark.slow
def test_a_library_that_was_imported_first_takes_the_cache_that_is_named(
    starts: dict[str, Any],
) -> None:
    """G48: the user's name wins; else vLLM's own, which is made, and that is said."""
    named, own = starts["library first"], starts["library first and no name"]
    early = "it was imported before vLLM has named its cache"
    assert named["compiled"] == 0
    assert not said(named, early)
    assert own["cache"].endswith("/vllm/deep_gemm")
    assert own["compiled"] == own["entries"] == starts["fill"]["compiled"]
    assert len(said(own, early)) == 1
