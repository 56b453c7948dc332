"""Decides what is logged while other processes build: an estimate, then progress."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from .ready import describe_work

_SECONDS_BETWEEN_LINES = 5.0


class Work:
    """Listens to a session, in its reading thread.

    Args:
        logger: Where to.
        speaks: Whether this rank says anything.
        timeout: Seconds after which vLLM gives up on an engine that is not ready.

    """

    def __init__(self, logger: logging.Logger, speaks: bool, timeout: float) -> None:
        self._logger, self._speaks, self._timeout = logger, speaks, timeout
        self._done = 0
        self._start = self._last = time.perf_counter()

    def heard(self, event: Mapping[str, Any]) -> None:
        """Take in an event."""
        if not self._speaks:
            return
        said = describe_work(event, self._timeout)
        if said is not None:
            line, warns = said
            self._logger.log(logging.WARNING if warns else logging.INFO, line)
        if "kernel" in event and event["kernel"]["built"]:
            self._done += 1
            self._say()

    def _say(self) -> None:
        now = time.perf_counter()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._logger.info(
                "DeepGEMM warmup: %d kernels built, %.0f s",
                self._done,
                now - self._start,
            )
