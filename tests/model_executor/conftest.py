"""Real vLLM layers on the device that the tests run on: the stand-in or a GPU."""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .real_layers import make_linear, one_rank


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The CUDA device of this run.

    Fails, and does not skip, where there is none: without it these tests would
    show nothing.
    """
    if not torch.cuda.is_available():
        pytest.fail(
            "no CUDA device: run the tests on the stand-in, "
            "`vllm-deep-gemm standin -- python -m pytest`",
            pytrace=False,
        )
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def fake_nvcc_environment(
    device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """This process's environment with the declared fake nvcc and an empty cache."""
    from vllm_deep_gemm_warmup.proof import fake_nvcc

    # It keeps the compiler that it finds when it is imported.
    assert "vllm.third_party.deep_gemm" not in sys.modules
    folder = tmp_path_factory.mktemp("fake-nvcc")
    fake_nvcc.install(folder / "cuda" / "bin")
    environ = {
        **os.environ,
        "CUDA_HOME": str(folder / "cuda"),
        "DG_JIT_CACHE_DIR": str(folder / "cache"),
    }
    environ.pop("DG_JIT_NVCC_COMPILER", None)
    return environ


@pytest.fixture(scope="module", autouse=True)
def fake_nvcc_in_this_process(fake_nvcc_environment: dict[str, str]) -> Iterator[None]:
    """Build with the declared fake: these tests count kernels."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("DG_JIT_NVCC_COMPILER", raising=False)
        # A planner's process takes seconds; the tests of it ask for one.
        monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "0")
        for name in ("CUDA_HOME", "DG_JIT_CACHE_DIR"):
            monkeypatch.setenv(name, fake_nvcc_environment[name])
        yield


@pytest.fixture(scope="session")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The engine's state while it constructs and loads a model, on one rank."""
    with one_rank(tmp_path_factory.mktemp("model")) as config:
        yield config


@pytest.fixture
def linear(vllm_config: Any, device: torch.device) -> Callable[..., torch.nn.Module]:
    """``make_linear`` on the device of this run."""
    return functools.partial(make_linear, vllm_config, device)


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture,
) -> Iterator[pytest.LogCaptureFixture]:
    """``caplog`` for vLLM's logger, which does not propagate to the root."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
