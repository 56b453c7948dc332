"""Building begins with the layers' construction; the profiling run waits for it."""

import copy
import json
import os
import pathlib
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit import ahead
from vllm.model_executor.warmup.deep_gemm_jit.entry_points import STRATEGIES
from vllm.model_executor.warmup.deep_gemm_jit.kernels import json_of
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup import kernel_caches, standin
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.compiling.store import spec_key

from ...real_layers import FP8, load

DEADLINE = 300
WRAPPER = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
BEGIN = pathlib.Path(__file__).with_name("begin.py")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_kernel_is_compiled_once_and_before_the_first_gemm_runs(
    fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path, ranks: int
) -> None:
    """Of an engine of several ranks as of one; counted by the compiler itself."""
    fake = pathlib.Path(fake_nvcc_environment["CUDA_HOME"], "bin", "nvcc")
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--cubin*) echo $$ >> {tmp_path}/compiled;; esac\n'
        f'exec {shlex.quote(str(fake))} "$@"\n'
    )
    nvcc.chmod(0o755)
    environ = standin.environment("h100", ranks, base_env=fake_nvcc_environment)
    environ |= {
        "CUDA_HOME": str(tmp_path / "cuda"),
        "DG_JIT_CACHE_DIR": str(tmp_path / "cache"),
        "VLLM_DEEP_GEMM_WARMUP_WORKERS": "2",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    }
    done = subprocess.run(
        [sys.executable, str(BEGIN), str(tmp_path), str(ranks), "320", "832"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    cache = kernel_caches.deep_gemm(tmp_path / "cache")
    built = len(cache.entries())
    assert built > 5
    for answer in answers:
        assert answer["forward"] == answer["all"] == built
    said = answers[0]["said"]
    assert [line for line in said if "kernels to build, 2 at a time" in line]
    assert not [line for line in said if "in this process" in line]
    assert os.listdir(tmp_path / "cache" / "tmp") == []  # noqa: PTH208


@pytest.fixture
def begun(
    linear: Callable[..., torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Session | None]]:
    """Construct a layer of a new size; return the session that was begun, if any."""
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "1")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", WRAPPER)
    monkeypatch.setattr(ahead, "_process", ahead._Process())

    def begun(n: int) -> Session | None:
        linear(n, 2176, FP8)
        return session_of_this_process()

    yield begun
    ahead.end()


def session_of_this_process() -> Session | None:
    """Return what was begun here for an engine's layers, if anything."""
    work = ahead._process.ahead and ahead._process.ahead.work
    return work.session if work else None


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_layer_s_kernels_are_begun_with_when_it_is_constructed(
    linear: Callable[..., torch.nn.Module],
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    dispatched: bool,
) -> None:
    """Of every layer, the last one too: with no other after it, and no wait.

    What is built is what the loaded layer will run, which depends on who dispatches.
    """
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "1")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "" if dispatched else WRAPPER)
    monkeypatch.setattr(ahead, "_process", ahead._Process())
    limit = vllm_config.scheduler_config.max_num_batched_tokens
    try:
        layer: Any = linear(192, 2176, FP8)
        session = session_of_this_process()
        assert session is not None
        deadline = time.monotonic() + DEADLINE
        while not session.outcomes and time.monotonic() < deadline:
            time.sleep(0.05)
        assert session.outcomes
        load(layer)
        kernel = layer.deep_gemm_warmup_provider
        assert (kernel.dispatcher is not None) == dispatched
        specs = kernel.get_deep_gemm_warmup_specs(layer, limit)
        ours = [s for s in specs if STRATEGIES[s.entry_point].in_deep_gemm_cache]
        assert ours
        assert {spec_key(json_of(spec)) for spec in ours} == set(session.plans)
    finally:
        ahead.end()


def test_an_engine_that_is_told_to_warm_nothing_begins_nothing(
    begun: Callable[[int], Session | None],
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_config.kernel_config, "enable_jit_warmup", False)
    assert begun(128) is None
    monkeypatch.setattr(ahead, "_process", ahead._Process())
    monkeypatch.setattr(vllm_config.kernel_config, "enable_jit_warmup", True)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "skip")
    assert begun(128) is None


def test_what_an_engine_began_and_did_not_warm_ends_with_the_next_engine(
    begun: Callable[[int], Session | None], vllm_config: Any
) -> None:
    """The first failed before its warmup; the second has another limit."""
    first = begun(256)
    assert first is not None
    assert first.usable
    second = copy.copy(vllm_config)
    second.compilation_config = copy.copy(vllm_config.compilation_config)
    ahead.announce(lambda max_tokens: [], second)
    assert not first.usable
    assert begun(384) is not None


def test_a_warmup_that_has_nothing_to_do_ends_what_was_begun(
    begun: Callable[[int], Session | None],
) -> None:
    session = begun(512)
    assert session is not None
    deep_gemm_warmup(torch.nn.ModuleDict(), 64)
    assert not session.usable
    assert not [t for t in threading.enumerate() if t.name.endswith("progress")]
