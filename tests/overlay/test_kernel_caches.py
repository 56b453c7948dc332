"""What is a kernel on disk, for each of the two libraries, and where."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import kernel_caches
from vllm_deep_gemm_warmup.kernel_caches import (
    KernelCache,
    deep_gemm,
    flashinfer,
    read_kernel_caches,
)


def test_both_libraries_have_their_folder() -> None:
    given = {"DG_JIT_CACHE_DIR": "/x", "TRTLLM_DG_CACHE_DIR": "/y", "HOME": "/z"}
    assert read_kernel_caches(given) == (deep_gemm(Path("/x")), flashinfer(Path("/y")))
    home = flashinfer(Path("/z/.tensorrt_llm"))
    assert read_kernel_caches({"HOME": "/z"}) == (home,)
    assert read_kernel_caches({}) == ()


@pytest.mark.parametrize(
    ("make", "marker", "name"),
    [
        (deep_gemm, ".committed", "sm90_fp8_gemm_1d2d.0f"),
        (
            flashinfer,
            "nvcc_kernel.cubin",
            "gemm_swapAB_6144_4096_128_16_128_1_81_8_1_Normal",
        ),
    ],
)
def test_an_entry_is_a_folder_with_its_marker(
    tmp_path: Path, make: Callable[[Path], KernelCache], marker: str, name: str
) -> None:
    cache = make(tmp_path)
    assert cache.entries() == frozenset()
    for folder in (f"cache/{name}", "cache/unfinished", "tmp/elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    assert cache.entries() == frozenset()
    (tmp_path / "cache" / name / marker).touch()
    (tmp_path / "tmp" / "elsewhere" / marker).touch()
    assert cache.entries() == {name}
    assert cache.entries(known={name}) == frozenset()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"XDG_CACHE_HOME": "/xdg"},
        {"XDG_CACHE_HOME": "~/xdg"},
        {"VLLM_CACHE_ROOT": "~/root", "XDG_CACHE_HOME": "/xdg"},
        {"VLLM_CACHE_ROOT": ""},
    ],
)
def test_the_folder_is_where_vllm_puts_it(
    given: dict[str, str], installed_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    theirs = runpy.run_path(str(installed_base / "envs.py"))
    root = Path(theirs["environment_variables"]["VLLM_CACHE_ROOT"]())
    assert kernel_caches.vllm_root(os.environ) == root
    assert kernel_caches.deep_gemm_root(given) == root / "deep_gemm"


def test_an_operators_folder_wins() -> None:
    assert kernel_caches.deep_gemm_root({"DG_JIT_CACHE_DIR": "/dg"}) == Path("/dg")
