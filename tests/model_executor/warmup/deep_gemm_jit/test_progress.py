"""A long warmup is heard of, from one process, and in few lines."""

import contextlib
import pathlib
import threading
from collections.abc import Callable

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.calls import Call
from vllm.model_executor.warmup.deep_gemm_jit.progress import Progress, Turn

from .specs import linear_spec

SPEC = linear_spec(576, 7168)
WAIT = 60.0


class Lines:
    """Takes lines; ``enough`` is set once there are ``count``."""

    def __init__(self, count: int) -> None:
        self.said: list[str] = []
        self.enough = threading.Event()
        self._count = count

    def __call__(self, line: str) -> None:
        self.said.append(line)
        if len(self.said) >= self._count:
            self.enough.set()


def test_lines_come_while_one_call_lasts() -> None:
    """G42: of a compiler that takes long, the caller hears nothing until it ends."""
    lines = Lines(3)
    with Progress(Turn(None, first=True), lines, interval=0.01) as progress:
        progress.expect(10)
        progress.begin(linear_spec(256, 7168))
        progress.called(SPEC, Call(64, 2.0, ("a", "b")))
        progress.finished(SPEC)
        progress.begin(SPEC)
        assert lines.enough.wait(WAIT)
    assert "1 of 10 shapes, 2 kernels built" in lines.said[-1]
    assert "now fp8_gemm_nt N=576 K=7168" in lines.said[-1]


def test_other_processes_find_kernels_then_build_them() -> None:
    """What they build is there before the first call is made here."""
    progress = Progress(Turn(None, first=True), lambda line: None)
    assert "finding out which kernels are needed" in progress.line()
    progress.found()
    assert progress.line().startswith("DeepGEMM warmup: 0 kernels built, ")
    progress.built("a")
    progress.built("b")
    progress.begin(SPEC)
    progress.called(SPEC, Call(64, 0.1, ("a", "b")))
    assert "0 of 0 shapes, 2 kernels built" in progress.line()


def test_a_warmup_that_breaks_says_no_more() -> None:
    lines = Lines(1)
    progress = Progress(Turn(None, first=True), lines, interval=0.01)
    with pytest.raises(RuntimeError, match="driver"), progress:
        progress.begin(SPEC)
        assert lines.enough.wait(WAIT)
        raise RuntimeError("driver")
    said = len(lines.said)
    assert not [t for t in threading.enumerate() if t.name.endswith("progress")]
    assert len(lines.said) == said


def test_one_process_of_a_node_speaks_and_it_is_the_first(
    tmp_path: pathlib.Path,
) -> None:
    """G60: eight ranks; who is not the first asks twice before it may speak."""
    turns = [Turn(tmp_path, first=rank == 0) for rank in range(8)]
    assert [turn.take() for turn in reversed(turns)] == [False] * 7 + [True]
    for _ in range(3):
        assert [turn.take() for turn in turns] == [True] + [False] * 7


def test_the_last_that_compiles_is_heard(tmp_path: pathlib.Path) -> None:
    first, second = Turn(tmp_path, first=True), Turn(tmp_path, first=False)
    assert (first.take(), second.take(), second.take()) == (True, False, False)
    first.give()
    assert second.take()
    second.give()
    assert first.take()


def test_engines_that_know_nothing_of_each_other_take_turns(
    tmp_path: pathlib.Path,
) -> None:
    """Data-parallel engines of a dense model: each has a first rank."""
    turns = [Turn(tmp_path, first=True) for _ in range(8)]
    assert sum(turn.take() for turn in turns) == 1


def test_without_a_meeting_place_the_first_rank_speaks(tmp_path: pathlib.Path) -> None:
    for folder in (None, tmp_path / "missing"):
        first, other = Turn(folder, first=True), Turn(folder, first=False)
        assert first.take()
        assert [other.take() for _ in range(3)] == [False] * 3


def test_eight_ranks_with_ten_shapes_are_heard_as_one(tmp_path: pathlib.Path) -> None:
    """G60: as many lines as one rank has to say, and all are that rank's."""
    lines = Lines(5)
    ranks = [
        Progress(Turn(tmp_path, first=rank == 0), say_as(rank, lines), 0.02)
        for rank in range(8)
    ]
    with contextlib.ExitStack() as stack:
        # The first rank last: it speaks first all the same.
        for progress in reversed(ranks):
            stack.enter_context(progress)
            progress.expect(10)
            progress.begin(SPEC)
        assert lines.enough.wait(WAIT)
        said = list(lines.said)
    assert len({line.partition(" ")[0] for line in said}) == 1
    assert all("of 10 shapes" in line for line in said)


def say_as(rank: int, lines: Lines) -> Callable[[str], None]:
    return lambda line: lines(f"rank{rank} {line}")
