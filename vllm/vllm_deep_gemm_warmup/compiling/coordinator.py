"""Decides what is done next: the process that plans and builds for one engine process.

`python -m vllm_deep_gemm_warmup.compiling.coordinator CONFIG` reads requests and writes
events, JSON lines both. It ends when its parent does or closes the pipe, and
everything that it started ends with it. Beside the standard library it imports this
package only, and has one thread.

Requests: `{"spec": ..., "build": true}`: find its kernels, and build them if told to;
`{"kernel": ...}`: build it; `{"settle": N}`: answer `{"settled": N}` once all is done
that came before; `{"meet": N}`: answer `{"met": N}` once no process of the group has
anything to do; `{"end": true}`: end.

Beside what answers a request, an event `{"idle": true}` says that nothing is left to
do or to wait for, and `{"idle": false}` that there is something again; it begins as
if it were busy.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import kernel_caches
from .building import Builds, Outcome
from .kernel import Kernel
from .locks import Locks, meeting_of
from .planning import Answer, Planning
from .store import Context, PlanStore, spec_key

_TICK = 0.05
_PLANNER_LIMIT = 300.0
# The first GEMM adds specs, after the weights' load; the planner holds some 500 MB.
_PLANNER_LINGER = 60.0
# Builds wait for the plans of what is known, so that an estimate comes before them;
# not for a spec that takes long to plan.
_MOST_PATIENCE = 2.0


@dataclass(frozen=True)
class Config:
    """What a coordinator is started with.

    Attributes:
        context: what the kernels are for.
        root: DeepGEMM's cache folder.
        work: folder for plans, wishes and locks, shared by the node's processes.
        nvcc: the compiler.
        library: DeepGEMM's package.
        workers: most compilers at once.
        limit: seconds after which a compiler is stopped.
        group: names the processes that go on together, such as an engine's ranks.

    """

    context: Context
    root: Path
    work: Path
    nvcc: Path
    library: Path
    workers: int
    limit: float
    group: str

    @property
    def locks(self) -> Path:
        """The file of the node's locks."""
        return self.work / "locks"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **{name: str(getattr(self, name)) for name in _PATHS},
            "context": self.context.to_json(),
            "workers": self.workers,
            "limit": self.limit,
            "group": self.group,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Config:
        """Inverse of ``to_json``."""
        paths = {name: Path(value[name]) for name in _PATHS}
        context = Context.from_json(value["context"])
        return cls(**{**value, **paths, "context": context})


_PATHS = ("root", "work", "nvcc", "library")


