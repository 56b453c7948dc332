"""Each entry point has its strategy, and the calls it makes miss no shape."""

import dataclasses

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.entry_points import STRATEGIES
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    ExpertRouting,
    RowRange,
    Target,
)

from .specs import grouped_spec, linear_spec

H100 = Target(9, 0, 132)


def test_every_entry_point_has_a_strategy() -> None:
    assert set(STRATEGIES) == set(EntryPoint)


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
