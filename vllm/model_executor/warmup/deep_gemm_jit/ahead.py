"""Decides when building starts: as layers are constructed, behind the weights' load.

A layer's kernel knows its shape when it is constructed. What it will run is planned and
built from then on by a session's processes, and the first GEMM, which is one of vLLM's
memory-profiling run, waits for them: the library would build the same kernels again.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.environment import Unplannable
from vllm_deep_gemm_warmup.settings import read_settings

from .jit_config import read_jit_config
from .kernels import json_of
from .progress import Progress
from .spec import Spec
from .work import Work

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.deep_gemm_warmup")

# What a kernel will run with up to so many tokens in a step, once it can be asked.
Ask = Callable[[int], Iterable[Spec]]


class Ahead:
    """What has been begun for the layers of this process.

    Args:
        work: Begins with the first spec that is not there yet.
        max_tokens: Most tokens of one step.

    """

    def __init__(self, work: Work, max_tokens: int) -> None:
        self.work, self.max_tokens = work, max_tokens
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
        from .entry_points import STRATEGIES
        from .ready import find_full

        for spec in specs:
            if spec in self._seen:
                continue
            self._seen.add(spec)
            if not STRATEGIES[spec.entry_point].in_deep_gemm_cache:
                continue
            begun = self.work.session is not None
            if begun or find_full([spec], self.work.config) is None:
                self.work.begin().add_spec(json_of(spec))

    def flush(self) -> None:
        """Ask the kernel that came last."""
        last, self._waiting = self._waiting, None
        if last is not None:
            self.add(last(self.max_tokens))

    def wait(self) -> None:
        """Wait until all that is known is built, or has failed."""
        self.flush()
        session = self.work.session
        if session is not None:
            session.settle()


class _Process:
    """What this process has begun; see ``_process``."""

    def __init__(self) -> None:
        self.ahead: Ahead | None = None
        # Of an engine: the part of its config that target and drafter share.
        self.engine: Callable[[], object | None] = lambda: None
        # Nothing can be begun for that engine.
        self.closed = False


# Module-level state, because what it connects is not connected by any object of
# vLLM's: the constructor of a layer's kernel, the operator's body, and the warmup. A
# forked child that inherits it finds the session unusable.
_process = _Process()


def announce(ask: Ask, config: "VllmConfig") -> None:
    """Begin with what a kernel of an engine will run; never fails."""
    if _process.engine() is not config.compilation_config:
        end()
        _process.engine = weakref.ref(config.compilation_config)
        _process.closed = False
    if _process.closed:
        return
    try:
        if _process.ahead is None:
            _process.ahead = _begin(config)
        _process.ahead.announce(ask)
    # Engine start: the warmup does the same later, and reports what is wrong.
    except Exception as error:
        _give_up(error)


def end() -> None:
    """End what was begun and was not taken over."""
    ahead, _process.ahead = _process.ahead, None
    if ahead is not None:
        ahead.work.close()


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


def take_over(config: Config) -> Work | None:
    """Return what was begun for ``config``, if any; nothing is begun now.

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
    begun = ahead.work.config
    if ahead.work.session is None or not _same_work(begun, config):
        logger.debug("DeepGEMM warmup ahead: it was for %s, now %s", begun, config)
        ahead.work.close()
        return None
    return ahead.work


def _same_work(one: Config, other: Config) -> bool:
    """Whether the kernels are the same; how many compilers run is of no matter."""
    return (one.context, one.root) == (other.context, other.root)


def open_work(config: Config) -> Work:
    """Return work that is not begun, which speaks for this rank if any does."""
    import vllm.envs as envs

    from .speaker import speaks, take_turns

    return Work(
        config,
        Progress(take_turns(), logger.info),
        logger,
        speaks=speaks(),
        timeout=envs.VLLM_ENGINE_READY_TIMEOUT_S,
    )


def _begin(config: "VllmConfig") -> Ahead:
    from .backend import read_target
    from .machine import read_config

    settings = read_settings()
    jit = read_jit_config(config)
    off = "the mode is skip" if settings.skip else jit and jit.switched_off
    if off:
        raise Unplannable(off)
    target = read_target(torch.device("cuda", torch.cuda.current_device()))
    work = open_work(read_config(target, settings))
    return Ahead(work, config.scheduler_config.max_num_batched_tokens)


def _give_up(error: Exception) -> None:
    _process.closed = True
    end()
    if not isinstance(error, Unplannable):
        logger.warning(
            "DeepGEMM warmup ahead of the weights: %s: %s; kernels are built after the "
            "load instead",
            type(error).__name__,
            error,
        )


def _specs_in_forward_context(max_tokens: int) -> list[Spec]:
    """Return what the layers run that do not know it when they are constructed.

    The base's forward context holds attention layers and layers of experts.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    from .plan import plan_layers

    if not is_forward_context_available():
        return []
    layers = get_forward_context().no_compile_layers
    return list(plan_layers(layers.items(), max_tokens).specs)
