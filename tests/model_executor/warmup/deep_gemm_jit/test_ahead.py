"""Building begins with the layers' construction; the profiling run waits for it."""

import copy
import json
import os
import pathlib
import re
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
from vllm.model_executor.warmup.deep_gemm_jit.plan import plan_layers
from vllm.model_executor.warmup.deep_gemm_jit.spec import EntryPoint
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup import kernel_caches, standin
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.compiling.store import spec_key

from ...real_layers import (
    COMPRESSED_TENSORS,
    FP8,
    construct_experts,
    load,
)

DEADLINE = 300
WRAPPER = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
BEGIN = pathlib.Path(__file__).with_name("begin.py")


Begin = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def begin(fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path) -> Begin:
    """Run begin.py with two compilers at once, which log that they were called.

    ``line`` is shell that each compiler runs before it compiles the file ``$source``.
    """

    def begin(ranks: int, *given: object, line: str = ":", **variables: str) -> Any:
        fake = pathlib.Path(fake_nvcc_environment["CUDA_HOME"], "bin", "nvcc")
        nvcc = tmp_path / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(
            "#!/bin/sh\n"
            'for source; do case "$source" in *.cu) break;; esac; done\n'
            f'case "$*" in *--cubin*) echo $$ >> {tmp_path}/compiled; {line};; esac\n'
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
            [sys.executable, str(BEGIN), *map(str, (tmp_path, ranks, *given))],
            env=environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return begin


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_kernel_is_compiled_once_and_before_the_first_gemm_runs(
    begin: Begin, tmp_path: pathlib.Path, ranks: int
) -> None:
    """Of an engine of several ranks as of one; counted by the compiler itself."""
    answers = begin(ranks, 320, 832)
    cache = kernel_caches.deep_gemm(tmp_path / "cache")
    built = len(cache.entries())
    assert built > 5
    for answer in answers:
        assert answer["forward"] == answer["all"] == built
    said = answers[0]["said"]
    assert [line for line in said if "kernels to build, 2 at a time" in line]
    assert not [line for line in said if "in this process" in line]
    assert os.listdir(tmp_path / "cache" / "tmp") == []  # noqa: PTH208


@pytest.mark.slow
def test_a_long_prompt_after_a_short_one_builds_nothing_on_any_rank(
    begin: Begin,
) -> None:
    """G14: (576, 7168) on eight ranks; the profiling run has 5 rows."""
    given = ["--k", 7168, "--limit", 8192, "--profile", 5]
    answers = begin(8, 576, *given, "--serve", 7857, "--serve", 8192)
    assert len(answers) == 8
    for answer in answers:
        assert answer["warmed"] == answer["all"] == answers[0]["warmed"] > 5


def wait_until(condition: str) -> str:
    """Return a compiler's line: it fails after minutes of waiting."""
    return (
        f"tries=2400; until {condition}; do "
        "[ $tries = 0 ] && exit 1; tries=$((tries - 1)); sleep 0.1; done"
    )


@pytest.mark.slow
def test_a_rank_that_fails_is_named_while_another_compiles_and_the_rest_go_on(
    begin: Begin, tmp_path: pathlib.Path
) -> None:
    """G27: of four ranks the last raises after 1 s, the first compiles for longer.

    Until the last has served and ended, that is: its compiler waits.
    """
    waits = wait_until(f"[ -e {tmp_path}/answer-3 ]")
    answers = begin(
        4,
        832,
        *("--own", 320, "--raises", 3),
        line=(
            f'if grep -q "320, 768" $source && mkdir {tmp_path}/slow; '
            f"then {waits}; touch {tmp_path}/slow-is-done; fi"
        ),
    )
    (line,) = answers[3]["warned"]
    assert line.startswith("DeepGEMM warmup (rank 3, Broken, max_tokens 512): ")
    assert "RuntimeError: no such luck; the engine starts" in line
    assert "slow-is-done" not in answers[3]["files"]
    for answer in answers[:3]:
        assert answer["warned"] == []
        # None went on to what ranks do together before all had built.
        assert "slow-is-done" in answer["files"]
    # Each served what it has, the last one too.
    assert {answer["warmed"] for answer in answers[:3]} == {answers[0]["all"]}
    assert {answer["all"] for answer in answers[:3]} == {answers[0]["all"]}
    assert any("warmup complete" in line for line in answers[0]["said"])


@pytest.mark.slow
def test_eight_ranks_with_ten_shapes_log_few_lines(begin: Begin) -> None:
    """G60: progress, estimate and closing line, none of them on a terminal."""
    sizes = range(320, 320 + 10 * 64, 64)
    begun = begin(8, *sizes, "--limit", 64, line="sleep 1")
    assert len(begun) == 8
    lines = [line for answer in begun for line in answer["said"]]
    assert [line for line in lines if "kernels to build" in line]
    assert len([line for line in lines if "kernels built, " in line]) > 2, lines
    (closing,) = [line for line in lines if "DeepGEMM warmup complete" in line]
    assert "10 shapes" in closing
    # One in 5 s: on a busy machine it takes longer than ten lines.
    longest = max(answer["seconds"] for answer in begun)
    assert len(lines) <= max(10, 3 + longest / 5), lines


@pytest.mark.parametrize(("timeout", "warns"), [(1, True), (600, False)])
@pytest.mark.slow
def test_the_estimate_and_its_warning_come_before_the_first_build(
    begin: Begin, tmp_path: pathlib.Path, timeout: int, warns: bool
) -> None:
    """G33: a compiler that waits for it would fail without it."""
    (answer,) = begin(
        1,
        *(320, "--signal", "kernels to build"),
        line=wait_until(f"[ -e {tmp_path}/signal ]"),
        VLLM_ENGINE_READY_TIMEOUT_S=str(timeout),
    )
    cache = kernel_caches.deep_gemm(tmp_path / "cache")
    built = len(cache.entries())
    assert answer["all"] == built > 2
    # Several where the machine is so busy that a shape is heard of late.
    lines = [line for line in answer["said"] if "kernels to build" in line]
    counts = []
    for line in lines:
        found = re.match(
            r"DeepGEMM warmup: (\d+) kernels to build, 2 at a time, ", line
        )
        assert found, line
        counts.append(int(found[1]))
        assert ("VLLM_ENGINE_READY_TIMEOUT_S" in line) == warns
    assert counts[0] <= built <= sum(counts)
    assert answer["warned"] == (lines if warns else [])


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


@pytest.mark.parametrize(
    ("quantization", "hidden"),
    [(FP8, 512), (COMPRESSED_TENSORS, 640)],
    ids=["fp8", "compressed-tensors"],
)
def test_the_kernels_of_experts_are_begun_with_when_the_next_layer_is_constructed(
    begun: Callable[[int], Session | None],
    vllm_config: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    quantization: dict[str, Any],
    hidden: int,
) -> None:
    """And they are those that the loaded experts will run."""
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm")
    sizes = 4, 2, hidden, 256
    experts = construct_experts(
        vllm_config, device, *sizes, quantization, prefix="layers.0.mlp.experts"
    )
    assert begun(hidden) is not None
    assert ahead._process.ahead is not None
    begun_with = set(ahead._process.ahead.announced)

    load(experts)
    limit = vllm_config.scheduler_config.max_num_batched_tokens
    specs = plan_layers([("experts", experts)], limit).specs
    assert len(specs) == 2
    assert set(specs) <= begun_with


@pytest.mark.parametrize("backend", ["triton", "flashinfer_cutlass"])
def test_experts_that_run_elsewhere_are_not_begun_with(
    begun: Callable[[int], Session | None],
    vllm_config: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", backend)
    construct_experts(
        vllm_config, device, 4, 2, 512, 256, FP8, prefix="layers.0.mlp.experts"
    )
    begun(448)
    assert ahead._process.ahead is not None
    kinds = {spec.entry_point for spec in ahead._process.ahead.announced}
    assert kinds == {EntryPoint.FP8_GEMM_NT}


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
