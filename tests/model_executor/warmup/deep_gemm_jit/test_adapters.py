"""What code of the base runs that does not say so itself is described."""

import dataclasses
import importlib
import inspect
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.warmup.deep_gemm_jit.adapters.experts import HOST_COUNTS
from vllm.model_executor.warmup.deep_gemm_jit.plan import (
    Registered,
    Skipped,
    make_plan,
    plan_constructed,
)
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    ExpertRouting,
    FusedMoeSpec,
    HcPrenormSpec,
    MaskedSpec,
    RowRange,
    ScaleLayout,
    SplitRule,
    TensorLayout,
)

from ...real_layers import FP8, make_experts, make_mla
from .conftest import LOCAL_EXPERTS, MakeBatchedExperts
from .conftest import TOP_K as BATCHED_TOP_K
from .layers import hyper_connected
from .specs import gemms

# 4 experts, two of them for each token, of hidden size 512 and width 256.
EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 512, 256
LIMIT = 96

Made = Callable[[str], torch.nn.Module]


@pytest.fixture
def experts(
    vllm_config: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Made]:
    """Make a loaded layer of experts for a value of ``--moe-backend``."""
    names = (f"layers.{number}.experts" for number in itertools.count())

    def make(backend: str) -> torch.nn.Module:
        monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", backend)
        sizes = (EXPERTS, TOP_K, HIDDEN, WIDTH)
        return make_experts(vllm_config, device, *sizes, FP8, prefix=next(names))

    yield make
    vllm_config.compilation_config.static_forward_context.clear()


