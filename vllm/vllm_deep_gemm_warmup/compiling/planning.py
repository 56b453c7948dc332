"""Decides who finds a spec's kernels: one planner a node and context, for all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import children, recorder
from .environment import Unplannable, planner_environment
from .kernel import Kernel
from .locks import Locks, planner_of
from .store import Context, PlanStore, Refusal, spec_key

_MODULE = "vllm.model_executor.warmup.deep_gemm_jit.planner"
_LOG_TAIL = 1500


@dataclass(frozen=True)
class Answer:
    """What the planner found for a spec.

    Attributes:
        spec: which.
        kernels: all that it takes, in the order of its calls; None: not found.
        problem: why not, or None.

    """

    spec: Mapping[str, Any]
    kernels: tuple[Kernel, ...] | None
    problem: str | None = None


class PlannerProcess:
    """A process on the stand-in device that calls DeepGEMM and builds nothing.

    Args:
        context: what the kernels are for.
        library: DeepGEMM's package.
        environ: the engine's environment.

    Raises:
        Unplannable: it cannot be started here.

    """

    def __init__(
        self, context: Context, library: Path, environ: Mapping[str, str]
    ) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="deep-gemm-planner-"))
        self._log = self._scratch / "log"
        try:
            nvcc = recorder.install(
                self._scratch, context.compiler, 10 * context.major + context.minor
            )
            started = planner_environment(
                environ,
                (context.major, context.minor),
                context.sm_count,
                nvcc,
                self._scratch,
            )
            request = {
                "target": [context.major, context.minor, context.sm_count],
                "every_row": context.every_row,
                "nvcc": str(nvcc),
                "library": str(library),
                "scratch": str(self._scratch),
            }
            with self._log.open("wb") as log:
                # -P: a file of the working directory must not stand in for a module.
                self._child = children.start(
                    [sys.executable, "-P", "-m", _MODULE, json.dumps(request)],
                    given=subprocess.PIPE,
                    output=subprocess.PIPE,
                    errors=log,
                    environ=started,
                )
        except BaseException as error:
            shutil.rmtree(self._scratch, ignore_errors=True)
            if isinstance(error, OSError):
                raise Unplannable(str(error)) from error
            raise
        self._rest = b""

    def ask(self, spec: Mapping[str, Any]) -> None:
        """Have the kernels of a spec found; does not wait."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(spec).encode() + b"\n")
            self._child.stdin.flush()

    @property
    def descriptor(self) -> int:
        """Can be read when there is an answer, or when the process has ended."""
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def read(self) -> list[Answer] | None:
        """The answers that have come; None once the process has ended.

        Raises:
            ValueError, KeyError, TypeError: something else has come.

        """
        data = os.read(self.descriptor, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_parse(line) for line in lines]

    def why_it_ended(self) -> str:
        """What can be said of a process that has ended without being told."""
        status = self._child.wait()
        lines = self._log.read_text(errors="replace").strip()[-_LOG_TAIL:].splitlines()
        return f"the planner ended with {status}: {lines[-1] if lines else 'silent'}"

    def stop(self) -> None:
        """End it and remove what it wrote."""
        children.end(self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _parse(line: bytes) -> Answer:
    value = json.loads(line)
    problem = value.get("problem")
    if problem is not None:
        return Answer(value["spec"], None, problem)
    return Answer(value["spec"], tuple(map(Kernel.from_json, value["kernels"])))


class Planning:
    """Has the kernels of specs found, by this process or by another of the node.

    Whoever holds the context's lock runs the planner and serves the wishes of all. A
    planner that has failed is not started again, by no process that was there then.

    Args:
        context: what the kernels are for.
        store: where plans and wishes lie; it can be written.
        locks: the node's.
        library: DeepGEMM's package.
        environ: the engine's environment.
        limit: seconds that the planner may be silent.
        linger: seconds that it is kept with nothing to do: it takes seconds to start.

    """

    def __init__(
        self,
        context: Context,
        store: PlanStore,
        locks: Locks,
        library: Path,
        environ: Mapping[str, str],
        limit: float,
        linger: float,
    ) -> None:
        self._context, self._store, self._locks = context, store, locks
        self._lock = planner_of(context.key)
        self._library, self._environ = library, environ
        self._limit, self._linger = limit, linger
        self._wanted: dict[str, Mapping[str, Any]] = {}
        self._asked: set[str] = set()
        self._planner: PlannerProcess | None = None
        self._broken: str | None = None
        # Notes of another start; None is the planner's.
        self._old: dict[str | None, Refusal | None] = {None: store.refusal(None)}
        self._heard = 0.0

    @property
    def busy(self) -> bool:
        """Whether a spec of this process has no answer yet."""
        return bool(self._wanted)

    @property
    def descriptor(self) -> int | None:
        """What to wait for beside the clock."""
        return None if self._planner is None else self._planner.descriptor

    def add(self, spec: Mapping[str, Any]) -> None:
        """Have the kernels of a spec found."""
        key = spec_key(spec)
        self._wanted[key] = spec
        self._old[key] = self._store.refusal(spec)

    def step(self, readable: bool) -> Iterator[Answer]:
        """Start what can be started and collect answers; do not wait.

        Args:
            readable: the descriptor is.

        """
        if readable and self._planner is not None:
            yield from self._collect(self._planner)
        yield from self._find_stored()
        if self._wanted and self._planner is None and self._broken is None:
            self._start_or_wish()
        if self._planner is not None:
            self._serve(self._planner)
        if self._broken is not None:
            for spec in self._wanted.values():
                yield Answer(spec, None, self._broken)
            self._forget_wanted()

    def stop(self) -> None:
        """End the planner; another process may start its own."""
        self._forget_wanted()
        self._end()

    def _find_stored(self) -> Iterator[Answer]:
        for key, spec in list(self._wanted.items()):
            kernels = self._store.load(spec)
            reason = None if kernels is not None else self._refusal(spec)
            if kernels is not None or reason is not None:
                del self._wanted[key]
                yield Answer(spec, kernels, reason)

    def _refusal(self, spec: Mapping[str, Any] | None) -> str | None:
        """Why a process of the node has given up, since this one has asked."""
        note = self._store.refusal(spec)
        old = self._old[None if spec is None else spec_key(spec)]
        return None if note is None or note == old else note.reason

    def _start_or_wish(self) -> None:
        self._broken = self._refusal(None)
        if self._broken is not None:
            return
        if not self._locks.take(self._lock):
            for spec in self._wanted.values():
                self._store.wish(spec)
            return
        self._heard = time.monotonic()
        try:
            self._planner = PlannerProcess(self._context, self._library, self._environ)
        except Unplannable as error:
            # Quickly found, and of this process's environment: others try.
            self._broken = str(error)
            self._end()

    def _serve(self, planner: PlannerProcess) -> None:
        for key, spec in {**self._wanted, **self._wishes()}.items():
            if key not in self._asked:
                if not self._asked:
                    self._heard = time.monotonic()
                self._asked.add(key)
                planner.ask(spec)
        silent = time.monotonic() - self._heard
        if self._asked and silent > self._limit:
            self._break(f"the planner was silent for {self._limit:.0f} s")
        elif not self._asked and silent > self._linger:
            self._end()

    def _wishes(self) -> dict[str, Mapping[str, Any]]:
        """What others wait for; a wish can come as late as its plan."""
        wishes: dict[str, Mapping[str, Any]] = {}
        wishes |= {spec_key(spec): spec for spec in self._store.wishes()}
        for key, spec in list(wishes.items()):
            if key not in self._asked and self._store.load(spec) is not None:
                self._store.unwish(spec)
                del wishes[key]
        return wishes

    def _collect(self, planner: PlannerProcess) -> Iterator[Answer]:
        try:
            answers = planner.read()
        except (ValueError, KeyError, TypeError) as error:
            self._break(f"the planner's answer cannot be read: {error!r}")
            return
        if answers is None:
            self._break(planner.why_it_ended())
            return
        for answer in answers:
            self._heard = time.monotonic()
            key = spec_key(answer.spec)
            self._asked.discard(key)
            if answer.kernels is not None:
                self._store.save(answer.spec, answer.kernels)
            else:
                self._store.refuse(answer.spec, answer.problem or "it did not say why")
            if self._wanted.pop(key, None) is not None:
                yield answer

    def _break(self, reason: str) -> None:
        """Give up, and tell who would wait for another planner as long."""
        self._broken = reason
        self._store.refuse(None, reason)
        self._end()

    def _end(self) -> None:
        if self._planner is not None:
            self._planner.stop()
            self._planner = None
            self._asked.clear()
        self._locks.give_back(self._lock)

    def _forget_wanted(self) -> None:
        for spec in self._wanted.values():
            self._store.unwish(spec)
        self._wanted.clear()
