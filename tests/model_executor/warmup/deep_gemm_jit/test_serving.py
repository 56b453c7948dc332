"""Once a layer is warmed, the base's own code that runs it builds nothing."""

import dataclasses
import json
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.cache import CacheWatch
from vllm.model_executor.warmup.deep_gemm_jit.left_out import LEFT_OUT
from vllm.model_executor.warmup.deep_gemm_jit.plan import make_plan
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    ExpertRouting,
    GemmSpec,
    HcPrenormSpec,
    RowRange,
    ScaleLayout,
    SplitRule,
    TensorLayout,
)
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm.v1.worker import workspace
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches

from ...real_layers import FP8, load, make_experts, resident_bytes, run_experts
from .conftest import MakeBatchedExperts
from .layers import hyper_connected
from .specs import (
    einsum_spec,
    grouped_spec,
    hc_prenorm_spec,
    linear_spec,
    masked_spec,
)

MakeLinear = Callable[..., torch.nn.Module]
Warmed = Callable[[torch.nn.Module, int], Callable[[], list[str]]]


@pytest.fixture
def warmed(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Warmed:
    """Warm a model up to a limit; return a function that names kernels built since."""

    def warm(model: torch.nn.Module, limit: int) -> Callable[[], list[str]]:
        monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
        watches = [CacheWatch(cache) for cache in read_kernel_caches()]
        deep_gemm_warmup(model, limit)
        assert [name for watch in watches for name in watch.new_entries()]
        return lambda: [name for watch in watches for name in watch.new_entries()]

    return warm


def project(
    wo_a: torch.nn.Module, device: torch.device, groups: int, n: int, k: int, rows: int
) -> None:
    """Run DeepSeek-V4's output projection as its attention does."""
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import (
        compute_fp8_einsum_recipe,
        deep_gemm_fp8_o_proj,
    )

    recipe, aligned = compute_fp8_einsum_recipe()
    output = deep_gemm_fp8_o_proj(
        torch.empty(rows, groups, k, dtype=torch.bfloat16, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.empty(rows, 64, device=device),
        wo_a,
        lambda z: z,
        n_groups=groups,
        heads_per_group=1,
        nope_dim=k - 64,
        rope_dim=64,
        o_lora_rank=n,
        einsum_recipe=recipe,
        tma_aligned_scales=aligned,
    )
    assert output.shape == (rows, groups * n)


def make_wo_a(
    linear: MakeLinear, groups: int, n: int, k: int, **given: Any
) -> torch.nn.Module:
    """Make and load ``wo_a`` of (groups, N, K)."""
    wo_a: Any = linear(groups * n, k, FP8, **given)
    wo_a.is_bmm, wo_a.bmm_batch_size = True, groups
    return load(wo_a)


@pytest.mark.parametrize(
    ("groups", "n", "k", "rows", "workers"),
    [
        pytest.param(2, 128, 256, [1, 18, 32], 0, id="G04"),
        pytest.param(4, 1024, 4096, [5908, 7241, 10349, 6109, 2125, 1999], 0, id="G05"),
        pytest.param(3, 128, 512, [*range(1, 128)], 2, id="found and built apart"),
    ],
)
def test_the_output_projection_of_deepseek_v4(
    linear: MakeLinear,
    warmed: Warmed,
    device: torch.device,
    groups: int,
    n: int,
    k: int,
    rows: list[int],
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", str(workers))
    wo_a = make_wo_a(linear, groups, n, k)
    built_since = warmed(torch.nn.ModuleDict({"wo_a": wo_a}), max(rows))
    for count in rows:
        project(wo_a, device, groups, n, k, count)
    assert built_since() == []


def test_a_model_with_a_linear_layer_experts_and_an_einsum_is_covered(
    linear: MakeLinear,
    vllm_config: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    """G03: each entry point is warmed, not reached by this model, or left out."""
    wrapper = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", wrapper)
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm")
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    path = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(path))
    workspace.init_workspace_manager(device)
    hidden, limit = 640, 512
    model = torch.nn.ModuleDict(
        {
            "proj": load(linear(448, hidden, FP8, prefix="proj")),
            "wo_a": make_wo_a(linear, 2, 128, 256, prefix="wo_a"),
            "experts": make_experts(
                vllm_config, device, 4, 2, hidden, 256, FP8, prefix="experts"
            ),
        }
    )

    deep_gemm_warmup(model, limit)

    report = json.loads(path.read_text())
    coverage = report["coverage"]
    warmed = {row["entry_point"]: row for row in coverage["entry_points"]}
    assert set(warmed) == {
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_contiguous",
        "fp8_einsum",
    }
    assert all(row["tally"]["planned"] for row in warmed.values())
    assert not any(row["tally"]["failed"] for row in warmed.values())
    assert set(warmed) | set(coverage["unreached"]) == set(EntryPoint)
    assert report["left_out"] == dict(LEFT_OUT)
    (einsum,) = (s for s in report["specs"] if s["entry_point"] == "fp8_einsum")
    assert (einsum["groups"], einsum["n"], einsum["k"]) == (2, 128, 256)
    assert einsum["weight_scale"]["shape"] == [2, 1, 2]

    watches = [CacheWatch(cache) for cache in read_kernel_caches()]
    for rows in (1, 17, 64, 300, limit):
        model["proj"](torch.empty(rows, hidden, dtype=torch.bfloat16, device=device))
        project(model["wo_a"], device, 2, 128, 256, rows)
        run_experts(vllm_config, device, model["experts"], hidden, rows)
    assert [name for watch in watches for name in watch.new_entries()] == []
    workspace.reset_workspace_manager()


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_an_einsum_scale_that_the_library_refuses_is_named(
    dtype: str, device: torch.device
) -> None:
    """G04: a scale of (2, 1, 2) with the recipe (1, 1, 128), which wants 128 rows."""
    spec = dataclasses.replace(
        einsum_spec(2, 128, 256, 32),
        weight_scale=TensorLayout((2, 1, 2), (2, 2, 1), dtype),
        activation_scale=ScaleLayout.PACKED_UE8M0,
        recipe=(1, 1, 128),
    )
    backend = Backend(device, read_target(device), read_kernel_caches())
    calls, _ = backend.run(spec, None, every_row=False, listener=lambda *_: None)
    assert calls
    assert all("Assertion error" in (call.failure or "") for call in calls)
    assert not any(call.built for call in calls)


def test_the_hyper_connections_of_deepseek_v4(
    warmed: Warmed, device: torch.device
) -> None:
    """Of the first layer, whose projection is summed over the streams, and others."""
    from vllm.model_executor.kernels.mhc.tilelang import _hc_prenorm_gemm_outputs

    hidden, limit = 1536, 3000
    layer = hyper_connected(
        "vllm.models.deepseek_v4.nvidia.model",
        "DeepseekV4DecoderLayer",
        device,
        hidden,
        first=True,
    )
    built_since = warmed(layer, limit)
    for projection in (layer.hc_attn_fn_broadcast, layer.hc_ffn_fn):
        for rows in (1, *range(63, limit, 64), *range(64, limit, 64), limit):
            x = torch.empty(
                rows, projection.shape[1], dtype=torch.bfloat16, device=device
            )
            _hc_prenorm_gemm_outputs(
                x,
                projection,
                hidden_size=hidden,
                hc_mult=4,
                use_tilelang_fallback=False,
            )
    assert built_since() == []


def test_batched_experts_with_redundant_ones(
    batched_experts: MakeBatchedExperts, warmed: Warmed, device: torch.device
) -> None:
    """Two data-parallel ranks; every count of tokens that they can send."""
    from vllm.forward_context import (
        DPMetadata,
        ForwardContext,
        override_forward_context,
    )
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        ExpertTokensMetadata,
    )

    limit, ranks, width, hidden = 512, 2, 256, 896
    runner = batched_experts(hidden, width, limit, ranks)
    experts = runner._quant_method.moe_kernel.impl.fused_experts
    config = experts.moe_config
    built_since = warmed(torch.nn.ModuleList([runner]), limit)
    routed = runner.routed_experts
    local, capacity = routed.w13_weight.shape[0], limit * ranks
    a = torch.empty(local, capacity, hidden, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.zeros(local, hidden // 128, capacity, device=device)
    shapes = experts.workspace_shapes(
        limit, 2 * width, hidden, 2, config.num_experts, local, None, routed.activation
    )
    workspaces = [
        torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes
    ]
    for tokens in range(1, ranks * limit + 1, 7):
        metadata = DPMetadata(torch.tensor([tokens // 2, tokens - tokens // 2]))
        with override_forward_context(ForwardContext({}, {}, {}, dp_metadata=metadata)):
            experts.apply(
                workspaces[2],
                a,
                routed.w13_weight,
                routed.w2_weight,
                torch.empty(0, device=device),
                torch.empty(limit, config.experts_per_token, device=device),
                routed.activation,
                config.num_experts,
                None,
                scale.transpose(1, 2),
                None,
                workspaces[0],
                workspaces[1],
                ExpertTokensMetadata(
                    torch.zeros(local, dtype=torch.int32, device=device), None
                ),
                False,
            )
    assert built_since() == []


@pytest.fixture
def experts(
    vllm_config: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, int, int], Any]]:
    """Make experts on DeepGEMM: how many, hidden size, width; two for each token."""
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm")

    def make(count: int, hidden: int, width: int) -> Any:
        name = f"served.{count}x{hidden}x{width}.experts"
        return make_experts(
            vllm_config, device, count, 2, hidden, width, FP8, prefix=name
        )

    yield make
    vllm_config.compilation_config.static_forward_context.clear()


def apply_experts(
    runner: Any, tokens: int, counts: list[int] | None, device: torch.device
) -> None:
    """Run the base's ``DeepGemmExperts`` on tokens, with each expert's count or not."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        ExpertTokensMetadata,
    )

    routed = runner.routed_experts
    experts = runner._quant_method.moe_kernel.impl.fused_experts.experts
    local, hidden, width = routed.w2_weight.shape
    metadata = (
        None
        if counts is None
        else ExpertTokensMetadata.make_from_list(counts, device=str(device))
    )
    shapes = experts.workspace_shapes(
        tokens, 2 * width, hidden, 2, local, local, metadata, routed.activation
    )
    workspaces = [
        torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes
    ]
    experts.apply(
        workspaces[2],
        torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=device),
        routed.w13_weight,
        routed.w2_weight,
        torch.empty(tokens, 2, device=device),
        torch.zeros(tokens, 2, dtype=torch.int64, device=device),
        routed.activation,
        local,
        None,
        torch.zeros(tokens, hidden // 128, device=device),
        None,
        workspaces[0],
        workspaces[1],
        metadata,
        False,
    )


def test_experts_whose_tokens_the_host_has_counted(
    experts: Callable[[int, int, int], Any],
    warmed: Warmed,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepEP's counts: every number of full blocks that its tokens can give."""
    limit, count = 600, 6
    runner = experts(count, 640, 384)
    kernel = runner._quant_method.moe_kernel.impl
    # DeepEP is not installed here; the class of the sender decides.
    sender = type("DeepEPHTPrepareAndFinalize", (type(kernel.prepare_finalize),), {})
    monkeypatch.setattr(kernel, "prepare_finalize", sender())
    built_since = warmed(torch.nn.ModuleList([runner]), limit)
    for tokens in range(1, limit + 1, 9):
        # All to two experts, or as evenly as it goes.
        apply_experts(runner, tokens, [tokens, tokens, 0, 0, 0, 0], device)
        share, rest = divmod(2 * tokens, count)
        even = [share + (number < rest) for number in range(count)]
        apply_experts(runner, tokens, even, device)
    assert built_since() == []


def test_experts_get_the_tokens_of_all_data_parallel_ranks(
    experts: Callable[[int, int, int], Any],
    warmed: Warmed,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elastic EP's ranks, which join: vLLM warms up again, and there is more to build.

    Each brings a whole step of its own.
    """
    limit, ranks = 96, 8
    runner = experts(8, 768, 640)
    model = torch.nn.ModuleList([runner])
    warmed(model, limit)

    group = types.SimpleNamespace(world_size=ranks, rank_in_group=0)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_dp_group", lambda: group)
    rows = {spec.rows for spec in make_plan(model, limit).specs}
    assert rows == {RowRange(1, limit * ranks)}
    built_since = warmed(model, limit)
    for tokens in range(1, limit * ranks + 1, 5):
        apply_experts(runner, tokens, None, device)
    assert built_since() == []


MEGABYTES = 1 << 20
EXPERTS = ExpertRouting(top_k=8, prefix_sum=True)
LARGE: list[GemmSpec | HcPrenormSpec] = [
    # The `lm_head` of Qwen3-8B.
    linear_spec(151936, 4096, rows=RowRange(1, 8192)),
    linear_spec(151936, 4096, rows=RowRange(1, 65536)),
    einsum_spec(16, 1024, 4096, 65536),
    masked_spec(4096, 7168, 32, 65536),
    hc_prenorm_spec(28672, 65536, SplitRule.BUCKETED),
    grouped_spec(4096, 7168, 32, rows=RowRange(1, 1024), routing=EXPERTS),
]


@pytest.mark.parametrize("spec", LARGE, ids=lambda spec: f"{spec.entry_point} {spec.k}")
@pytest.mark.parametrize("state", ["loaded", "freed", "moved"])
def test_memory_does_not_grow_with_the_layer_or_the_limit(
    spec: GemmSpec | HcPrenormSpec, state: str, device: torch.device
) -> None:
    """At most 256 MiB above what the layer holds, and none of it stays."""
    at = torch.device("cpu") if state == "moved" else device
    weights = weights_of(spec, at)
    if state == "freed":
        for tensor in weights:
            tensor.untyped_storage().resize_(0)
    backend = Backend(device, read_target(device), read_kernel_caches())
    held = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    calls, left = backend.run(spec, weights, every_row=False, listener=lambda *_: None)
    assert [call.failure for call in calls if call.failure] == []
    assert left == []
    peak = torch.cuda.max_memory_allocated(device) - held
    assert peak <= 256 * MEGABYTES
    assert resident_bytes(device) == held


def test_weights_that_cannot_stand_in_cheaply_are_a_row_and_no_gigabyte(
    device: torch.device,
) -> None:
    """An einsum reads the weights of every group, here 1 GiB that were freed."""
    spec = einsum_spec(64, 4096, 4096, 512)
    weights = weights_of(spec, torch.device("cpu"))
    backend = Backend(device, read_target(device), read_kernel_caches())
    held = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    (call,), left = backend.run(
        spec, weights, every_row=False, listener=lambda *_: None
    )
    assert torch.cuda.max_memory_allocated(device) == held
    assert left == []
    assert call.failure is not None
    assert "weights are not on the device" in call.failure
    assert "needs 1024 MiB, more than a warmup may take" in call.failure


@pytest.mark.parametrize("entry_point", ["linear", "experts"])
def test_a_driver_that_refuses_both_forms_costs_no_gigabyte(
    entry_point: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_GPU_REFUSE_OVERLAP", "1")
    spec = (
        linear_spec(151936, 4096)
        if entry_point == "linear"
        else grouped_spec(4096, 7168, 32)
    )
    backend = Backend(device, read_target(device), read_kernel_caches())
    held = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    calls, _ = backend.run(spec, None, every_row=False, listener=lambda *_: None)
    assert calls[0].failure is not None
    assert "weights are not on the device" in calls[0].failure
    assert torch.cuda.max_memory_allocated(device) - held <= 256 * MEGABYTES


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_driver_that_refuses_rows_over_each_other_gets_the_same_kernels(
    refused_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes that nothing else here has: a kernel is built once in a process."""
    odd = 64 if refused_first else 128
    specs = [
        einsum_spec(3, 896 + odd, 640, 512),
        hc_prenorm_spec(5 * 1024 + odd, 512, SplitRule.EXACT),
    ]
    built = []
    for refused in (refused_first, not refused_first):
        monkeypatch.setenv("STANDIN_GPU_REFUSE_OVERLAP", str(int(refused)))
        backend = Backend(device, read_target(device), read_kernel_caches())
        for spec in specs:
            calls, _ = backend.run(
                spec, None, every_row=False, listener=lambda *_: None
            )
            assert [call.failure for call in calls if call.failure] == []
            built.append(sum(len(call.built) for call in calls))
    assert min(built[:2]) > 0
    assert built[2:] == [0, 0]


def weights_of(
    spec: GemmSpec | HcPrenormSpec, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """What a layer with ``spec`` holds."""
    if isinstance(spec, HcPrenormSpec):
        return (torch.empty(spec.n, spec.k, device=device),)
    shape = (spec.groups, spec.n, spec.k)[-len(spec.weight_scale.shape) :]
    return (
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(spec.weight_scale.shape, device=device),
    )
