"""Decides when an engine's kernels are begun with, and what is said while they come."""

import logging
from collections.abc import Mapping
from typing import Any

from vllm_deep_gemm_warmup.cache_keys import explain_misses
from vllm_deep_gemm_warmup.compiling.building import building_seconds
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.kernel_caches import deep_gemm

from .progress import Progress


class Work:
    """A session, begun when there is something to build, and heard until it ends.

    Args:
        config: What it is begun with.
        progress: Says how far it is.
        logger: For an estimate before the first build.
        speaks: Whether this rank says it.
        timeout: Seconds after which vLLM gives up on an engine that is not ready.

    """

    def __init__(
        self,
        config: Config,
        progress: Progress,
        logger: logging.Logger,
        *,
        speaks: bool,
        timeout: float,
    ) -> None:
        self.config, self.progress = config, progress
        self._logger, self._speaks, self._timeout = logger, speaks, timeout
        self._session: Session | None = None

    @property
    def session(self) -> Session | None:
        """What was begun, if this process can use it."""
        begun = self._session
        return begun if begun is not None and begun.usable else None

    @property
    def lost(self) -> bool:
        """Whether it was begun and this process cannot use it."""
        return self._session is not None and self.session is None

    def begin(self) -> Session:
        """Return the session; it is begun now if it was not.

        Raises:
            OSError: no process can be started, or the cache cannot be written.

        """
        if self._session is None:
            self._session = Session(self.config, self._heard)
            self.progress.start()
        return self._session

    def close(self) -> None:
        """End the session and its lines; both may have ended."""
        session, self._session = self._session, None
        if session is not None and session.usable:
            session.close()
        self.progress.stop()

    def _heard(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the session, in its reading thread."""
        if "kernel" in event and event["kernel"]["built"]:
            self.progress.built(event["kernel"]["entry"])
        if "idle" in event:
            self.progress.rest(event["idle"])
        if "missing" not in event:
            return
        self.progress.found()
        if self._speaks:
            for miss in self._misses():
                self._logger.warning(miss)
            line, late = describe_work(
                event["missing"], event["workers"], self._timeout
            )
            self._logger.log(logging.WARNING if late else logging.INFO, line)

    def _misses(self) -> list[str]:
        if self._session is None:
            return []
        plans = [p for p in self._session.plans.values() if not isinstance(p, str)]
        return explain_misses(
            (kernel for plan in plans for kernel in plan),
            deep_gemm(self.config.root),
            self.config.context.sm_count,
        )


def describe_work(missing: int, workers: int, timeout: float) -> tuple[str, bool]:
    """Return the estimate before the first build, and whether it warns.

    Args:
        missing: Kernels to build.
        workers: Compilers at a time.
        timeout: Seconds after which vLLM gives up on an engine that is not ready.

    """
    seconds = building_seconds(missing, workers)
    line = (
        f"DeepGEMM warmup: {missing} kernels to build, {workers} at a time, about "
        f"{seconds:.0f} s"
    )
    if seconds <= timeout:
        return line, False
    return (
        f"{line}; vLLM gives up on an engine after {timeout:.0f} s "
        f"(VLLM_ENGINE_READY_TIMEOUT_S): raise it, or build the cache beforehand"
    ), True
