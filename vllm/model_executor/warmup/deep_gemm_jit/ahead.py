"""Decides when building starts: as layers are constructed, behind the weights' load.

A layer's kernel knows its shape when it is constructed, and so do experts that stand
before it. What they will run is planned and built from then on by a session's
processes, and the first GEMM, which is one of vLLM's memory-profiling run, waits for
them: the library would build the same kernels again.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
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

# What a kernel will run with up to so many tokens in a step.
Ask = Callable[[int], Iterable[Spec]]

# Why a spec is there that no loaded layer confirms: what an announcement could not say
# yet, that a layer runs through another entry point or with other rows, is known later.
AT_CONSTRUCTION = "announced at construction, confirmed by no layer"
AT_PROFILING = "asked for at the memory-profiling run, confirmed by no layer"


class Ahead:
    """What has been begun for the layers of this process.

    Args:
        work: Begins with the first spec that is not there yet; None: nothing is
            begun, what is announced is only kept.
        max_tokens: Most tokens of one step.

    Attributes:
        announced: What was heard of so far, and what to say where no layer confirms
            it.

    """

    def __init__(self, work: Work | None, max_tokens: int) -> None:
        self.work, self.max_tokens = work, max_tokens
        self.announced: dict[Spec, str] = {}
        self.waited = False
        # Layers that have said what they will run once they are loaded.
        self._heard: set[str] = set()

    def add(self, specs: Iterable[Spec], reason: str) -> None:
        """Have the kernels of specs built, where they are not there yet."""
        from .entry_points import STRATEGIES
        from .ready import describe_doubt, find_full

        for spec in specs:
            if spec in self.announced:
                continue
            if not STRATEGIES[spec.entry_point].in_deep_gemm_cache:
                continue
            self.announced[spec] = reason
            if self.work is None:
                continue
            doubt = None
            if self.work.session is None:
                if find_full([spec], self.work.config) is not None:
                    continue
                doubt = describe_doubt([spec], self.work.config)
            self.work.begin(doubt).add_spec(json_of(spec))

    def add_constructed(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Begin with what layers will run that are constructed and not loaded yet."""
        from .plan import Registered, plan_constructed

        new = [(name, each) for name, each in layers.items() if name not in self._heard]
        plan = plan_constructed(new, self.max_tokens)
        self._heard |= {outcome.name for outcome in plan.select(Registered)}
        self.add(plan.specs, AT_CONSTRUCTION)

    def wait(self) -> None:
        """Wait until all that is known is built, or has failed."""
        session = None if self.work is None else self.work.session
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
        # This process constructs layers to ask them, and builds nothing.
        self.asks = False


# Module-level state, because what it connects is not connected by any object of
# vLLM's: the constructor of a layer's kernel, the operator's body, and the warmup. A
# forked child that inherits it finds the session unusable.
_process = _Process()


def announce(ask: Ask, config: "VllmConfig") -> None:
    """Begin with what a kernel of an engine will run; never fails.

    Args:
        ask: The kernel, which is constructed.
        config: Of its engine.

    """
    if _process.engine() is not config.compilation_config:
        end()
        _process.engine = weakref.ref(config.compilation_config)
        _process.closed = False
    if _process.closed:
        return
    try:
        if _process.ahead is None:
            _process.ahead = _begin(config)
        _process.ahead.add(ask(_process.ahead.max_tokens), AT_CONSTRUCTION)
        # Experts have no constructor of ours: those that stand before this kernel.
        _process.ahead.add_constructed(config.compilation_config.static_forward_context)
    # Engine start: the warmup does the same later, and reports what is wrong.
    except Exception as error:
        _give_up(error)


def end() -> None:
    """End what was begun and was not taken over."""
    ahead, _process.ahead = _process.ahead, None
    if ahead is not None and ahead.work is not None:
        ahead.work.close()


def only_ask() -> None:
    """Begin nothing in this process: what is announced is kept for ``announced``."""
    _process.asks = True


def announced(config: "VllmConfig") -> Mapping[Spec, str]:
    """Return what an engine of ``config`` begins with before its warmup.

    Args:
        config: Its layers are loaded in this process, which only asks, and have no
            caches yet: so they are at the memory-profiling run.

    """
    ahead = _process.ahead
    if ahead is None:
        return {}
    layers = config.compilation_config.static_forward_context
    ahead.add(_specs_of(layers, ahead.max_tokens), AT_PROFILING)
    return ahead.announced


def wait_once() -> None:
    """Wait for what was begun, the first time in a start; never fails."""
    ahead = _process.ahead
    if ahead is None or ahead.waited:
        return
    try:
        ahead.waited = True
        ahead.add(_specs_in_forward_context(ahead.max_tokens), AT_PROFILING)
        ahead.wait()
    # Engine start: the library builds what is not there.
    except Exception as error:
        _give_up(error)


def take_over(config: Config) -> tuple[Work, Mapping[Spec, str]]:
    """Return who builds for ``config``, and what was announced so far.

    Who has begun goes on. A model that is constructed later, such as a drafter, is
    begun with again.
    """
    ahead, _process.ahead = _process.ahead, None
    if ahead is None or ahead.work is None:
        return open_work(config), {}
    begun = ahead.work.config
    if ahead.work.lost or not _same_work(begun, config):
        logger.debug("DeepGEMM warmup ahead: it was for %s, now %s", begun, config)
        ahead.work.close()
        return open_work(config), {}
    return ahead.work, ahead.announced


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

    max_tokens = config.scheduler_config.max_num_batched_tokens
    if _process.asks:
        return Ahead(None, max_tokens)
    settings = read_settings()
    jit = read_jit_config(config)
    off = "the mode is skip" if settings.skip else jit and jit.switched_off
    if off:
        raise Unplannable(off)
    target = read_target(torch.device("cuda", torch.cuda.current_device()))
    work = open_work(read_config(target, settings))
    return Ahead(work, max_tokens)


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


def _specs_in_forward_context(max_tokens: int) -> tuple[Spec, ...]:
    """Return what the layers run that did not say it when they were constructed.

    The base's forward context holds attention layers (MLA's context, indexers) and
    layers of experts, of which the last of a model has no kernel constructed after it.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return ()
    return _specs_of(get_forward_context().no_compile_layers, max_tokens)


def _specs_of(
    layers: Mapping[str, torch.nn.Module], max_tokens: int
) -> tuple[Spec, ...]:
    from .plan import plan_layers

    return plan_layers(layers.items(), max_tokens).specs
