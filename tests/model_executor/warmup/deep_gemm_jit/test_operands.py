"""Operands have serving's shapes and strides, in memory that does not grow."""

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.operands import (
    Operands,
    allocate,
    choose_weights,
    dense_bytes,
)
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    ExpertRouting,
    ScaleLayout,
)

from ...real_layers import resident_bytes
from .specs import grouped_spec, linear_spec

CPU = torch.device("cpu")
SPEC = linear_spec(576, 512)


def held_bytes(operands: Operands) -> int:
    return sum(
        tensor.untyped_storage().nbytes()
        for tensor in (operands.activation, operands.output, operands.activation_scale)
    )


@pytest.mark.parametrize("overlapping", [True, False])
@pytest.mark.parametrize("rows", [1, 33, 100])
def test_shapes_are_serving_s(overlapping: bool, rows: int) -> None:
    operands = allocate(SPEC, 100, None, CPU, overlapping=overlapping)
    (a, _), d = operands.a(rows), operands.d(rows)
    assert (a.shape, a.dtype) == ((rows, 512), torch.float8_e4m3fn)
    assert (d.shape, d.dtype) == ((rows, 576), torch.bfloat16)
    strides = (16, 8) if overlapping else (512, 576)
    assert (a.stride(0), d.stride(0)) == strides
    assert a.stride(1) == d.stride(1) == 1


@pytest.mark.parametrize(
    ("layout", "shape", "stride"),
    [
        (ScaleLayout.ROW_MAJOR, (33, 4), (4, 1)),
        (ScaleLayout.COLUMN_MAJOR, (33, 4), (1, 33)),
        (ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED, (33, 4), (1, 36)),
        (ScaleLayout.PACKED_UE8M0, (33, 1), (1, 36)),
    ],
)
def test_the_scale_has_the_layout_of_the_spec(
    layout: ScaleLayout, shape: tuple[int, int], stride: tuple[int, int]
) -> None:
    spec = linear_spec(576, 512, activation_scale=layout)
    _, scale = allocate(spec, 100, None, CPU, overlapping=True).a(33)
    assert (tuple(scale.shape), scale.stride()) == (shape, stride)
    assert scale.dtype == (
        torch.int32 if layout is ScaleLayout.PACKED_UE8M0 else torch.float32
    )
    assert not scale.any()


def test_a_vocabulary_costs_megabytes_and_not_gigabytes() -> None:
    """Stock's output for this head is 8 GiB."""
    head = linear_spec(262144, 5376)
    assert 16384 * dense_bytes(head) > 8 << 30
    operands = allocate(head, 16384, None, CPU, overlapping=True)
    assert held_bytes(operands) < 4 << 20


def test_the_layer_s_own_weights_are_used_where_they_are_there() -> None:
    weights = (
        torch.empty(576, 512, dtype=torch.float8_e4m3fn),
        torch.ones(5, 4),
    )
    operands = allocate(SPEC, 10, weights, CPU, overlapping=True)
    assert operands.weight is weights[0]
    assert operands.weight_scale is weights[1]


def test_freed_weights_are_replaced_from_the_spec_alone() -> None:
    weight = torch.empty(576, 512, dtype=torch.float8_e4m3fn)
    weight.untyped_storage().resize_(0)
    operands = allocate(SPEC, 10, (weight, torch.ones(5, 4)), CPU, overlapping=True)
    assert operands.weight.shape == (576, 512)
    assert operands.weight.untyped_storage().nbytes() > 0
    assert operands.weight_scale.shape == (5, 4)


@pytest.mark.parametrize(("overlapping", "stride"), [(True, 16), (False, 512)])
def test_the_weight_s_substitute_has_the_form_that_is_asked_for(
    overlapping: bool, stride: int
) -> None:
    operands = allocate(SPEC, 10, None, CPU, overlapping=overlapping)
    assert (operands.weight.shape, operands.weight.stride(0)) == ((576, 512), stride)


@pytest.mark.parametrize("groups", [1, 16])
def test_freed_weights_of_a_group_cost_one_of_them(
    groups: int, device: torch.device
) -> None:
    before = resident_bytes(device)
    weight, scale = choose_weights(
        grouped_spec(4096, 7168, groups), None, device, overlapping=True
    )
    assert weight.shape == (groups, 4096, 7168)
    assert resident_bytes(device) - before < 4096 * 7168 + (1 << 20)
    del weight, scale
    assert resident_bytes(device) == before


def test_weights_on_another_device_are_replaced() -> None:
    weights = (
        torch.empty(576, 512, dtype=torch.float8_e4m3fn, device="meta"),
        torch.ones(5, 4, device="meta"),
    )
    operands = allocate(SPEC, 10, weights, CPU, overlapping=True)
    assert operands.weight.device == CPU


@pytest.mark.parametrize(("prefix_sum", "entries"), [(True, 16), (False, 256)])
def test_a_grouped_gemm_gets_its_layout(
    prefix_sum: bool, entries: int, device: torch.device
) -> None:
    grouped = grouped_spec(576, 512, routing=ExpertRouting(8, prefix_sum))
    operands = allocate(grouped, 256, None, device, overlapping=True)
    assert operands.weight.shape == (16, 576, 512)
    assert operands.weight.stride() == (576 * 512, 512, 1)
    assert operands.weight.dtype == torch.float8_e4m3fn
    assert operands.grouped_layout is not None
    assert operands.grouped_layout.shape == (entries,)
    assert not operands.grouped_layout.any()


def test_flashinfer_gets_bfloat16_and_no_scale() -> None:
    spec = linear_spec(
        576,
        512,
        entry_point=EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM,
        activation_scale=ScaleLayout.NONE,
    )
    a, scale = allocate(spec, 31, None, CPU, overlapping=False).a(31)
    assert (a.shape, a.dtype) == ((31, 512), torch.bfloat16)
    assert a.is_contiguous()
    assert scale.numel() == 0