def test_both_weights_of_experts_on_deep_gemm_are_described(experts: Made) -> None:
    plan = make_plan(torch.nn.ModuleList([experts("deep_gemm")]), LIMIT)

    assert [type(outcome) for outcome in plan.outcomes] == [Registered, Registered]
    w13, w2 = gemms(plan.specs)
    assert (w13.groups, w13.n, w13.k) == (EXPERTS, 2 * WIDTH, HIDDEN)
    assert (w2.groups, w2.n, w2.k) == (EXPERTS, HIDDEN, WIDTH)
    assert w13.activation_scale is ScaleLayout.ROW_MAJOR
    assert w2.activation_scale is ScaleLayout.COLUMN_MAJOR
    for spec in (w13, w2):
        assert spec.entry_point is EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS
        assert spec.rows == RowRange(1, LIMIT)
        assert spec.routing == ExpertRouting(TOP_K, prefix_sum=True)
        weights = plan.weights[spec]
        assert weights is not None
        weight, scale = weights
        assert tuple(weight.shape) == (spec.groups, spec.n, spec.k)
        assert tuple(scale.shape) == (spec.groups, spec.n // 128, spec.k // 128)


def test_experts_on_another_backend_have_nothing_to_warm(experts: Made) -> None:
    assert make_plan(torch.nn.ModuleList([experts("triton")]), LIMIT).specs == ()


def test_experts_on_flashinfer_are_described_as_one(experts: Made) -> None:
    """As the base's operator gets them; the weights as they are after loading."""
    layer: Any = experts("flashinfer_cutlass")
    plan = make_plan(torch.nn.ModuleList([layer]), LIMIT)
    (spec,) = plan.specs
    assert isinstance(spec, FusedMoeSpec)
    assert (spec.hidden, spec.width, spec.w13_rows) == (HIDDEN, WIDTH, 2 * WIDTH)
    assert (spec.experts, spec.activation) == (EXPERTS, "SILU")
    assert (spec.tp, spec.ep) == ((0, 1), (0, 1))
    assert spec.rows == RowRange(1, LIMIT)
    weights = plan.weights[spec]
    assert weights is not None
    w13, w13_scale, w2, w2_scale = weights
    assert w13.shape == (EXPERTS, 2 * WIDTH, HIDDEN)
    assert w2.shape == (EXPERTS, HIDDEN, WIDTH)
    for scale, layout in ((w13_scale, spec.w13_scale), (w2_scale, spec.w2_scale)):
        assert TensorLayout.of(scale) == layout


def test_ranks_and_blocks_of_experts_on_flashinfer(
    experts: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = experts("flashinfer_cutlass")
    fused = layer._quant_method.moe_kernel.impl.fused_experts
    monkeypatch.setattr(fused, "ep_rank", 3)
    monkeypatch.setattr(fused, "ep_size", 8)
    monkeypatch.setattr(fused.moe_config.moe_parallel_config, "sp_size", 5)
    (spec,) = make_plan(torch.nn.ModuleList([layer]), LIMIT).specs
    assert isinstance(spec, FusedMoeSpec)
    assert spec.ep == (3, 8)
    assert spec.rows == RowRange(1, 100)
    monkeypatch.setattr(
        type(fused), "block_shape", property(lambda _: [64, 128]), raising=False
    )
    (outcome,) = make_plan(torch.nn.ModuleList([layer]), LIMIT).outcomes
    assert isinstance(outcome, Skipped)
    assert "[64, 128]" in outcome.reason


def test_ranks_that_share_the_tokens_of_a_step_send_equal_parts(
    experts: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = experts("deep_gemm")
    config = layer._quant_method.moe_kernel.impl.fused_experts.moe_config
    monkeypatch.setattr(config.moe_parallel_config, "sp_size", 5)
    plan = make_plan(torch.nn.ModuleList([layer]), LIMIT)
    assert {spec.rows for spec in plan.specs} == {RowRange(1, 100)}


@pytest.mark.parametrize("name", HOST_COUNTS)
def test_experts_that_learn_how_many_tokens_each_got_are_told_apart(
    experts: Made, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """DeepEP's kernels are not installed here; the class of the sender decides."""
    layer: Any = experts("deep_gemm")
    sender = layer._quant_method.moe_kernel.impl.prepare_finalize
    monkeypatch.setattr(
        layer._quant_method.moe_kernel.impl,
        "prepare_finalize",
        type(name, (type(sender),), {})(),
    )
    plan = make_plan(torch.nn.ModuleList([layer]), LIMIT)
    assert [s.routing and s.routing.counted for s in gemms(plan.specs)] == [True, True]


@pytest.mark.parametrize("kernels", ["use_deepep_ht_kernels", "use_deepep_v2_kernels"])
def test_experts_that_will_learn_it_are_told_apart_before_they_are_loaded(
    experts: Made, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """By the engine's config, which decides on the sender (all2all_utils.py)."""
    layer: Any = experts("deep_gemm")
    named = [("experts", layer)]
    loaded = make_plan(torch.nn.ModuleList([layer]), LIMIT).specs
    assert plan_constructed(named, LIMIT).specs == loaded
    config = type(layer._quant_method.moe)
    monkeypatch.setattr(config, kernels, property(lambda _: True))
    plan = plan_constructed(named, LIMIT)
    assert [s.routing and s.routing.counted for s in gemms(plan.specs)] == [True, True]


def test_a_method_that_lacks_what_is_asked_is_no_reason_to_stop(
    experts: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another package's may choose DeepGEMM's experts as well."""
    layer: Any = experts("deep_gemm")
    monkeypatch.delattr(layer._quant_method, "weight_block_size")
    assert plan_constructed([("experts", layer)], LIMIT).outcomes == ()


def test_the_senders_that_count_are_those_of_the_base() -> None:
    """Their modules cannot be imported without DeepEP."""
    folder = pathlib.Path(fused_moe.__file__).parent / "prepare_finalize"
    counting = [
        path.read_text()
        for path in folder.glob("*.py")
        if "make_from_list(" in path.read_text()
    ]
    assert len(counting) == len(HOST_COUNTS)
    for name in HOST_COUNTS:
        assert any(f"class {name}(" in text for text in counting), name


@pytest.fixture
def attention(vllm_config: Any, device: torch.device) -> Iterator[torch.nn.Module]:
    """MLA attention with a block-FP8 ``kv_b_proj`` of (256, 512)."""
    yield make_mla(vllm_config, device, FP8, "layers.0")
    vllm_config.compilation_config.static_forward_context.clear()


def test_the_context_of_mla_has_rows_beyond_a_step_s(attention: Any) -> None:
    most = attention.chunked_prefill_workspace_size
    plan = make_plan(torch.nn.ModuleDict({"attn": attention}), LIMIT)

    projection, context = sorted(plan.select(Registered), key=lambda o: o.adapter)
    assert projection.name == "attn.kv_b_proj"
    assert context.name == "attn"
    (own,) = [s for s in projection.specs if s.entry_point is EntryPoint.FP8_GEMM_NT]
    (beyond,) = context.specs
    assert (own.rows.last, beyond.rows) == (LIMIT, RowRange(LIMIT + 1, most))
    assert dataclasses.replace(beyond, rows=own.rows) == own
    assert plan.weights[beyond] is not None


def test_a_step_as_large_as_a_context_chunk_covers_it(attention: Any) -> None:
    most = attention.chunked_prefill_workspace_size
    plan = make_plan(torch.nn.ModuleDict({"attn": attention}), most)

    assert [outcome.name for outcome in plan.select(Skipped)] == ["attn"]
    assert {spec.rows.last for spec in plan.specs} == {31, most}


def masked_specs(plan: Any) -> list[MaskedSpec]:
    assert all(isinstance(spec, MaskedSpec) for spec in plan.specs)
    return list(plan.specs)


def test_both_weights_of_batched_experts_are_described(
    batched_experts: MakeBatchedExperts,
) -> None:
    runner = batched_experts(HIDDEN, WIDTH, LIMIT, 4)
    plan = make_plan(torch.nn.ModuleList([runner]), LIMIT)
    w13, w2 = masked_specs(plan)
    assert (w13.n, w13.k) == (2 * WIDTH, HIDDEN)
    assert (w2.n, w2.k) == (HIDDEN, WIDTH)
    # 4 ranks send 96 tokens to 2 of 20 experts each: 38 for one, 48 rounded up.
    assert 4 * LIMIT * BATCHED_TOP_K // (4 * LOCAL_EXPERTS) == 38
    for spec in (w13, w2):
        assert (spec.groups, spec.capacity) == (LOCAL_EXPERTS, 4 * LIMIT)
        assert spec.rows == RowRange(16, 48)
        assert spec.activation_scale is ScaleLayout.COLUMN_MAJOR
        assert plan.weights[spec] is not None


def test_ranks_that_join_expect_no_more_rows_of_an_expert(
    batched_experts: MakeBatchedExperts,
) -> None:
    """Elastic EP on NIXL does not warm up again: every rank brings experts as well."""
    plans = [
        make_plan(torch.nn.ModuleList([runner]), LIMIT)
        for runner in (batched_experts(HIDDEN, WIDTH, LIMIT, n) for n in (2, 4, 16))
    ]
    assert len({spec.rows for plan in plans for spec in masked_specs(plan)}) == 1


@pytest.mark.parametrize(
    ("limit", "ranks", "rows"),
    [(1, 2, RowRange(2, 2)), (8, 4, RowRange(16, 16)), (LIMIT, 1, RowRange(96, 96))],
    ids=["fewer than a step", "one step", "no data-parallel ranks"],
)
def test_no_more_than_serving_expects(
    batched_experts: MakeBatchedExperts, limit: int, ranks: int, rows: RowRange
) -> None:
    runner = batched_experts(HIDDEN, WIDTH, limit, ranks)
    plan = make_plan(torch.nn.ModuleList([runner]), limit)
    assert {spec.rows for spec in masked_specs(plan)} == {rows}


HYPER_CONNECTED = {
    "vllm.models.deepseek_v4.nvidia.model": (
        "DeepseekV4DecoderLayer",
        SplitRule.EXACT,
    ),
    "vllm.models.deepseek_v41.nvidia.model": (
        "DeepseekV4DecoderLayer",
        SplitRule.BUCKETED,
    ),
    "vllm.models.glm5next.common.model": ("Glm5NextDecoderLayer", SplitRule.EXACT),
}


@pytest.mark.parametrize("module", HYPER_CONNECTED)
def test_the_projections_of_hyper_connections_are_described(
    module: str, device: torch.device
) -> None:
    name, splits = HYPER_CONNECTED[module]
    layer = hyper_connected(module, name, device, 256)
    plan = make_plan(torch.nn.ModuleList([layer]), LIMIT)
    (spec,) = plan.specs
    assert isinstance(spec, HcPrenormSpec)
    assert (spec.n, spec.k, spec.rows) == (24, 1024, RowRange(1, LIMIT))
    assert spec.splits is splits
    assert [outcome.name for outcome in plan.outcomes] == ["0", "0"]
    assert all(outcome.adapter for outcome in plan.select(Registered))


@pytest.mark.parametrize("module", HYPER_CONNECTED)
def test_the_layers_still_name_their_projections_so(module: str) -> None:
    name, _ = HYPER_CONNECTED[module]
    source = inspect.getsource(getattr(importlib.import_module(module), name))
    for projection in ("hc_attn_fn", "hc_ffn_fn"):
        assert f"self.{projection} = nn.Parameter(" in source
    parallel = ("self.use_sequence_parallel =", "self.is_sequence_parallel =")
    assert any(text in source for text in parallel)
    assert ("hc_attn_fn_broadcast" in source) == ("deepseek" in module)


def test_the_first_layer_of_deepseek_runs_the_sum_of_its_projection(
    device: torch.device,
) -> None:
    layer = hyper_connected(
        "vllm.models.deepseek_v4.nvidia.model",
        "DeepseekV4DecoderLayer",
        device,
        256,
        first=True,
    )
    first, ffn = make_plan(layer, LIMIT).specs
    assert isinstance(first, HcPrenormSpec)
    assert isinstance(ffn, HcPrenormSpec)
    assert (first.k, ffn.k) == (256, 1024)


def test_ranks_that_share_a_sequence_share_its_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm.distributed.get_tensor_model_parallel_world_size", lambda: 5
    )
    layer = hyper_connected(
        "vllm.models.deepseek_v4.nvidia.model",
        "DeepseekV4DecoderLayer",
        device,
        256,
    )
    layer.use_sequence_parallel = True
    (spec,) = make_plan(layer, 96).specs
    assert spec.rows == RowRange(1, 20)


def test_a_layer_without_hyper_connections_has_nothing_to_warm(
    device: torch.device,
) -> None:
    layer = hyper_connected(
        "vllm.models.glm5next.common.model", "Glm5NextDecoderLayer", device, 256
    )
    del layer.hc_attn_fn, layer.hc_ffn_fn
    assert make_plan(layer, LIMIT).outcomes == ()
