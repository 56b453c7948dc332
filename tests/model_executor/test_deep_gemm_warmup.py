"""Layers register what they run; the warmup builds that and names the rest."""

import gc
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    FP8BlockParams,
)
from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import (
    DeepGemmFp8BlockScaledMMKernel,
    fp8_gemm_nt,
    shape_problem,
)
from vllm.model_executor.warmup.deep_gemm_jit.plan import (
    Plan,
    Registered,
    Skipped,
    Unregistered,
    make_plan,
)
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EinsumSpec,
    EntryPoint,
    GemmSpec,
    RowRange,
)
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

from .real_layers import (
    COMPRESSED_TENSORS,
    FP8,
    INC,
    MODELOPT,
    engine,
    load,
    quantization_config,
)
from .warmup.deep_gemm_jit.specs import gemms, linear_spec

LIMIT = 512
MakeLinear = Callable[..., torch.nn.Module]
WRAPPER = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
ORIGINS = {"fp8": FP8, "compressed-tensors": COMPRESSED_TENSORS, "modelopt": MODELOPT}


def model_of(**layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict(layers)


def plan_of(**layers: torch.nn.Module) -> Plan:
    return make_plan(model_of(**layers), LIMIT)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select DeepGEMM for every row count."""
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", WRAPPER)


# Registration, by origin


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("kernel", ["plain", "wrapper"])
def test_a_layer_of_every_origin_registers(
    linear: MakeLinear, origin: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", WRAPPER if kernel == "plain" else "")
    (outcome,) = plan_of(proj=load(linear(256, 128, ORIGINS[origin]))).outcomes
    assert isinstance(outcome, Registered)
    assert {(spec.n, spec.k) for spec in gemms(outcome.specs)} == {(256, 128)}
    rows = {spec.entry_point: spec.rows for spec in outcome.specs}
    if kernel == "plain":
        assert rows == {EntryPoint.FP8_GEMM_NT: RowRange(1, LIMIT)}
    else:
        assert rows == {
            EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: RowRange(1, 31),
            EntryPoint.FP8_GEMM_NT: RowRange(32, LIMIT),
        }


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (16, {EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: RowRange(1, 16)}),
        (
            32,
            {
                EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: RowRange(1, 31),
                EntryPoint.FP8_GEMM_NT: RowRange(32, 32),
            },
        ),
    ],
)
def test_the_wrapper_sends_each_kernel_its_own_rows(
    linear: MakeLinear, limit: int, expected: dict[EntryPoint, RowRange]
) -> None:
    model = model_of(proj=load(linear(256, 128, FP8)))
    (outcome,) = make_plan(model, limit).outcomes
    assert isinstance(outcome, Registered)
    assert {spec.entry_point: spec.rows for spec in outcome.specs} == expected


def test_batch_invariance_sends_all_rows_to_deep_gemm(
    linear: MakeLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = load(linear(256, 128, FP8))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Registered)
    assert {spec.rows for spec in outcome.specs} == {RowRange(1, LIMIT)}
    assert {spec.entry_point for spec in outcome.specs} == {EntryPoint.FP8_GEMM_NT}


def test_a_quark_layer_registers(linear: MakeLinear, plain: None) -> None:
    weight = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_block",
        "block_size": [128, 128],
        "is_dynamic": False,
        "symmetric": True,
    }
    activation = {
        "dtype": "fp8_e4m3",
        "qscheme": "per_group",
        "group_size": 128,
        "is_dynamic": True,
        "symmetric": True,
    }
    quark = {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "order"},
        "global_quant_config": {
            "weight": weight,
            "input_tensors": activation,
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": [],
    }
    (outcome,) = plan_of(proj=load(linear(256, 128, quark))).outcomes
    assert isinstance(outcome, Registered)


def test_an_online_quantized_layer_registers(
    linear: MakeLinear, plain: None, vllm_config: Any, device: torch.device
) -> None:
    from vllm.model_executor.layers.quantization.online.fp8 import (
        Fp8PerBlockOnlineLinearMethod,
    )

    layer = linear(256, 128, FP8)
    for name in list(layer._parameters):
        del layer._parameters[name]
    with engine(vllm_config, device):
        layer.quant_method = method = Fp8PerBlockOnlineLinearMethod()
        method.create_weights(
            layer, 128, [256], 128, 256, torch.bfloat16, weight_loader=None
        )
    layer.weight = torch.nn.Parameter(
        torch.ones(256, 128, dtype=torch.bfloat16, device=device), requires_grad=False
    )
    (outcome,) = plan_of(proj=load(layer)).outcomes
    assert isinstance(outcome, Registered)


def test_a_block_fp8_lm_head_registers(
    vllm_config: Any, device: torch.device, plain: None
) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    with engine(vllm_config, device):
        head = ParallelLMHead(
            512,
            256,
            quant_config=quantization_config(
                {
                    **COMPRESSED_TENSORS,
                    "config_groups": {
                        "group_0": {
                            **COMPRESSED_TENSORS["config_groups"]["group_0"],
                            "targets": ["re:.*lm_head"],
                        }
                    },
                }
            ),
            prefix="lm_head",
        )
    (outcome,) = plan_of(lm_head=load(head)).outcomes
    assert isinstance(outcome, Registered)
    assert {(spec.n, spec.k) for spec in gemms(outcome.specs)} == {(512, 256)}


@pytest.mark.parametrize("n", [64, 192, 576, 2112])
def test_n_divisible_by_64_only_is_covered(
    linear: MakeLinear, plain: None, n: int
) -> None:
    layer = load(linear(n, 7168, FP8))
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Registered)
    assert gemms(outcome.specs)[0].weight_scale.shape == (-(-n // 128), 56)


@pytest.mark.parametrize(("n", "k"), [(2072, 7168), (100, 7168), (2048, 7232)])
def test_selection_and_warmup_share_one_predicate(
    linear: MakeLinear, plain: None, n: int, k: int
) -> None:
    """G08: what DeepGEMM does not take is not selected, and not warmed."""
    problem = shape_problem((n, k))
    assert problem is not None
    assert f"N={n} K={k}" in problem
    (outcome,) = plan_of(proj=load(linear(n, k, FP8))).outcomes
    assert isinstance(outcome, Skipped)
    assert "it runs on" in outcome.reason


def test_the_predicate_takes_shapes_and_not_tensors() -> None:
    """G24."""
    assert shape_problem((2048, 2048)) is None
    tensor = torch.empty(2048, 2048, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"pass tensor\.shape"):
        shape_problem(tensor)


def test_modelopt_is_warmed_with_its_padded_last_block(
    linear: MakeLinear, plain: None
) -> None:
    (outcome,) = plan_of(proj=load(linear(2112, 256, MODELOPT))).outcomes
    assert isinstance(outcome, Registered)
    assert gemms(outcome.specs)[0].n == 2176


def test_a_block_shape_given_as_a_tuple_counts(linear: MakeLinear, plain: None) -> None:
    layer = load(linear(256, 128, FP8))
    layer.weight_block_size = (128, 128)
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Registered)


def test_another_block_size_is_skipped_with_the_reason(
    linear: MakeLinear, plain: None
) -> None:
    layer = load(linear(256, 128, FP8))
    layer.weight_block_size = [1, 32]
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Skipped)
    assert "[1, 32]" in outcome.reason


def test_a_checkpoint_with_other_blocks_is_not_given_to_deep_gemm(
    linear: MakeLinear,
) -> None:
    layer = linear(256, 256, {**FP8, "weight_block_size": [128, 64]})
    config = layer.quant_method.fp8_linear.config
    accepted, reason = DeepGemmFp8BlockScaledMMKernel.can_implement(config)
    assert not accepted
    assert "128x64" in str(reason)
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Skipped)


def test_the_quantization_config_can_switch_deep_gemm_off(
    linear: MakeLinear, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G17: the selected kernel is the only authority, and it is another one."""
    switched_off = quantization_config(FP8)
    switched_off.use_deep_gemm = False
    monkeypatch.setattr(vllm_config, "quant_config", switched_off)
    (outcome,) = plan_of(proj=load(linear(256, 128, FP8))).outcomes
    assert isinstance(outcome, Skipped)


def test_an_inc_layer_registers(linear: MakeLinear, plain: None) -> None:
    """Its linear method lies three steps deep: scheme, linear_method, fp8_linear."""
    layer = linear(256, 128, INC)
    assert type(layer.quant_method).__name__ == "INCLinearMethod"
    (bypassed,) = plan_of(proj=layer).outcomes
    assert isinstance(bypassed, Registered)
    assert "INC" not in str(bypassed.bypassed)
    (outcome,) = plan_of(proj=load(layer)).outcomes
    assert isinstance(outcome, Registered)


def test_bmm_layers_are_converted_and_registered_with_their_einsum(
    linear: MakeLinear, plain: None
) -> None:
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe

    layer = linear(256, 384, FP8)
    layer.is_bmm, layer.bmm_batch_size = True, 2
    (bypassed,) = plan_of(wo_a=layer).outcomes
    assert isinstance(bypassed, Unregistered)
    load(layer)
    assert layer.weight.shape == (2, 128, 384)
    plan = plan_of(wo_a=layer)
    (spec,) = plan.specs
    assert isinstance(spec, EinsumSpec)
    assert (spec.groups, spec.n, spec.k) == (2, 128, 384)
    assert spec.rows == RowRange(1, LIMIT)
    assert (spec.recipe, spec.weight_scale.shape) == (
        compute_fp8_einsum_recipe()[0],
        (2, 1, 3),
    )
    weights = plan.weights[spec]
    assert weights is not None
    assert weights[0].shape == (2, 128, 384)


def test_bmm_layers_under_the_wrapper_run_all_rows_on_deep_gemm(
    linear: MakeLinear,
) -> None:
    layer = linear(256, 384, FP8)
    layer.is_bmm, layer.bmm_batch_size = True, 2
    (spec,) = plan_of(wo_a=load(layer)).specs
    assert (spec.entry_point, spec.rows) == (EntryPoint.FP8_EINSUM, RowRange(1, LIMIT))


def test_marlin_layers_register_nothing(
    linear: MakeLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.kernels.linear import MarlinFP8ScaledMMLinearKernel

    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel,DeepGemmFp8BlockScaledMMKernel,"
        "CutlassFp8BlockScaledMMKernel,B12xFp8BlockScaledMMKernel,"
        "HummingFP8ScaledMMLinearKernel",
    )
    monkeypatch.setenv("VLLM_TEST_FORCE_FP8_MARLIN", "1")
    layer = linear(256, 128, FP8)
    assert isinstance(layer.quant_method.fp8_linear, MarlinFP8ScaledMMLinearKernel)
    load(layer)
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Skipped)
    assert "Marlin" in outcome.reason


