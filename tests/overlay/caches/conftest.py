"""A cache with entries."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.kernel_caches import KernelCache, deep_gemm

from .entries import write_entry


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache of DeepGEMM's with three whole entries, 0 to 2."""
    made = deep_gemm(tmp_path / "cache")
    for number in range(3):
        write_entry(made, number)
    return made