class Coordinator:
    """Turns requests into events, a step at a time."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._locks = Locks(config.locks)
        self._planning = Planning(
            config.context,
            PlanStore(config.work, config.context),
            self._locks,
            config.library,
            environ,
            _PLANNER_LIMIT,
            _PLANNER_LINGER,
        )
        self._builds = Builds(
            kernel_caches.deep_gemm(config.root),
            config.nvcc,
            config.library,
            self._locks,
            config.workers,
            config.limit,
            config.work / "failed",
        )
        self._workers = config.workers
        self._meeting = meeting_of(config.group)
        self._to_build: set[str] = set()
        self._to_settle: list[int] = []
        self._to_meet: list[int] = []
        self._announced = 0
        self._hold_until: float | None = None
        self._idle = False

    @property
    def descriptor(self) -> int | None:
        """What to wait for beside requests and the clock."""
        return self._planning.descriptor

    def take(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Take a request in; the events that follow from it at once."""
        if "spec" in request:
            if request["build"]:
                self._to_build.add(spec_key(request["spec"]))
            self._planning.add(request["spec"])
        elif "kernel" in request:
            yield from self._add(Kernel.from_json(request["kernel"]))
        elif "settle" in request:
            self._to_settle.append(request["settle"])
        else:
            self._to_meet.append(request["meet"])

    def step(self, readable: bool) -> Iterator[dict[str, Any]]:
        """Do what can be done now; the events that follow from it."""
        for answer in self._planning.step(readable):
            yield from self._plan(answer)
        if self._may_build():
            yield from self._announce()
            yield from map(_built, self._builds.step())
        busy = self._planning.busy or self._builds.busy
        if busy:
            self._locks.share(self._meeting)
        else:
            self._locks.give_back(self._meeting)
            yield from ({"settled": number} for number in self._to_settle)
            self._to_settle.clear()
            yield from self._meet()
        # Who waits for another rank's builds is not idle.
        idle = not (busy or self._to_meet)
        if idle != self._idle:
            self._idle = idle
            yield {"idle": idle}

    def stop(self) -> None:
        """End everything that was started."""
        self._builds.stop()
        self._planning.stop()

    def _plan(self, answer: Answer) -> Iterator[dict[str, Any]]:
        if answer.kernels is None:
            yield {"unplanned": spec_key(answer.spec), "reason": answer.problem}
            return
        key = spec_key(answer.spec)
        kernels = [kernel.to_json() for kernel in answer.kernels]
        yield {"planned": key, "kernels": kernels}
        if key in self._to_build:
            for kernel in answer.kernels:
                yield from self._add(kernel)

    def _add(self, kernel: Kernel) -> Iterator[dict[str, Any]]:
        outcome = self._builds.add(kernel)
        if outcome is not None:
            yield _built(outcome)
        elif self._hold_until is None:
            self._hold_until = time.monotonic() + _MOST_PATIENCE

    def _may_build(self) -> bool:
        if not self._builds.busy:
            return False
        if self._announced or not self._planning.busy or self._hold_until is None:
            return True
        return time.monotonic() > self._hold_until

    def _announce(self) -> Iterator[dict[str, Any]]:
        """Say how much there is to build: before the first one, and once all is known.

        More is found while the first are built.
        """
        known = bool(self._to_settle) and not self._planning.busy
        if not self._announced or (known and self._builds.total > self._announced):
            self._announced = self._builds.total
            yield {"missing": self._builds.missing, "workers": self._workers}

    def _meet(self) -> Iterator[dict[str, Any]]:
        """Say so once no process of the group plans or builds."""
        if self._to_meet and self._locks.take(self._meeting):
            self._locks.give_back(self._meeting)
            yield from ({"met": number} for number in self._to_meet)
            self._to_meet.clear()


def _built(outcome: Outcome) -> dict[str, Any]:
    return {"kernel": asdict(outcome)}


def _lines(descriptor: int, rest: bytes) -> tuple[list[bytes], bytes] | None:
    """The whole lines that can be read now, and what follows; None at the end."""
    data = os.read(descriptor, 1 << 16)
    if not data:
        return None
    *lines, rest = (rest + data).split(b"\n")
    return lines, rest


def run(config: Config, environ: Mapping[str, str], requests: int, events: int) -> None:
    """Serve until the requests end or the parent does.

    Args:
        config: see there.
        environ: the engine's environment.
        requests: descriptor to read from.
        events: descriptor to write to.

    """
    parent, rest = os.getppid(), b""
    coordinator = Coordinator(config, environ)
    try:
        # A parent's other children may hold the pipe open when it is dead.
        while os.getppid() == parent:
            with selectors.DefaultSelector() as selector:
                selector.register(requests, selectors.EVENT_READ)
                if coordinator.descriptor is not None:
                    selector.register(coordinator.descriptor, selectors.EVENT_READ)
                ready = {key.fd for key, _ in selector.select(_TICK)}
            if requests in ready:
                read = _lines(requests, rest)
                if read is None:
                    return
                lines, rest = read
                for request in map(json.loads, lines):
                    if "end" in request:
                        return
                    _write(events, coordinator.take(request))
            _write(events, coordinator.step(coordinator.descriptor in ready))
    finally:
        coordinator.stop()


def _write(descriptor: int, events: Iterator[dict[str, Any]]) -> None:
    for event in events:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]


def main() -> None:
    """Run on the descriptors 0 and 1."""
    config = Config.from_json(json.loads(sys.argv[1]))
    # Ctrl-C and a service's stop are the engine's to answer: we end when it does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        run(config, os.environ, 0, 1)


if __name__ == "__main__":
    main()