# The scale


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_the_scale_is_found_under_either_name(name: str) -> None:
    layer = torch.nn.Module()
    layer.weight = torch.empty(256, 128, dtype=torch.float8_e4m3fn)
    scale = torch.ones(2, 1)
    setattr(layer, name, scale)
    params = FP8BlockParams.from_layer(layer)
    assert params.block_scale_attr == name
    assert params.block_scale is scale


def test_a_kernel_with_names_of_its_own_is_asked_and_not_probed(
    linear: MakeLinear, plain: None
) -> None:
    """G06: the accessor is the kernel's, so a third name works."""
    layer = load(linear(256, 128, FP8))
    provider = layer.deep_gemm_warmup_provider

    class ThirdName(DeepGemmFp8BlockScaledMMKernel):
        def _get_layer_params(
            self, layer: torch.nn.Module, **kwargs: Any
        ) -> FP8BlockParams:
            return FP8BlockParams(
                weight=layer.weight,
                weight_scale_inv=layer.renamed,
                weight_scale=None,
                input_scale=None,
                input_scale_ub=None,
            )

    layer.renamed = layer.weight_scale_inv
    del layer._parameters["weight_scale_inv"]
    provider.__class__ = ThirdName
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Registered)
    assert gemms(outcome.specs)[0].weight_scale.shape == (2, 1)


