"""FlashInfer's experts build nothing after the warmup: calls of its own operator.

Needs the module that partial_fused_moe.py builds, which takes minutes: it is built,
unless the folder of one is in PYTHONPATH.
"""

import dataclasses
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.cache import CacheWatch
from vllm.model_executor.warmup.deep_gemm_jit.plan import make_plan
from vllm.model_executor.warmup.deep_gemm_jit.spec import FusedMoeSpec
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches

from ...real_layers import FP8, make_experts, resident_bytes

pytestmark = pytest.mark.long

PROGRAM = pathlib.Path(__file__).parents[4] / "tests/proof/partial_fused_moe.py"
TOP_K, RANKS, RANK = 4, 4, 1
MEGABYTES = 1 << 20
# Local experts, hidden size, width.
Make = Callable[[int, int, int], Any]


@pytest.fixture(scope="module")
def partial_module(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let FlashInfer find the module as one that was built ahead of time."""
    from flashinfer.jit import env

    if importlib.util.find_spec("flashinfer_jit_cache") is None:
        folder = tmp_path_factory.mktemp("partial")
        # Not with the declared fake.
        plain = {k: v for k, v in os.environ.items() if k != "CUDA_HOME"}
        subprocess.run([sys.executable, PROGRAM, folder], env=plain, check=True)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    env.FLASHINFER_AOT_PROVIDERS = env._get_aot_providers()


@pytest.fixture
def make(
    partial_module: None,
    vllm_config: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Make]:
    """Make and load the experts of one of four expert-parallel ranks."""
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import (
        FlashInferExperts,
    )

    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "flashinfer_cutlass")
    numbers = itertools.count()

    def make(experts: int, hidden: int, width: int) -> Any:
        runner: Any = make_experts(
            vllm_config,
            device,
            experts,
            min(TOP_K, experts),
            hidden,
            width,
            FP8,
            prefix=f"layers.{next(numbers)}.experts",
        )
        kernel = runner._quant_method.moe_kernel.impl
        alone = kernel.fused_experts
        assert type(alone) is FlashInferExperts
        parallel = dataclasses.replace(
            alone.moe_config.moe_parallel_config,
            ep_size=RANKS,
            ep_rank=RANK,
            use_ep=True,
        )
        kernel.fused_experts = FlashInferExperts(
            moe_config=dataclasses.replace(
                alone.moe_config,
                num_experts=experts * RANKS,
                moe_parallel_config=parallel,
            ),
            quant_config=alone.quant_config,
        )
        return runner

    yield make
    vllm_config.compilation_config.static_forward_context.clear()


def serve(runner: Any, counts: Iterable[int], device: torch.device) -> None:
    """Run so many tokens at a time through the experts, as vLLM's kernel does."""
    counts = list(counts)
    width = runner.routed_experts.w2_weight.shape[1]
    hidden = torch.zeros(max(counts), width, dtype=torch.bfloat16, device=device)
    for tokens in counts:
        _serve(runner, hidden[:tokens])


def _serve(runner: Any, hidden: torch.Tensor) -> None:
    routed = runner.routed_experts
    experts = runner._quant_method.moe_kernel.impl.fused_experts
    tokens, device = len(hidden), hidden.device
    top_k = min(TOP_K, routed.w2_weight.shape[0])
    experts.apply(
        output=torch.empty_like(hidden),
        hidden_states=hidden,
        w1=routed.w13_weight,
        w2=routed.w2_weight,
        topk_weights=torch.zeros(tokens, top_k, device=device),
        topk_ids=torch.zeros(tokens, top_k, dtype=torch.int64, device=device),
        activation=routed.activation,
        global_num_experts=RANKS * routed.w2_weight.shape[0],
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )


def watching() -> Callable[[], set[str]]:
    watches = [CacheWatch(cache) for cache in read_kernel_caches()]
    return lambda: {name for watch in watches for name in watch.new_entries()}


@pytest.mark.parametrize(
    ("experts", "hidden", "width", "limit"),
    [
        (8, 512, 256, 2600),
        (32, 7168, 512, 700),
        (16, 2048, 768, 1200),
        (2, 1024, 384, 2600),
    ],
)
def test_every_number_of_tokens_finds_its_kernels(
    experts: int,
    hidden: int,
    width: int,
    limit: int,
    make: Make,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(experts, hidden, width)
    # vLLM's profile run.
    serve(runner, [limit], device)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    built = watching()
    deep_gemm_warmup(torch.nn.ModuleList([runner]), limit)
    names = built()
    assert names
    assert all(f"_{experts}_" in n and n.endswith("GroupedWithOffset") for n in names)
    serve(runner, range(1, limit + 1), device)
    assert built() == set()


def test_without_the_warmup_requests_build(make: Make, device: torch.device) -> None:
    runner = make(8, 512, 384)
    serve(runner, [512], device)
    built = watching()
    serve(runner, [1, 40], device)
    assert len(built()) == 4


@pytest.mark.parametrize(
    ("experts", "hidden", "width"), [(16, 7168, 2048), (1, 16384, 4096)]
)
def test_memory_is_bounded(
    experts: int, hidden: int, width: int, make: Make, device: torch.device
) -> None:
    """At most 256 MiB above what the layer holds, and none of it stays."""
    runner = make(experts, hidden, width)
    # vLLM's profile run: from then on each call of serving takes as much.
    serve(runner, [8192], device)
    plan = make_plan(torch.nn.ModuleList([runner]), 1 << 20)
    (spec,) = plan.specs
    assert isinstance(spec, FusedMoeSpec)
    assert spec.ep == (RANK, RANKS)
    backend = Backend(device, read_target(device), read_kernel_caches())
    held = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    calls, left = backend.run(
        spec, plan.weights[spec], every_row=False, listener=lambda *_: None
    )
    assert [call.failure for call in calls if call.failure] == []
    assert left == []
    peak = torch.cuda.max_memory_allocated(device) - held
    assert peak <= 256 * MEGABYTES
    assert resident_bytes(device) == held
