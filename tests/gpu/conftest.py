"""Decides which tests of this folder run here: those for a GPU where there is one."""

import pytest
from vllm_deep_gemm_warmup.standin.environment import REAL_DRIVER


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU by name: ``-m gpu`` asks for it on every machine."""
    marked = item.get_closest_marker("gpu") is not None
    if marked and not any(mark.exists() for mark in REAL_DRIVER):
        pytest.skip("it needs a real Hopper GPU, and this machine has no GPU driver")