def test_no_scale_is_an_error_that_names_the_layer_and_all_shapes(
    linear: MakeLinear, plain: None
) -> None:
    layer = linear(256, 128, FP8, prefix="layers.7.mlp.up")
    del layer._parameters["weight_scale_inv"]
    with pytest.raises(ValueError) as error:
        load(layer)
    message = str(error.value)
    assert "layers.7.mlp.up" in message
    assert "weight (256, 128)" in message
    assert "weight_scale_inv absent, weight_scale absent" in message


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (torch.ones(3, 1), r"expected \(2, 1\)"),
        (torch.ones(2, 1, dtype=torch.bfloat16), "bfloat16, expected float32"),
    ],
    ids=["rows", "dtype"],
)
def test_a_scale_that_does_not_fit_is_refused_while_loading(
    linear: MakeLinear, plain: None, scale: torch.Tensor, expected: str
) -> None:
    layer = linear(256, 128, FP8, prefix="layers.7.mlp.up")
    layer.weight_scale_inv.data = scale.to(layer.weight.device)
    with pytest.raises(ValueError, match=expected) as error:
        load(layer)
    assert "layers.7.mlp.up" in str(error.value)
    assert not hasattr(layer, "deep_gemm_warmup_provider")


def test_two_scales_are_named_and_the_loaders_own_is_used(
    linear: MakeLinear, plain: None, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    layer = linear(256, 128, FP8, prefix="layers.7.mlp.up")
    layer.weight_scale = torch.ones(2, 1, device=layer.weight.device)
    load(layer)
    assert "layers.7.mlp.up" in caplog_vllm.text
    assert "both names are set; weight_scale_inv is used" in caplog_vllm.text
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Registered)


