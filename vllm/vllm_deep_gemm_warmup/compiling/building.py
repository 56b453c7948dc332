"""Decides which compilers run: each missing kernel's once a node, within its CPUs."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..kernel_caches import KernelCache
from . import children, publish
from .kernel import Kernel, Places
from .locks import Locks

_LOG_TAIL = 2000
# What a kernel takes on a server's CPU: 2.1 to 2.6 s (DeepGEMM #94), none to none.
_SECONDS_A_KERNEL = 2.5
# A load of weights goes on beside it.
_NICENESS = 10


def building_seconds(kernels: int, workers: int) -> float:
    """Estimate the wall seconds of that many builds, so many at a time."""
    return _SECONDS_A_KERNEL * -(-kernels // workers)


@dataclass(frozen=True)
class Outcome:
    """What became of a kernel.

    Attributes:
        entry: its name in the cache.
        seconds: that its compiler ran here; 0.0 where it was not needed.
        built: it was not there when it was asked for: this process or another one
            of the node has built it since.
        failure: why there is none, or None.
        final: it failed in the compiler; another try would end alike.

    """

    entry: str
    seconds: float = 0.0
    built: bool = False
    failure: str | None = None
    final: bool = False


@dataclass
class _Run:
    kernel: Kernel
    places: Places
    child: subprocess.Popen[bytes]
    log: Path
    cpu: int
    start: float = field(default_factory=time.monotonic)


class Builds:
    """Builds kernels, as many at once as there are CPUs free on this node.

    Args:
        cache: DeepGEMM's; it can be written.
        nvcc: the compiler.
        library: DeepGEMM's package.
        locks: the node's.
        workers: most compilers at once.
        limit: seconds after which one is stopped.
        notes: folder in which processes of the node tell each other of failures.

    """

    def __init__(
        self,
        cache: KernelCache,
        nvcc: Path,
        library: Path,
        locks: Locks,
        workers: int,
        limit: float,
        notes: Path,
    ) -> None:
        self._cache, self._locks, self._notes = cache, locks, notes
        self._nvcc, self._library = nvcc, library
        self._workers, self._limit = workers, limit
        self._waiting: dict[str, Kernel] = {}
        self._running: list[_Run] = []
        self._known: dict[str, float] = {}
        self._total = 0

    @property
    def busy(self) -> bool:
        """Whether something is left to build."""
        return bool(self._waiting or self._running)

    @property
    def missing(self) -> int:
        """Kernels that are not there yet."""
        return len(self._waiting) + len(self._running)

    @property
    def total(self) -> int:
        """Kernels that were missing when they were added."""
        return self._total

    def add(self, kernel: Kernel) -> Outcome | None:
        """Build a kernel if need be; the outcome where it is there already.

        Of a kernel that was added before nothing is said again.
        """
        if kernel.entry in self._known:
            return None
        self._known[kernel.entry] = time.time()
        if publish.is_whole(self._cache, kernel.entry):
            return Outcome(kernel.entry)
        self._waiting[kernel.entry] = kernel
        self._total += 1
        return None

    def step(self) -> Iterator[Outcome]:
        """Start what can be started and collect what has ended; do not wait."""
        for run in list(self._running):
            outcome = self._look_at(run)
            if outcome is not None:
                self._running.remove(run)
                publish.discard(run.places.folder)
                if outcome.final:
                    self._note(outcome)
                self._locks.give_back_cpu(run.cpu)
                self._locks.give_back(run.kernel.entry)
                yield outcome
        for entry in list(self._waiting):
            if publish.is_whole(self._cache, entry):
                del self._waiting[entry]
                yield Outcome(entry, built=True)
        yield from self._start_what_fits()

    def stop(self) -> None:
        """End every compiler and leave nothing of theirs behind."""
        self._waiting.clear()
        for run in self._running:
            children.end(run.child)
            run.log.unlink(missing_ok=True)
            publish.discard(run.places.folder)
        self._running.clear()

    def _start_what_fits(self) -> Iterator[Outcome]:
        """A CPU first: without one no kernel's lock is looked at, on a network too."""
        cpu: int | None = None
        for kernel in list(self._waiting.values()):
            if cpu is None and len(self._running) < self._workers:
                cpu = self._locks.take_cpu(self._workers)
            if cpu is None:
                return
            # Else another process of the node builds it.
            if self._locks.take(kernel.entry):
                del self._waiting[kernel.entry]
                outcome = self._settled(kernel) or self._try_to_start(kernel, cpu)
                if outcome is None:
                    cpu = None
                else:
                    self._locks.give_back(kernel.entry)
                    yield outcome
        if cpu is not None:
            self._locks.give_back_cpu(cpu)

    def _try_to_start(self, kernel: Kernel, cpu: int) -> Outcome | None:
        try:
            self._running.append(self._start(kernel, cpu))
        except OSError as error:
            return Outcome(kernel.entry, failure=f"it cannot be built here: {error}")
        return None

    def _settled(self, kernel: Kernel) -> Outcome | None:
        """What another process of the node made of it since it was added."""
        if publish.is_whole(self._cache, kernel.entry):
            return Outcome(kernel.entry, built=True)
        note = self._notes / kernel.entry
        try:
            # A note from before is of another start: it is tried again.
            if note.stat().st_mtime >= self._known[kernel.entry]:
                return Outcome(kernel.entry, failure=note.read_text(), final=True)
        except OSError:
            pass
        return None

    def _note(self, outcome: Outcome) -> None:
        with contextlib.suppress(OSError):
            self._notes.mkdir(parents=True, exist_ok=True)
            (self._notes / outcome.entry).write_text(outcome.failure or "")

    def _start(self, kernel: Kernel, cpu: int) -> _Run:
        folder = publish.begin(self._cache, kernel)
        places = Places(self._nvcc, folder, self._library)
        # Beside the folder: what lies in it becomes the entry.
        log = folder.with_name(f"{folder.name}.log")
        try:
            with log.open("wb") as output:
                child = children.start(
                    kernel.command(places),
                    output=output,
                    errors=subprocess.STDOUT,
                    folder=folder,
                    niceness=_NICENESS,
                )
        except OSError:
            log.unlink(missing_ok=True)
            publish.discard(folder)
            raise
        return _Run(kernel, places, child, log, cpu)

    def _look_at(self, run: _Run) -> Outcome | None:
        """What became of it, or None while it runs."""
        status = run.child.poll()
        seconds = time.monotonic() - run.start
        entry = run.kernel.entry
        if status is None and seconds < self._limit:
            return None
        try:
            if status is None:
                children.end(run.child)
                limit = f"{self._limit:.0f} s"
                failure = f"{self._nvcc} did not end within {limit}, it was stopped"
            elif status:
                failure = f"{self._nvcc} ended with {status}: {_tail(run.log)}"
            else:
                publish.finish(self._cache, run.kernel, run.places)
                return Outcome(entry, seconds, built=True)
        except publish.Unpublishable as error:
            failure = str(error)
        except OSError as error:
            return Outcome(entry, seconds, failure=str(error))
        finally:
            run.log.unlink(missing_ok=True)
        return Outcome(entry, seconds, failure=failure, final=True)


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace").strip()
    return " ".join(text[-_LOG_TAIL:].split()) or "it said nothing"
