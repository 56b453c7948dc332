"""Forked processes that answer: DeepGEMM and PyTorch settle once in a process."""

import collections
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


def fork_ranks(
    folder: pathlib.Path, ranks: int, start: Callable[[int], Any]
) -> list[Any]:
    """Fork a process for each rank, all at once, as vLLM forks its workers.

    Args:
        folder: Their answers lie here meanwhile.
        ranks: How many.
        start: Called in the child with its rank; what it returns is made JSON.

    Raises:
        SystemExit: A rank did not answer; what it raised is on its standard error.

    """
    jobs = (
        (folder / f"answer-{rank}", functools.partial(start, rank))
        for rank in range(ranks)
    )
    return _answers(jobs, at_once=ranks)


def in_children(
    jobs: Iterable[tuple[pathlib.Path, Callable[[], Any]]], at_once: int = 2
) -> list[Any]:
    """Return what each job returns in a process of its own, in order.

    Args:
        jobs: A new folder for each, and what is called; see ``fork_ranks``.
        at_once: How many run at the same time.

    """

    def answers() -> Iterable[tuple[pathlib.Path, Callable[[], Any]]]:
        for folder, run in jobs:
            folder.mkdir(parents=True)
            yield folder / "answer", run

    return _answers(answers(), at_once)


def _answers(
    jobs: Iterable[tuple[pathlib.Path, Callable[[], Any]]], at_once: int
) -> list[Any]:
    assert not torch.cuda.is_initialized()
    running: collections.deque[tuple[int, pathlib.Path]] = collections.deque()
    statuses, answers = [], []

    def finish() -> None:
        child, answer = running.popleft()
        statuses.append(os.waitpid(child, 0)[1])
        answers.append(answer)

    for answer, run in jobs:
        if len(running) == at_once:
            finish()
        running.append((_fork(answer, run), answer))
    while running:
        finish()
    if any(statuses):
        sys.exit(f"children ended with {statuses}")
    return [json.loads(answer.read_text()) for answer in answers]


def _fork(answer: pathlib.Path, run: Callable[[], Any]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child != 0:
        return child
    status = 1
    try:
        answer.write_text(json.dumps(run()))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
