"""Each entry point has its strategy, and the calls it makes miss no shape."""

import dataclasses
import inspect

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.entry_points import STRATEGIES
from vllm.model_executor.warmup.deep_gemm_jit.left_out import LEFT_OUT
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    ExpertRouting,
    RowRange,
    SplitRule,
    Target,
)
from vllm.utils import deep_gemm as deep_gemm_utils

from .specs import (
    grouped_spec,
    hc_prenorm_spec,
    linear_spec,
    logits_spec,
    masked_spec,
    metadata_spec,
)

H100 = Target(9, 0, 132)


def test_every_entry_point_has_a_strategy() -> None:
    assert set(STRATEGIES) == set(EntryPoint)


def test_what_vllm_can_call_is_warmed_or_knowingly_left_out() -> None:
    """G03: each function of the base's wrapper that reaches into the library."""
    reaching = {
        name
        for name, function in inspect.getmembers(deep_gemm_utils, inspect.isfunction)
        if function.__module__ == deep_gemm_utils.__name__
        and not name.startswith("_")
        and any(text in inspect.getsource(function) for text in ("_impl", "_lazy_init"))
    }
    warmed = set(EntryPoint) - {
        EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM,
        EntryPoint.FLASHINFER_CUTLASS_FUSED_MOE,
    }
    assert reaching == warmed | set(LEFT_OUT)
    assert not warmed & set(LEFT_OUT)


def test_what_serving_expects_of_an_expert_is_called() -> None:
    strategy = STRATEGIES[EntryPoint.FP8_M_GROUPED_GEMM_NT_MASKED]

    def expected(rows: RowRange) -> list[int]:
        spec = dataclasses.replace(masked_spec(4096, 7168, 9, 100), rows=rows)
        return [s.rows for s in strategy.shapes(spec, H100, every_row=False)]

    assert expected(RowRange(16, 100)) == [16, 32, 48, 64, 80, 96, 100]
    assert expected(RowRange(16, 64)) == [16, 32, 48, 64]
    # Without data-parallel ranks, and with fewer rows than a step.
    assert expected(RowRange(100, 100)) == [100]
    assert expected(RowRange(8, 8)) == [8]


@pytest.mark.parametrize("splits", SplitRule)
def test_each_number_of_splits_is_called_once(splits: SplitRule) -> None:
    strategy = STRATEGIES[EntryPoint.TF32_HC_PRENORM_GEMM]
    spec = hc_prenorm_spec(16384, 8192, splits)
    sampled, every = (
        strategy.shapes(spec, H100, every_row=every_row) for every_row in (False, True)
    )
    assert len(every) == 8192
    assert sampled == list({s.splits: s for s in reversed(every)}.values())[::-1]


@pytest.mark.parametrize("every_row", [False, True])
def test_flashinfer_is_called_with_each_of_its_few_rows(every_row: bool) -> None:
    """Its windows are its own, and it takes no strides."""
    strategy = STRATEGIES[EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM]
    spec = linear_spec(rows=RowRange(1, 31))
    shapes = strategy.shapes(spec, H100, every_row=every_row)
    assert [shape.rows for shape in shapes] == list(range(1, 32))
    assert not strategy.takes_strided_rows


@pytest.mark.parametrize(("groups", "top_k"), [(128, 8), (16, 1), (256, 8)])
@pytest.mark.parametrize("rows", [RowRange(1, 700), RowRange(37, 38)], ids=str)
def test_sampled_tokens_give_the_padded_totals_of_all_tokens(
    groups: int, top_k: int, rows: RowRange
) -> None:
    strategy = STRATEGIES[EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS]
    routing = ExpertRouting(top_k, prefix_sum=True)
    spec = grouped_spec(groups=groups, rows=rows, routing=routing)
    sampled, every = (
        strategy.shapes(spec, H100, every_row=every_row) for every_row in (False, True)
    )
    assert sampled == list(dict.fromkeys(every))


@pytest.mark.parametrize(
    ("tokens", "last"), [(3, 2 * 3 + 16 * 127), (1 << 20, 1024 * 128)]
)
def test_counted_tokens_give_every_number_of_full_blocks(
    tokens: int, last: int
) -> None:
    strategy = STRATEGIES[EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS]
    routing = ExpertRouting(2, prefix_sum=True, counted=True)
    spec = grouped_spec(groups=16, rows=RowRange(1, tokens), routing=routing)
    shapes = strategy.shapes(spec, H100, every_row=False)
    assert [shape.rows for shape in shapes] == list(range(128, last + 1, 128))


def test_row_totals_of_many_ranks_end_where_no_kernel_is_new() -> None:
    strategy = STRATEGIES[EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS]
    spec = grouped_spec(rows=RowRange(1, 32 * 8192))
    shapes = strategy.shapes(spec, H100, every_row=False)
    assert shapes[-1].rows >= 1024 * 128 > shapes[-2].rows
    assert len(shapes) < 1100


def test_a_grouped_spec_without_routing_is_named() -> None:
    strategy = STRATEGIES[EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS]
    spec = dataclasses.replace(grouped_spec(), routing=None)
    with pytest.raises(ValueError, match=r"16 groups.*no routing"):
        strategy.shapes(spec, H100, every_row=False)


@pytest.mark.parametrize(
    ("rows", "batches"),
    [
        (RowRange(1, 100), [32, 64, 96, 100]),
        (RowRange(1, 64), [32, 64]),
        (RowRange(33, 40), [40]),
        (RowRange(64, 65), [64, 65]),
    ],
    ids=str,
)
def test_metadata_is_asked_for_once_in_each_bucket(
    rows: RowRange, batches: list[int]
) -> None:
    strategy = STRATEGIES[EntryPoint.GET_PAGED_MQA_LOGITS_METADATA]
    shapes = strategy.shapes(metadata_spec(rows=rows), H100, every_row=False)
    assert [shape.rows for shape in shapes] == batches


def test_scores_that_a_call_allocates_stay_small() -> None:
    strategy = STRATEGIES[EntryPoint.FP8_FP4_MQA_LOGITS]
    spec = logits_spec(rows=RowRange(1, 8192))
    shapes = strategy.shapes(spec, H100, every_row=True)
    assert {shape.rows for shape in shapes} == set(range(1, 8193))
    assert max(shape.keys for shape in shapes) == 65536
    assert max(4 * shape.rows * shape.keys for shape in shapes) <= 64 << 20
