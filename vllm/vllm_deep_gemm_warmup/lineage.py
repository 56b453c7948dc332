"""Decides whether a process of an engine has been left alone: who started it is dead.

vLLM's processes start one another: an API server its engine, an engine its workers.
vLLM itself notices a death when a process next talks to the dead one; who waits for
compilers talks to nobody for minutes, and holds a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

# Not a VLLM_ name: those are checked against vLLM's list.
LAUNCHER = "_DEEP_GEMM_WARMUP_LAUNCHER"
_DEAD = "ZX"


class Abandoned(SystemExit):
    """Ends this process, for which nobody waits any more; the message says why."""


class _Process(NamedTuple):
    parent: int
    # Clock ticks since boot: a number can be given again.
    start: int


class Lineage:
    """The processes that started this one, up to the launcher, as they are now.

    The launcher itself has none: a shell may go and leave it running. Where no launcher
    is among the ancestors, the parent alone counts.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        parent = multiprocessing.parent_process()
        self._watched: dict[int, _Process | None] = {}
        if parent is None or parent.pid is None:
            return
        self._watched[parent.pid] = _look_at(parent.pid)
        named = (os.environ if environ is None else environ).get(LAUNCHER, "")
        self._watched |= dict(_chain(int(named) if named.isdigit() else 0))

    @property
    def known(self) -> bool:
        """Whether there is anyone whose death matters."""
        return bool(self._watched)

    def check(self) -> None:
        """Do nothing while all of them live.

        Raises:
            Abandoned: one of them has died.

        """
        for number, known in self._watched.items():
            now = _look_at(number)
            if now is None or known is None or now.start != known.start:
                raise Abandoned(
                    f"DeepGEMM warmup (process {os.getpid()}): process {number}, which "
                    "started it, has died; it ends, and so do its compilers"
                )


def begin(environ: MutableMapping[str, str]) -> None:
    """Note that this process is the launcher, unless another one of vLLM started it."""
    if multiprocessing.parent_process() is None:
        environ[LAUNCHER] = str(os.getpid())


def _chain(launcher: int) -> Iterator[tuple[int, _Process]]:
    """The ancestors up to the launcher; none where it is not one of them."""
    found = []
    number = os.getppid()
    while (process := _look_at(number)) is not None:
        found.append((number, process))
        if number == launcher:
            yield from found
            return
        number = process.parent


def _look_at(number: int) -> _Process | None:
    """The process of that number, or None where it is dead."""
    try:
        # The name before the bracket can hold anything.
        text = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2]
    except OSError:
        return None
    words = text.split()
    return None if words[0] in _DEAD else _Process(int(words[1]), int(words[19]))
