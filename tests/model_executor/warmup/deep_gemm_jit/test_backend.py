"""One kernel that does not build is not the compiler: the others are built."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend
from vllm.model_executor.warmup.deep_gemm_jit.calls import Call
from vllm.model_executor.warmup.deep_gemm_jit.entry_points import STRATEGIES
from vllm.model_executor.warmup.deep_gemm_jit.rows import rows_to_run
from vllm.model_executor.warmup.deep_gemm_jit.spec import RowRange, Target

from .specs import linear_spec

TARGET = Target(9, 0, 132)
SPEC = linear_spec(256, 512, rows=RowRange(1, 4096))
EVERY = rows_to_run(SPEC.rows, TARGET, every_row=False)
Run = Callable[[Callable[[int], bool]], tuple[list[Call], list[int]]]


@pytest.fixture
def run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the spec with a library that fails for some row counts."""

    def run(fails: Callable[[int], bool]) -> tuple[list[Call], list[int]]:
        def call(operands: Any, shape: Any) -> None:
            if fails(shape.rows):
                raise RuntimeError("nvcc exited with 1")

        monkeypatch.setattr(STRATEGIES[SPEC.entry_point], "call", call)
        backend = Backend(device, TARGET, ())
        return backend.run(SPEC, None, every_row=False, listener=lambda *_: None)

    return run


@pytest.mark.parametrize(
    ("first", "last"),
    [(1, 16), (1, 448), (65, 512), (3000, 4096), (2000, 2200)],
)
def test_every_row_count_outside_the_broken_window_is_called(
    run: Run, first: int, last: int
) -> None:
    calls, left = run(lambda rows: first <= rows <= last)
    worked = {call.rows for call in calls if call.failure is None}
    assert worked == {rows for rows in EVERY if not first <= rows <= last}
    assert sorted([call.rows for call in calls] + left) == EVERY


def test_a_compiler_that_fails_on_all_is_asked_a_few_times(run: Run) -> None:
    calls, left = run(lambda rows: True)
    assert [call.rows for call in calls] == [1, 2, 3, 4096, 1920]
    assert sorted([call.rows for call in calls] + left) == EVERY


def test_without_a_failure_rows_ascend(run: Run) -> None:
    calls, left = run(lambda rows: False)
    assert [call.rows for call in calls] == EVERY
    assert left == []
