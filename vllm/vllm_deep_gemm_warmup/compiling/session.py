"""Decides how an engine process has kernels planned and built while it does other work.

The work is a coordinator's, a process of its own. A thread reads what it says; it is a
daemon and holds nothing, so the engine can end at any time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..lineage import Abandoned, Lineage
from .building import Outcome
from .coordinator import Config
from .kernel import Kernel
from .store import spec_key

_MODULE = "vllm_deep_gemm_warmup.compiling.coordinator"
_PATIENCE = 10.0
_TICK = 1.0
_Event = Mapping[str, Any]
logger = logging.getLogger("vllm.deep_gemm_warmup")


class Ended(RuntimeError):
    """The coordinator has ended without being told; the message says what it knew."""


class Session:
    """A coordinator and what it has said so far.

    Only the process that made it can use it: a forked child has no reader.

    Args:
        config: what the coordinator is started with.
        listener: told of each event, in the reading thread; `missing` comes before
            the first build. What it raises is logged once and hinders nothing.

    Attributes:
        plans: spec's key -> its kernels, or why there are none.
        outcomes: entry -> what became of it.
        specs: spec's key -> the spec, of all that were added.

    Raises:
        OSError: no process can be started, or the work folder cannot be written.

    """

    def __init__(
        self, config: Config, listener: Callable[[_Event], None] = lambda event: None
    ) -> None:
        self.plans: dict[str, tuple[Kernel, ...] | str] = {}
        self.outcomes: dict[str, Outcome] = {}
        self._listener = listener
        self._changed = threading.Condition()
        self._marks: set[int] = set()
        self._next_mark = 0
        self._ended = False
        self._unheard: str | None = None
        self._deaf = False
        self.specs: dict[str, Mapping[str, Any]] = {}
        self._owner = os.getpid()
        self._lineage = Lineage()
        config.work.mkdir(parents=True, exist_ok=True)
        if not os.access(config.work, os.W_OK):
            raise PermissionError(f"{config.work} cannot be written")
        # -P: a file of the working directory must not stand in for a module.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, json.dumps(config.to_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is the engine's to answer.
            process_group=0,
        )
        reader = threading.Thread(
            target=self._read, name="deep-gemm-compiling", daemon=True
        )
        reader.start()
        if self._lineage.known:
            threading.Thread(
                target=self._watch, name="deep-gemm-lineage", daemon=True
            ).start()

    @property
    def usable(self) -> bool:
        """Whether this process may talk to it, and it is there."""
        return self._owner == os.getpid() and not self._ended

    def add_spec(self, spec: Mapping[str, Any], *, build: bool = True) -> None:
        """Have a spec's kernels found, and built; not one that was added before."""
        key = spec_key(spec)
        if key not in self.specs:
            self.specs[key] = spec
            self._send({"spec": spec, "build": build})

    def add_kernel(self, kernel: Kernel) -> None:
        """Have a kernel built whose plan is known."""
        self._send({"kernel": kernel.to_json()})

    def settle(self) -> None:
        """Wait until all that was added is done, or has failed.

        Raises:
            Ended: the coordinator is gone, and something may not be done.
            Abandoned: who started this process is dead.

        """
        self._wait_for("settle")

    def meet(self) -> None:
        """Wait until no process of the group plans or builds, dead ones apart.

        Raises:
            Ended: the coordinator is gone.
            Abandoned: who started this process is dead.

        """
        self._wait_for("meet")

    def plan_of(self, spec: Mapping[str, Any]) -> tuple[Kernel, ...] | str | None:
        """The spec's kernels, or why they were not found; None: not known yet."""
        return self.plans.get(spec_key(spec))

    def close(self) -> None:
        """End the coordinator and all that it started."""
        assert self._child.stdin is not None
        # A forked child of this process can hold the pipe open.
        self._send({"end": True})
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._end_child()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        # What it has not done is seen by who waits for it.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()

    def _wait_for(self, verb: str) -> None:
        self._next_mark += 1
        mark = self._next_mark
        self._send({verb: mark})
        with self._changed:
            self._changed.wait_for(lambda: mark in self._marks or self._ended)
        if mark not in self._marks:
            self._lineage.check()
            raise Ended(self._describe_end())

    def _watch(self) -> None:
        """Have nothing compiled for an engine that nobody waits for."""
        while not self._ended:
            try:
                self._lineage.check()
            except Abandoned:
                self._child.kill()
                return
            time.sleep(_TICK)

    def _describe_end(self) -> str:
        if self._unheard is not None:
            return f"what builds kernels said what is not understood: {self._unheard}"
        return f"the process that builds kernels ended with {self._end_child()}"

    def _end_child(self) -> int:
        """Wait for it, who has been told to end or cannot be heard; its status."""
        try:
            return self._child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def _read(self) -> None:
        assert self._child.stdout is not None
        try:
            for line in self._child.stdout:
                self._hear(json.loads(line))
        # Border of a thread: who waits is told.
        except Exception as error:
            self._unheard = repr(error)
        finally:
            # Who writes to nobody must not wait for a reader.
            self._child.stdout.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _hear(self, event: _Event) -> None:
        if "planned" in event:
            kernels = tuple(map(Kernel.from_json, event["kernels"]))
            self.plans[event["planned"]] = kernels
        elif "unplanned" in event:
            self.plans[event["unplanned"]] = event["reason"]
        elif "kernel" in event:
            outcome = Outcome(**event["kernel"])
            self.outcomes[outcome.entry] = outcome
        mark = event.get("settled", event.get("met"))
        if mark is not None:
            with self._changed:
                self._marks.add(mark)
                self._changed.notify_all()
        self._tell(event)

    def _tell(self, event: _Event) -> None:
        try:
            self._listener(event)
        # Border of a thread: it says how far things are, and they go on without it.
        except Exception as error:
            if not self._deaf:
                logger.warning(
                    "DeepGEMM warmup: progress (%s): %r; kernels are built without it",
                    ", ".join(event),
                    error,
                )
            self._deaf = True
