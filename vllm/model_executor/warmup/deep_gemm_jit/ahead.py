"""Decides when building starts: as layers are constructed, behind the weights' load.

A layer's kernel knows its shape when it is constructed. What it will run is planned and
built from then on by a session's processes, and the first GEMM, which is one of vLLM's
memory-profiling run, waits for them: the library would build the same kernels again.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.environment import Unplannable
from vllm_deep_gemm_warmup.compiling.session import Ended, Session
from vllm_deep_gemm_warmup.settings import read_settings

from .kernels import json_of
from .spec import Spec

logger = logging.getLogger("vllm.deep_gemm_warmup")

# What a kernel will run with up to so many tokens in a step, once it can be asked.
Ask = Callable[[int], Iterable[Spec]]


class Ahead:
    """What has been begun for the layers of this process.

    Args:
        config: For the session.
        max_tokens: Most tokens of one step.
        listener: For the session.

    """

    def __init__(
        self, config: Config, max_tokens: int, listener: Callable[[Any], None]
    ) -> None:
        self.config, self.max_tokens = config, max_tokens
        self._listener = listener
        self._session: Session | None = None
        self._waiting: Ask | None = None
        self._seen: set[Spec] = set()
        self.waited = False

    def announce(self, ask: Ask) -> None:
        """Take in a kernel that is being constructed.

        It is asked when the next one comes, or at the end: a dynamic wrapper makes
        itself known to its kernels after it has constructed them.
        """
        before, self._waiting = self._waiting, ask
        if before is not None:
            self.add(before(self.max_tokens))

    def add(self, specs: Iterable[Spec]) -> None:
        """Have the kernels of specs built, where they are not there yet."""
        from .ready import find_full

        for spec in specs:
            if spec in self._seen:
                continue
            self._seen.add(spec)
            if self._session is None and find_full([spec], self.config) is not None:
                continue
            if self._session is None:
                self._session = Session(self.config, self._listener)
            self._session.add_spec(json_of(spec))

    def flush(self) -> None:
        """Ask the kernel that came last."""
        last, self._waiting = self._waiting, None
        if last is not None:
            self.add(last(self.max_tokens))

    def wait(self) -> None:
        """Wait until all that is known is built, or has failed."""
        self.waited = True
        self.flush()
        if self._session is not None and self._session.usable:
            self._session.settle()

    def take(self) -> Session | None:
        """Hand the session over, if there is one that this process can use."""
        session, self._session = self._session, None
        return session if session is not None and session.usable else None


class _Process:
    """What this process has begun; see ``_process``."""

    def __init__(self) -> None:
        self.ahead: Ahead | None = None
        # Nothing can be begun here, or the warmup has taken over.
        self.closed = False


# Module-level state, because what it connects is not connected by any object of
# vLLM's: the constructor of a layer's kernel, the operator's body, and the warmup. A
# forked child that inherits it finds the session unusable.
_process = _Process()


def announce(ask: Ask) -> None:
    """Begin with what a kernel will run; never fails."""
    if _process.closed:
        return
    try:
        if _process.ahead is None:
            _process.ahead = _begin()
        _process.ahead.announce(ask)
    # Engine start: the warmup does the same later, and reports what is wrong.
    except Exception as error:
        _give_up(error)


def wait_once() -> None:
    """Wait for what was begun, the first time in a start; never fails."""
    ahead = _process.ahead
    if ahead is None or ahead.waited:
        return
    try:
        ahead.waited = True
        ahead.add(_specs_in_forward_context(ahead.max_tokens))
        ahead.wait()
    # Engine start: the library builds what is not there.
    except Exception as error:
        _give_up(error)


def take_over(config: Config) -> Session | None:
    """Return the session that was begun for ``config``, if any; nothing is begun now.

    A model that is constructed later, such as a drafter, is begun with again.
    """
    ahead, _process.ahead = _process.ahead, None
    if ahead is None:
        return None
    try:
        ahead.flush()
    # Engine start: what is not flushed is in the warmup's own plan.
    except Exception as error:
        logger.debug("DeepGEMM warmup ahead: %s", error)
    session = ahead.take()
    if session is not None and ahead.config != config:
        session.close()
        return None
    return session


def _begin() -> Ahead:
    import vllm.envs as envs
    from vllm.config import get_current_vllm_config

    from .backend import read_target
    from .machine import read_config
    from .speaker import speaks
    from .work import Work

    if envs.VLLM_DEEP_GEMM_WARMUP == "skip":
        raise Unplannable("the warmup is switched off")
    target = read_target(torch.device("cuda", torch.cuda.current_device()))
    config = read_config(target, read_settings())
    work = Work(logger, speaks(), envs.VLLM_ENGINE_READY_TIMEOUT_S)
    max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
    return Ahead(config, max_tokens, work.heard)


def _give_up(error: Exception) -> None:
    _process.closed = True
    ahead, _process.ahead = _process.ahead, None
    if ahead is not None and (session := ahead.take()) is not None:
        session.close()
    if not isinstance(error, (Unplannable, Ended)):
        logger.debug("DeepGEMM warmup ahead: given up", exc_info=error)


def _specs_in_forward_context(max_tokens: int) -> list[Spec]:
    """Return what the layers run that do not know it when they are constructed.

    The base's forward context holds attention layers and layers of experts.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    from .entry_points import STRATEGIES
    from .plan import plan_layers

    if not is_forward_context_available():
        return []
    layers = get_forward_context().no_compile_layers
    plan = plan_layers(layers.items(), max_tokens)
    return [s for s in plan.specs if STRATEGIES[s.entry_point].in_deep_gemm_cache]