# Layers that should have registered


def test_a_loader_that_bypasses_the_hook_is_named(
    linear: MakeLinear, plain: None
) -> None:
    """G07: the class of fault, silence, is closed.

    ModelOpt's scale has four dimensions until the hook has run: nothing to warm by.
    """
    plan = plan_of(
        loaded=load(linear(2048, 2048, MODELOPT)), bypassed=linear(2048, 2048, MODELOPT)
    )
    (unregistered,) = plan.select(Unregistered)
    assert unregistered.name == "bypassed"
    assert unregistered.entry_points == (EntryPoint.FP8_GEMM_NT,)
    assert "process_weights_after_loading did not run" in unregistered.reason
    assert "block scale (16, 1, 16, 1) is not a matrix" in unregistered.reason


def test_a_bypassed_layer_is_warmed_by_what_its_kernel_says(
    linear: MakeLinear,
) -> None:
    layer = linear(256, 128, FP8)
    (bypassed,) = plan_of(proj=layer).outcomes
    assert isinstance(bypassed, Registered)
    assert "FlashInferFp8DeepGEMMDynamicBlockScaledKernel" in str(bypassed.bypassed)
    (stamped,) = plan_of(proj=load(layer)).outcomes
    assert isinstance(stamped, Registered)
    assert stamped.bypassed is None
    assert bypassed.specs == stamped.specs


