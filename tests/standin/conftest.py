"""Runs small programs on the stand-in; the library is built once per session."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.standin import environment

# Tests ask for what a machine without a GPU does, also on one that has one.
NO_DRIVER: tuple[Path, ...] = ()


@pytest.fixture
def standin(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """``standin(device, devices)`` is an environment, caches in the test's folder."""

    def make(device: str = "h100", devices: int = 1) -> dict[str, str]:
        env = environment(device, devices, tmp_path / "cache", driver_marks=NO_DRIVER)
        env["STANDIN_GPU_TRACE"] = str(tmp_path / "trace")
        return env

    return make


@pytest.fixture
def python() -> Callable[[str, dict[str, str]], str]:
    """``python(code, env)`` is what the code printed; it must succeed."""

    def run(code: str, env: dict[str, str]) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
