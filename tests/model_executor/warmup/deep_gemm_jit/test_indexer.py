"""What an indexer of sparse attention runs is described, built, and then served."""

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.adapters.indexer import decode_batches
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.cache import CacheWatch
from vllm.model_executor.warmup.deep_gemm_jit.plan import (
    Plan,
    Registered,
    Skipped,
    Unregistered,
    make_plan,
)
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    MqaLogitsSpec,
    RowRange,
    Spec,
)
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches

from ... import real_indexers
from ...real_layers import resident_bytes
from .conftest import Fresh
from .specs import logits_spec, metadata_spec, paged_logits_spec

LIMIT = 512
Make = Callable[..., Any]
Draft = Callable[..., None]


@pytest.fixture(scope="module", autouse=True)
def workspace(device: torch.device) -> Iterator[None]:
    """The buffers that a worker keeps for all its layers."""
    from vllm.v1.worker import workspace

    workspace.init_workspace_manager(device)
    yield
    workspace.reset_workspace_manager()


@pytest.fixture
def make(vllm_config: Any, device: torch.device) -> Iterator[Make]:
    """Make an indexer of a class, or the attention that holds one, its cache bound."""
    numbers = itertools.count()

    def make(where: str, heads: int, bound: bool = True) -> Any:
        prefix = f"layers.{next(numbers)}.self_attn"
        module, _, name = where.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        made: Any
        if name == "DeepseekV32Attention":
            made = real_indexers.make_attention(vllm_config, device, heads, prefix)
        else:
            made = real_indexers.make_indexer(vllm_config, device, cls, heads, prefix)
        if bound:
            real_indexers.bind_cache(getattr(made, "indexer", made), device)
        return made

    yield make
    vllm_config.compilation_config.static_forward_context.clear()


@pytest.fixture
def draft(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Draft:
    """Set most requests of a step and tokens drafted for each."""

    def draft(requests: int, tokens: int, *, adaptive: bool = False) -> None:
        from vllm.config import SpeculativeConfig

        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=tokens,
            prompt_lookup_max=3,
            target_model_config=vllm_config.model_config,
            target_parallel_config=vllm_config.parallel_config,
        )
        speculative.enable_adaptive_verification = adaptive
        monkeypatch.setattr(vllm_config, "speculative_config", speculative)
        monkeypatch.setattr(vllm_config.scheduler_config, "max_num_seqs", requests)

    return draft


def plan_of(module: torch.nn.Module) -> Plan:
    return make_plan(torch.nn.ModuleDict({"held": module}), LIMIT)


def build(spec: Spec, device: torch.device, every_row: bool = False) -> set[str]:
    """Build a spec; return the kernels that were not there."""
    backend = Backend(device, read_target(device), read_kernel_caches())
    calls, left = backend.run(
        spec, None, every_row=every_row, listener=lambda spec, call: None
    )
    assert not left
    assert [call.failure for call in calls if call.failure] == []
    return {name for call in calls for name in call.built}


V2 = "vllm.model_executor.models.deepseek_v2.Indexer"


@pytest.mark.parametrize(
    ("where", "heads", "served"),
    [
        (V2, 64, 64),
        ("vllm.models.deepseek_v32.attention.DeepseekV32Attention", 64, 64),
        ("vllm.models.hy_v4.nvidia.attention.Indexer", 32, 32),
        # It pads its heads.
        ("vllm.models.glm5next.common.attention.Indexer", 16, 32),
    ],
)
def test_an_indexer_is_described_by_its_layer_and_its_cache(
    where: str, heads: int, served: int, make: Make, vllm_config: Any
) -> None:
    plan = plan_of(make(where, heads))

    (spoke,) = plan.select(Registered)
    assert (spoke.name, spoke.adapter) == ("held", True)
    batches = RowRange(1, vllm_config.scheduler_config.max_num_seqs)
    assert set(plan.specs) == {
        logits_spec(heads=served, rows=RowRange(1, LIMIT)),
        paged_logits_spec(heads=served, rows=batches),
        metadata_spec(rows=batches),
    }


def test_an_indexer_before_its_cache_is_named(make: Make) -> None:
    (silent,) = plan_of(make(V2, 64, bound=False)).outcomes
    assert isinstance(silent, Unregistered)
    assert "index cache of shape (0,)" in silent.reason


