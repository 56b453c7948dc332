"""The sampled rows hit each window of the architecture, and all scale layouts."""

import itertools

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.rows import rows_to_run, window_ends
from vllm.model_executor.warmup.deep_gemm_jit.spec import RowRange, Target

H100 = Target(9, 0, 132)
B200 = Target(10, 0, 148)


def window(rows: int, target: Target) -> int:
    """Number of the window that ``rows`` lies in, written another way."""
    if target.major != 9:
        return (rows - 1) // 16
    if rows <= 32:
        return (rows - 1) // 16
    return 2 + (rows - 1) // 64


@pytest.mark.parametrize("target", [H100, B200], ids=str)
@pytest.mark.parametrize(
    ("first", "last"),
    list(itertools.product([1, 17, 32, 33], [33, 64, 65, 1000, 8191, 8192])),
)
def test_every_window_is_hit_exactly_once(
    first: int, last: int, target: Target
) -> None:
    """G12."""
    ends = window_ends(RowRange(first, last), target)
    assert [window(end, target) for end in ends] == list(
        range(window(first, target), window(last, target) + 1)
    )
    assert ends[-1] == last


def test_a_limit_inside_the_first_window() -> None:
    assert rows_to_run(RowRange(1, 3), H100, every_row=False) == [1, 2, 3]
    assert window_ends(RowRange(32, 32), H100) == [32]


def test_no_rows_no_calls() -> None:
    empty = RowRange(32, 16)
    assert window_ends(empty, H100) == []
    assert rows_to_run(empty, H100, every_row=False) == []
    assert rows_to_run(empty, H100, every_row=True) == []


def test_four_rows_in_a_row_have_every_scale_layout() -> None:
    sampled = rows_to_run(RowRange(32, 8192), H100, every_row=False)
    assert {row % 4 for row in sampled} == {0, 1, 2, 3}
    assert rows_to_run(RowRange(1, 8192), H100, every_row=False)[0] == 1


def test_full_runs_every_row() -> None:
    assert rows_to_run(RowRange(32, 100), H100, every_row=True) == list(range(32, 101))
