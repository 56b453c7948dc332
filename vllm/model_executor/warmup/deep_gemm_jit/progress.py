"""Decides when a warmup says how far it is: from one rank, every few seconds."""

import fcntl
import pathlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self

from .calls import Call
from .spec import Spec

# Slow has to look different from stuck: a line at least every 10 s, also from a rank
# that takes the word after another one has finished (SGLang #10424).
SECONDS_BETWEEN_LINES = 5.0
_LOCK = "progress.lock"


class Turn:
    """Lets one process of a node speak at a time, the first rank before others.

    Whoever has the word keeps it until it has finished, so that the last rank that
    still compiles is heard.

    Args:
        folder: Where the processes of the node meet; without one the first rank
            alone speaks.
        first: This is the first rank of its engine.

    """

    def __init__(self, folder: pathlib.Path | None, *, first: bool) -> None:
        self._path = folder and folder / _LOCK
        self._first = first
        self._asked = 0
        self._held: IO[str] | None = None

    def take(self) -> bool:
        """Whether this process may speak now."""
        self._asked += 1
        if self._held is not None or (self._first and self._path is None):
            return True
        if self._path is None or not (self._first or self._asked > 1):
            return False
        try:
            file = self._path.open("a")
        # The folder is gone or full: as if there were none.
        except OSError:
            return self._first
        self._held = _lock(file)
        return self._held is not None

    def give(self) -> None:
        """Let another process speak."""
        if self._held is not None:
            self._held.close()
            self._held = None


def _lock(file: IO[str]) -> IO[str] | None:
    """Return ``file`` if no other process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


class Progress:
    """Says every few seconds how far the warmup is, as long as it lasts.

    From a thread of its own: DeepGEMM waits for a compiler for seconds, without
    Python's lock, and that is when a line is due.

    Args:
        turn: Whether this process may speak.
        say: Takes a line.
        interval: Seconds between lines.

    """

    def __init__(
        self,
        turn: Turn,
        say: Callable[[str], None],
        interval: float = SECONDS_BETWEEN_LINES,
    ) -> None:
        self._turn = turn
        self._say = say
        self._interval = interval
        self._total = 0
        self._done = 0
        self._known = self._idle = False
        self._built: set[str] = set()
        self._spec: Spec | None = None
        self._start = time.perf_counter()
        self._last_call = self._start
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="deep-gemm-warmup-progress", daemon=True
        )

    def start(self) -> None:
        """Begin to speak; nothing if that was begun."""
        if not self._thread.is_alive() and not self._over.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Say no more; nothing if nothing was said."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._turn.give()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def expect(self, total: int) -> None:
        """Take note that so many specs are to be done."""
        self._total = total

    def found(self) -> None:
        """Take note that it is known what is to be built."""
        self._known = True

    def rest(self, idle: bool) -> None:
        """Take note that nobody works, or that somebody does again."""
        self._idle = idle

    def built(self, entry: str) -> None:
        """Take note of a kernel, also of one that another process built."""
        self._known = True
        self._built.add(entry)

    def begin(self, spec: Spec) -> None:
        """Take note that ``spec`` is next."""
        self._idle = False
        self._spec, self._last_call = spec, time.perf_counter()

    def called(self, spec: Spec, call: Call) -> None:
        """Take note of a call that was made."""
        self._built.update(call.built)
        self._last_call = time.perf_counter()

    def finished(self, spec: Spec) -> None:
        """Take note that ``spec`` is done."""
        self._done += 1

    def line(self) -> str:
        """Return how far it is."""
        now = time.perf_counter()
        built = f"{len(self._built)} kernels built, {now - self._start:.0f} s"
        if self._spec is None and not self._known:
            return (
                "DeepGEMM warmup: finding out which kernels are needed, "
                f"{now - self._start:.0f} s"
            )
        if self._spec is None:
            return f"DeepGEMM warmup: {built}"
        return (
            f"DeepGEMM warmup: {self._done} of {self._total} shapes, {built}, now "
            f"{self._spec}, {now - self._last_call:.0f} s in this call"
        )

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            if not self._idle and self._turn.take():
                self._say(self.line())
