"""Decides which process of a node does a thing: the one that holds a byte of a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..lineage import Lineage

# Of 63 bits of offsets: the CPUs of each host that shares the file, then all names.
_HOSTS = 1 << 20
_TICK = 0.05
# What holds a lock can hang, and it may be another engine's: nobody waits for ever.
_PATIENCE = 900.0
_NAMES = 1 << 40


class Locks:
    """Locks on bytes of one file, for as long as this object and its process live.

    POSIX record locks (`fcntl(2)`): the kernel gives them back when their owner dies,
    children do not inherit them, they work between the nodes of a network file system
    that has locks, and no lock file is ever deleted. They belong to the process: one
    object for each file in a process, and none opens that file besides.

    Attributes:
        working: the file system has locks. Where it has none, every lock is granted
            and processes do the same work side by side.

    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.working = True
        self._cpus: set[int] = set()
        self._host = int(_digest(os.uname().nodename)[:4], 16)

    def close(self) -> None:
        """Give everything back."""
        os.close(self._file)

    def take(self, name: str) -> bool:
        """Take the lock of that name alone; do not wait."""
        return self._lock(fcntl.LOCK_EX, self._offset(name))

    def share(self, name: str) -> bool:
        """Take a lock that others share, so that none can `take` it."""
        return self._lock(fcntl.LOCK_SH, self._offset(name))

    def give_back(self, name: str) -> None:
        """Let others have it."""
        self._unlock(self._offset(name))

    def take_cpu(self, cpus: int) -> int | None:
        """Take the first free one of this host's CPUs, or None."""
        for cpu in range(cpus):
            # What a process has, it would be given again.
            if cpu not in self._cpus and self._lock(fcntl.LOCK_EX, self._cpu(cpu)):
                self._cpus.add(cpu)
                return cpu
        return None

    def give_back_cpu(self, cpu: int) -> None:
        """Let others have it."""
        self._cpus.remove(cpu)
        self._unlock(self._cpu(cpu))

    def _cpu(self, cpu: int) -> int:
        return _HOSTS + (self._host << 12) + cpu

    def _offset(self, name: str) -> int:
        return _NAMES + int(_digest(name)[:12], 16)

    def _lock(self, kind: int, offset: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, offset)
        except (BlockingIOError, PermissionError):
            return False  # EAGAIN or EACCES: someone has it
        except OSError:
            self.working = False
        return True

    def _unlock(self, offset: int) -> None:
        if self.working:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)


def planner_of(context: str) -> str:
    """Name of the lock of who runs the planner for a context."""
    return f"planner {context}"


def meeting_of(group: str) -> str:
    """Name of the lock that a group's processes share while they have work."""
    return f"meeting {group}"


def wait_for_group(path: Path, group: str) -> None:
    """Wait until no process of a group has anything to plan or build.

    For a process that has no locks of its own on the file. Where the file is not
    there or cannot be written, nobody works.

    Raises:
        Abandoned: who started this process is dead.

    """
    if not os.access(path, os.R_OK | os.W_OK):
        return
    locks, lineage = Locks(path), Lineage()
    try:
        while not locks.take(meeting_of(group)):
            lineage.check()
            time.sleep(_TICK)
    finally:
        locks.close()


def in_turn(path: Path | None, names: Sequence[str]) -> Iterator[int]:
    """Yield the index of each name, while this process alone has that name's lock.

    For what each process has to do and the first leaves something for the others.
    What is free comes first, so that processes share the work. Where there can be no
    locks, and after a long wait, names come without.

    Args:
        path: A file of its own; made, with its folder, if it is not there. None: no
            locks.
        names: What to take; the same name may stand for several.

    """
    locks = None if path is None else _open(path)
    if locks is None:
        yield from range(len(names))
        return
    left = list(range(len(names)))
    waiting_since = time.monotonic()
    with contextlib.closing(locks):
        while left:
            late = time.monotonic() - waiting_since > _PATIENCE
            mine = next((i for i in left if late or locks.take(names[i])), None)
            if mine is None:
                time.sleep(_TICK)
                continue
            left.remove(mine)
            yield mine
            if not late:
                locks.give_back(names[mine])
            waiting_since = time.monotonic()


def _open(path: Path) -> Locks | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Locks(path)
    except OSError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
