"""Decides when an engine's kernels are begun with, and what is said while they come."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm_deep_gemm_warmup.cache_keys import explain_misses
from vllm_deep_gemm_warmup.compiling.building import building_seconds
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.kernel_caches import KernelCache, deep_gemm
from vllm_deep_gemm_warmup.offline.manifest import FILE as MANIFEST

from .progress import Progress
from .spec import spec_from_json

_SHAPES_SHOWN = 8


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

    def begin(self, doubt: str | None = None) -> Session:
        """Return the session; it is begun now if it was not.

        Args:
            doubt: Why what was kept of an earlier start does not count, or None.

        Raises:
            OSError: no process can be started, or the cache cannot be written.

        """
        if self._session is None:
            self._session = Session(self.config, self._heard)
            self.progress.start()
            if doubt is not None and self._speaks:
                self._logger.info("DeepGEMM warmup: %s; it is planned anew", doubt)
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
        """Why kernels are not found in a cache that has some, and which are not."""
        if self._session is None:
            return []
        plans = {
            key: plan
            for key, plan in dict(self._session.plans).items()
            if not isinstance(plan, str)
        }
        cache = deep_gemm(self.config.root)
        misses = explain_misses(
            (kernel for plan in plans.values() for kernel in plan),
            cache,
            self.config.context.sm_count,
        )
        if (cache.root / MANIFEST).exists():
            present = cache.entries()
            missing = {
                key: len({kernel.entry for kernel in plan} - present)
                for key, plan in plans.items()
            }
            misses += _describe_gaps(cache, self._session, missing)
        return misses


def _describe_gaps(
    cache: KernelCache, session: Session, missing: Mapping[str, int]
) -> list[str]:
    """Name the shapes that a cache lacks which was compiled to be whole, in a line."""
    shapes: Counter[str] = Counter()
    for key, count in missing.items():
        if count:
            spec = spec_from_json(session.specs[key])
            shapes[f"{spec.entry_point} {spec.shape}"] += count
    if not shapes:
        return []
    named = [f"{shape} ({count})" for shape, count in shapes.most_common(_SHAPES_SHOWN)]
    if len(shapes) > _SHAPES_SHOWN:
        named.append(f"{len(shapes) - _SHAPES_SHOWN} more")
    line = (
        f"DeepGEMM cache ({cache.root}): it was compiled beforehand and lacks kernels "
        f"of {', '.join(named)}; they are built now; compile it for this engine's "
        "arguments"
    )
    return [line]


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