def test_a_bypassed_layer_is_warmed_and_named(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    model = model_of(proj=linear(704, 384, FP8))
    report = run(model, LIMIT, tmp_path, monkeypatch)
    assert report["kernels"]["built"] > 0
    assert report["layers"]["bypassed"] == ["proj"]
    (line,) = {text for text in caplog_vllm.messages if "not registered" in text}
    assert "(proj): not registered: DeepGemmFp8BlockScaledMMKernel" in line
    assert "warmed by what that kernel says" in line


def test_weights_that_a_cache_daemon_converted_are_named(
    linear: MakeLinear, plain: None, vllm_config: Any, device: torch.device
) -> None:
    """`--load-format ipc_cache` runs vLLM's hook, which then leaves ours out."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.utils import weights_already_processed

    model = model_of(proj=linear(256, 128, FP8))
    with weights_already_processed():
        process_weights_after_loading(model, vllm_config.model_config, device)
    (outcome,) = make_plan(model, LIMIT).outcomes
    assert isinstance(outcome, Registered)
    assert "DeepGemmFp8BlockScaledMMKernel was chosen" in str(outcome.bypassed)


def test_a_provider_that_raises_is_one_row_and_the_rest_goes_on(
    linear: MakeLinear, plain: None
) -> None:
    class Broken:
        def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> None: ...

        def get_deep_gemm_warmup_specs(
            self, layer: torch.nn.Module, max_tokens: int
        ) -> None:
            raise IndexError("no idea")

    broken = torch.nn.Module()
    broken.deep_gemm_warmup_provider = Broken()
    nothing = torch.nn.Module()
    nothing.deep_gemm_warmup_provider = object()
    plan = plan_of(a=broken, b=nothing, c=load(linear(256, 128, FP8)))
    assert [outcome.name for outcome in plan.select(Unregistered)] == ["a", "b"]
    assert "no idea" in plan.select(Unregistered)[0].reason
    assert [outcome.name for outcome in plan.select(Registered)] == ["c"]


def specs_then_error() -> Iterator[GemmSpec]:
    yield linear_spec()
    raise IndexError("no idea")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "TypeError: 'NoneType' object is not iterable"),
        ([], "named nothing that it runs"),
        ("fp8_gemm_nt", "named a str in place of a Spec"),
        ([[linear_spec()]], "named a list in place of a Spec"),
        ([linear_spec(rows=RowRange(1, 0))], "rows 1..0"),
        ([linear_spec(n=0)], "N=0 K=7168"),
        ([linear_spec(entry_point="fp9")], "takes no GemmSpec (fp9 N="),
        ([linear_spec(entry_point=EntryPoint.FP8_EINSUM)], "takes no GemmSpec"),
        (specs_then_error(), "IndexError: no idea"),
    ],
    ids=[
        "None",
        "empty",
        "a string",
        "a list",
        "no rows",
        "no columns",
        "an unknown entry point",
        "another's entry point",
        "generator",
    ],
)
def test_an_answer_that_is_no_specs_is_one_row_and_the_rest_goes_on(
    linear: MakeLinear, plain: None, answer: Any, reason: str
) -> None:
    class Odd:
        def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> None: ...

        def get_deep_gemm_warmup_specs(
            self, layer: torch.nn.Module, max_tokens: int
        ) -> Any:
            return answer

    odd = torch.nn.Module()
    odd.deep_gemm_warmup_provider = Odd()
    plan = plan_of(odd=odd, good=load(linear(256, 128, FP8)))
    (unheard,) = plan.select(Unregistered)
    assert unheard.name == "odd"
    assert "Odd" in unheard.reason
    assert reason in unheard.reason
    assert [outcome.name for outcome in plan.select(Registered)] == ["good"]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_deep_gemm_or_nobody_takes_is_a_row_and_the_rest_goes_on(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    """A shape that the library refuses, and an entry point that there is not."""

    class Odd:
        def __init__(self, spec: GemmSpec) -> None:
            self.spec = spec

        def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> None: ...

        def get_deep_gemm_warmup_specs(
            self, layer: torch.nn.Module, max_tokens: int
        ) -> list[GemmSpec]:
            return [self.spec]

    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", str(workers))
    rows, n = RowRange(1, 64), 2304 + 64 * workers
    odd = {
        "refused": linear_spec(n, 448, rows=rows),
        "unknown": linear_spec(n, 512, rows=rows, entry_point="fp9_gemm"),
    }
    layers = {name: torch.nn.Module() for name in odd}
    for name, spec in odd.items():
        layers[name].deep_gemm_warmup_provider = Odd(spec)
    good = load(linear(n, 256, FP8))
    report = run(model_of(**layers, good=good), 64, tmp_path, monkeypatch)
    (unheard,) = report["layers"]["unregistered"]
    assert unheard["name"] == "unknown"
    (refused,) = [spec for spec in report["specs"] if spec["layers"] == ["refused"]]
    assert refused["failed"]
    assert not refused["built"]
    rest = [spec for spec in report["specs"] if spec["layers"] == ["good"]]
    assert len(rest) == len(report["specs"]) - 1
    assert sum(len(spec["built"]) for spec in rest) > 0
    assert not any(spec["failed"] for spec in rest)


def test_a_module_that_raises_when_it_is_looked_at_is_one_row(
    linear: MakeLinear, plain: None
) -> None:
    def not_yet() -> None:
        raise IndexError("not yet")

    closed = linear(256, 128, FP8)
    closed.quant_method.fp8_linear.deep_gemm_kernel = not_yet
    plan = plan_of(closed=closed, good=load(linear(256, 128, FP8)))
    (unheard,) = plan.select(Unregistered)
    assert unheard.name == "closed"
    assert "raised IndexError: not yet" in unheard.reason
    assert [outcome.name for outcome in plan.select(Registered)] == ["good"]


# Loading more than once


def test_the_last_load_is_the_truth(linear: MakeLinear, plain: None) -> None:
    layer = load(linear(256, 128, FP8))
    first = plan_of(proj=layer)
    load(layer)
    assert plan_of(proj=layer) == first


def test_a_reload_onto_another_kernel_takes_the_stamp_back(
    linear: MakeLinear, plain: None
) -> None:
    from vllm.model_executor.kernels.linear import TritonFp8BlockScaledMMKernel

    layer = load(linear(256, 128, FP8))
    method = layer.quant_method
    method.fp8_linear = TritonFp8BlockScaledMMKernel(method.fp8_linear.config)
    load(layer)
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Skipped)
    assert "TritonFp8BlockScaledMMKernel" in outcome.reason


def test_a_kernel_that_leaves_a_stale_stamp_is_seen_through(
    linear: MakeLinear, plain: None
) -> None:
    from vllm.model_executor.kernels.linear import TritonFp8BlockScaledMMKernel

    layer = load(linear(256, 128, FP8))
    method = layer.quant_method
    method.fp8_linear = TritonFp8BlockScaledMMKernel(method.fp8_linear.config)
    (outcome,) = plan_of(proj=layer).outcomes
    assert isinstance(outcome, Skipped)


def test_tied_and_replaced_parameters_double_nothing(
    linear: MakeLinear, plain: None
) -> None:
    one, other = load(linear(256, 128, FP8)), load(linear(256, 128, FP8))
    other.weight, other.weight_scale_inv = one.weight, one.weight_scale_inv
    replaced = load(linear(256, 128, FP8))
    replaced.weight = torch.nn.Parameter(
        replaced.weight.detach().clone(), requires_grad=False
    )
    plan = plan_of(one=one, other=other, replaced=replaced, again=one)
    registered = plan.select(Registered)
    assert [layer.name for layer in registered] == ["one", "other", "replaced"]
    assert all(plan.specs == layer.specs for layer in registered)


# The engine's entry


def run(
    model: torch.nn.Module,
    limit: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    path = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(path))
    deep_gemm_warmup(model, limit)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_three_origins_are_warmed_and_other_blocks_are_left_out(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G01."""
    other_block = load(linear(256, 128, FP8))
    other_block.weight_block_size = [1, 32]
    bmm = linear(256, 128, FP8)
    bmm.is_bmm, bmm.bmm_batch_size = True, 2
    model = model_of(
        fp8=load(linear(256, 128, FP8)),
        ct=load(linear(256, 128, COMPRESSED_TENSORS)),
        mo=load(linear(256, 128, MODELOPT)),
        mx=other_block,
        wo_a=load(bmm),
    )
    report = run(model, LIMIT, tmp_path, monkeypatch)
    assert report["layers"]["registered"] == 4
    assert [skip["name"] for skip in report["layers"]["skipped"]] == ["mx"]
    assert all(skip["reason"] for skip in report["layers"]["skipped"])
    assert report["layers"]["unregistered"] == []
    assert report["kernels"]["built"] > 0


def test_a_second_engine_with_a_larger_limit_gets_its_kernels(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(proj=load(linear(1024, 1024, FP8)))
    assert run(model, 32, tmp_path, monkeypatch)["kernels"]["built"] > 0
    assert run(model, 32, tmp_path, monkeypatch)["kernels"]["built"] == 0
    assert run(model, 8192, tmp_path, monkeypatch)["kernels"]["built"] > 0


def test_a_model_without_fp8_layers_is_left_alone(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """G15, G16: no library call, no import, no log line, no report."""
    path = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(path))
    deep_gemm_warmup(torch.nn.Linear(2048, 2048, dtype=torch.bfloat16), LIMIT)
    assert caplog_vllm.text == ""
    assert not path.exists()


def test_all_layers_on_another_kernel_is_a_visible_warning(
    linear: MakeLinear,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """G02."""
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel,DeepGemmFp8BlockScaledMMKernel",
    )
    deep_gemm_warmup(model_of(proj=load(linear(256, 128, FP8))), LIMIT)
    assert "none is registered" in caplog_vllm.text


def test_strictness_ends_the_start_and_names_the_layer(
    linear: MakeLinear, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    with pytest.raises(RuntimeError, match="bypassed"):
        deep_gemm_warmup(model_of(bypassed=linear(256, 128, MODELOPT)), LIMIT)


def test_what_goes_wrong_on_another_rank_is_one_line_and_a_report(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """All is well there: nothing is said, and the report is the first rank's."""
    groups = "vllm.distributed.parallel_state"
    monkeypatch.setattr(f"{groups}.get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(tmp_path / "report.html"))
    layer = load(linear(256, 128, FP8))
    caplog_vllm.clear()
    deep_gemm_warmup(model_of(proj=layer), LIMIT)
    assert "DeepGEMM warmup" not in caplog_vllm.text
    assert list(tmp_path.iterdir()) == []
    silent = torch.nn.Module()
    silent.deep_gemm_warmup_provider = object()
    deep_gemm_warmup(model_of(one=silent, proj=layer), LIMIT)
    said = {r.getMessage() for r in caplog_vllm.records if r.levelname == "WARNING"}
    (line,) = [line for line in said if "DeepGEMM warmup" in line]
    assert line.startswith("rank 0: DeepGEMM warmup (one): not registered: object")
    assert [path.name for path in tmp_path.iterdir()] == ["report-rank0.html"]


def test_a_report_that_cannot_be_written_costs_nothing_else(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(blocker / "report.json"))
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    deep_gemm_warmup(model_of(proj=load(linear(256, 128, FP8))), LIMIT)
    assert "DeepGEMM warmup report" in caplog_vllm.text
    assert str(blocker) in caplog_vllm.text


def test_a_warmup_that_breaks_does_not_end_the_start(
    linear: MakeLinear,
    plain: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """G16: without a device nothing can be built; the engine decides what then."""
    model = model_of(proj=load(linear(256, 128, FP8)))

    def no_device() -> int:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "current_device", no_device)
    deep_gemm_warmup(model, LIMIT)
    assert "no device; the engine starts" in caplog_vllm.text
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    with pytest.raises(RuntimeError, match="no device"):
        deep_gemm_warmup(model, LIMIT)


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_driver_that_refuses_rows_over_each_other_gets_the_same_kernels(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    refused_first: bool,
) -> None:
    """Either form builds all that the other one needs, and gives its memory back."""
    model = model_of(proj=load(linear(832 if refused_first else 960, 640, FP8)))
    # What tests before this one left.
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()
    built = []
    for refused in (refused_first, not refused_first):
        monkeypatch.setenv("STANDIN_GPU_REFUSE_OVERLAP", str(int(refused)))
        report = run(model, 8192, tmp_path, monkeypatch)
        assert report["kernels"]["failed"] == 0
        built.append(report["kernels"]["built"])
        if refused:
            assert torch.cuda.mem_get_info() == before
    assert built[0] > 0
    assert built[1] == 0


def test_dense_rows_that_do_not_fit_are_named_with_their_size(
    linear: MakeLinear,
    plain: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("STANDIN_GPU_REFUSE_OVERLAP", "1")
    layer = load(linear(256 << 10, 128, FP8))
    deep_gemm_warmup(model_of(lm_head=layer), 512 << 10)
    lines = [line for line in caplog_vllm.messages if "calls failed" in line]
    assert lines
    assert all("N=262144 K=128" in line and "not warmed" not in line for line in lines)
    assert all(len(line) < 2000 for line in lines)
    # No spec has less memory than the one before it.
    assert len({re.findall(r"first at M=\d+", line)[0] for line in lines}) == 1
    assert all(re.search(r"needs \d{3} MiB, more than a", line) for line in lines)


def test_a_list_of_plugins_without_ours_costs_the_toolchain_and_no_kernel(
    linear: MakeLinear,
    plain: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.plugins import load_plugins_by_group

    loaded = load_plugins_by_group("vllm.general_plugins")
    assert "deep_gemm_warmup" in loaded
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert load_plugins_by_group("vllm.general_plugins") == {}
    model = model_of(proj=load(linear(1088, 640, FP8)))
    report = run(model, LIMIT, tmp_path, monkeypatch)
    assert report["kernels"]["built"] > 0
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "Relax")
    with pytest.raises(ValueError, match="VLLM_DEEP_GEMM_WARMUP"):
        deep_gemm_warmup(model, LIMIT)


def test_a_packed_scale_is_refused_by_name_on_hopper(device: torch.device) -> None:
    """G23."""
    weight = torch.empty(256, 512, dtype=torch.float8_e4m3fn, device=device)
    weight_scale = torch.ones(2, 4, device=device)
    a = torch.empty(33, 512, dtype=torch.float8_e4m3fn, device=device)
    d = torch.empty(33, 256, dtype=torch.bfloat16, device=device)
    packed = torch.zeros(33, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"activation scale \(int32 \(33, 1\)"):
        fp8_gemm_nt((a, packed), (weight, weight_scale), d)
    fp8_gemm_nt((a, torch.ones(33, 4, device=device)), (weight, weight_scale), d)


def test_four_shapes_of_a_model_under_the_wrapper(linear: MakeLinear) -> None:
    """G02."""
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    model = model_of(**{f"l{n}x{k}": load(linear(n, k, FP8)) for n, k in shapes})
    plan = make_plan(model, 8192)
    assert len(plan.select(Registered)) == 4
    assert {(spec.n, spec.k) for spec in gemms(plan.specs)} == set(shapes)
    assert {spec.entry_point for spec in plan.specs} == {
        EntryPoint.FP8_GEMM_NT,
        EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM,
    }
