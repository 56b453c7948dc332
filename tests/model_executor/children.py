"""Forked processes that answer: DeepGEMM and PyTorch settle once in a process."""

import json
import os
import pathlib
import sys
from collections.abc import Callable
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
    assert not torch.cuda.is_initialized()
    answers = [folder / f"answer-{rank}" for rank in range(ranks)]
    children = []
    for rank, answer in enumerate(answers):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answer.write_text(json.dumps(start(rank)))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        sys.exit(f"children ended with {statuses}")
    return [json.loads(answer.read_text()) for answer in answers]


def in_child(folder: pathlib.Path, run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns in a process of its own; see ``fork_ranks``."""
    folder.mkdir(parents=True)
    (answer,) = fork_ranks(folder, 1, lambda _: run())
    return answer