def test_an_indexer_on_another_architecture_is_left_out(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    indexer = make(V2, 64)
    monkeypatch.setattr(
        type(current_platform), "is_device_capability_family", lambda *_, **__: False
    )
    (outcome,) = plan_of(indexer).outcomes
    assert isinstance(outcome, Skipped)


def test_the_kernels_of_served_steps_are_those_that_were_warmed(
    make: Make, draft: Draft, vllm_config: Any, device: torch.device
) -> None:
    """G38: index head dim 128 and head dim 512; four rows a request at most."""
    draft(40, 3)
    indexer = make(V2, 64)
    warmed = {name for spec in plan_of(indexer).specs for name in build(spec, device)}
    # Of prompts; of next_n 1, 2 and 4; of 132 slots up to 120 and of 66 up to 40.
    assert len(warmed) == 1 + 3 + 4 + 2
    watch = CacheWatch(read_kernel_caches()[0])
    steps = real_indexers.Steps(vllm_config, device, indexer)

    depths = []
    for tokens in ([9, 30], [1] * 40, [2] * 33, [3] * 40, [4] * 40, [4] * 3, [1, 7]):
        metadata = steps.run(tokens)
        depths.append(metadata.decode and tuple(metadata.decode.seq_lens.shape))

    assert depths == [None, (40, 1), (33, 2), (120, 1), (40, 4), (3, 4), (1, 1)]
    assert watch.new_entries() == ()


@pytest.mark.slow
def test_heads_are_padded_as_glm_5_next_pads_them(
    make: Make, vllm_config: Any, device: torch.device
) -> None:
    """Slow: vLLM compiles a Triton kernel for it."""
    indexer = make("vllm.models.glm5next.common.attention.Indexer", 16)
    (prompt,) = (spec for spec in plan_of(indexer).specs if type(spec) is MqaLogitsSpec)
    seen: list[tuple[Any, ...]] = []
    steps = real_indexers.Steps(vllm_config, device, indexer)
    indexer.indexer_op.register_forward_pre_hook(lambda op, given: seen.append(given))
    steps.run([3])
    ((_, q, *_),) = seen
    assert tuple(q.shape) == (3, prompt.heads, prompt.head_dim)


@pytest.mark.parametrize(
    ("requests", "tokens", "adaptive", "limit", "batches"),
    [
        # A depth of 3 has no kernel on SM90: 512 requests of 3 tokens become 1536.
        (512, 3, False, 8192, {1: 1536, 2: 512, 4: 512}),
        # G13's: each token is a request.
        (512, 3, True, 8192, {1: 2048}),
        # None has a kernel at depth 3, and no step has more tokens than the limit.
        (512, 2, False, 1024, {1: 1024}),
        (1024, 1, False, 8192, {1: 1024, 2: 1024}),
        # A step holds fewer tokens than a request could have.
        (1024, 3, False, 2, {1: 2, 2: 1}),
    ],
)
def test_batches_go_up_to_the_largest_that_can_be_passed(
    requests: int,
    tokens: int,
    adaptive: bool,
    limit: int,
    batches: dict[int, int],
    draft: Draft,
    vllm_config: Any,
) -> None:
    draft(requests, tokens, adaptive=adaptive)
    assert decode_batches(vllm_config, limit) == batches


def test_without_a_draft_a_decode_has_one_row(vllm_config: Any) -> None:
    requests = vllm_config.scheduler_config.max_num_seqs
    assert decode_batches(vllm_config, 8192) == {1: requests}


@pytest.mark.slow
def test_captured_batches_alone_leave_buckets_cold(
    fresh: Fresh, draft: Draft, vllm_config: Any
) -> None:
    """G13: 512 requests, 3 draft tokens, graphs for powers of two up to 512."""
    draft(512, 3, adaptive=True)
    ((depth, most),) = decode_batches(vllm_config, 8192).items()
    assert (depth, most) == (1, 2048)
    graphs = [metadata_spec(rows=RowRange(2**power, 2**power)) for power in range(10)]
    every_bucket = list(range(32, 2048 + 1, 32))
    buckets = [metadata_spec(rows=RowRange(size, size)) for size in every_bucket]
    everything = metadata_spec(rows=RowRange(1, most))

    captured, warmed, each = fresh(
        [
            ([*graphs, everything], None, {}),
            ([everything, *buckets], None, {}),
            (buckets, None, {}),
        ]
    )

    for case in (captured, warmed, each):
        assert not any(result["failures"] or result["left"] for result in case["specs"])
    *alone, rest = (result["built"] for result in captured["specs"])
    assert sum(map(len, alone)) == len({32, 64, 128, 256, 512})
    assert len(rest) == 64 - 5
    # One kernel a bucket, and the warmup has them all.
    assert [len(result["built"]) for result in each["specs"]] == [1] * 64
    first, *others = (result for result in warmed["specs"])
    assert first["rows"] == every_bucket
    assert len(set(first["built"])) == 64
    assert not any(result["built"] for result in others)


@pytest.mark.parametrize("every_row", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        logits_spec(rows=RowRange(1, 8192)),
        logits_spec(rows=RowRange(8191, 8192)),
        paged_logits_spec(rows=RowRange(1023, 1024)),
        paged_logits_spec(rows=RowRange(1023, 1024), next_n=4),
        paged_logits_spec(rows=RowRange(3071, 8192), next_n=4),
        metadata_spec(rows=RowRange(8191, 8192)),
    ],
    ids=str,
)
def test_scores_for_64k_keys_are_not_allocated_for_all_rows(
    spec: Spec, every_row: bool, device: torch.device
) -> None:
    """8192 rows of 64k keys have 2 GiB of scores, and 32k queries 256 MiB."""
    torch.cuda.synchronize(device)
    before = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    build(spec, device, every_row)

    assert torch.cuda.max_memory_allocated(device) - before <= 256 << 20
    assert resident_bytes(device) == before
