"""A miss is explained by the part of the key that differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from vllm_deep_gemm_warmup.cache_keys import (
    KeyParts,
    explain,
    explain_misses,
    read_key_parts,
)
from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.kernel_caches import KernelCache, deep_gemm

from .entries import entry_name, write_entry

GEMM = KeyParts(
    kernel="sm90_fp8_gemm_1d2d",
    source="&sm90_fp8_gemm_1d2d_impl<0, 256, 512, 1, 64, 16, 128, 132>",
    compiler="Cuda compilation tools, release 13.0, V13.0.88\nBuild x",
    library="cutlass-421",
    options=(("optimize_level", '"3"'), ("use_fast_math", "false")),
)
LATER = replace(GEMM, compiler="Cuda compilation tools, release 13.0, V13.0.96\nBuild")


def test_each_part_is_named() -> None:
    """G36, G47."""
    for other, reason in {
        LATER: "compiler 13.0.96, and this is 13.0.88",
        replace(GEMM, compiler=f"{GEMM.compiler}!"): "another build of compiler 13.0",
        replace(GEMM, library="cutlass-430"): "library cutlass-430, and this is",
        replace(GEMM, source=GEMM.source.replace("132", "78")): "built for 78 SMs",
        replace(GEMM, options=(("optimize_level", '"1"'), GEMM.options[1])): (
            'optimize_level "1", and this is "3"'
        ),
    }.items():
        found = explain(GEMM, [other], 132)
        assert found is not None
        assert reason in found


def test_the_likest_kernel_explains() -> None:
    far = replace(LATER, library="cutlass-430")
    assert explain(GEMM, [far, LATER], 132) == explain(GEMM, [LATER], 132)


def test_another_kernel_explains_nothing() -> None:
    shape = replace(GEMM, source=GEMM.source.replace("256", "384"))
    assert explain(GEMM, [shape, replace(GEMM, kernel="transpose_fp32")], 132) is None
    assert explain(GEMM, [], 132) is None


def test_misses_are_counted_by_their_reason(cache: KernelCache) -> None:
    """G54: said before the first build, and nothing where nothing is missing."""

    def wanted(number: int, version: str) -> Kernel:
        meta = {"compiler_info": {"version": f"V{version}"}}
        return Kernel(entry_name(number), f"// {number - 10}\n", json.dumps(meta), "")

    there = [replace(wanted(10, "13.0.88"), entry=name) for name in cache.entries()]
    assert explain_misses(there, cache, 132) == []
    (line,) = explain_misses(
        [wanted(number, "13.0.96") for number in (10, 11, 15)], cache, 132
    )
    assert (
        "2 kernels are there as others: compiler 13.0.88, and this is 13.0.96" in line
    )
    assert explain_misses(there, deep_gemm(cache.root / "empty"), 132) == []


def test_parts_are_read_from_an_entry(tmp_path: Path) -> None:
    entry = write_entry(deep_gemm(tmp_path), 1, version="13.0.96")
    parts = read_key_parts(entry)
    assert parts is not None
    assert (parts.release, parts.kernel) == ("13.0.96", "sm90_fp8_gemm_1d2d")
    (entry / "meta.json").write_text("{")
    assert read_key_parts(entry) is None
