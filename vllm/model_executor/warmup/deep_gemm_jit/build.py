"""Decides how a plan's kernels come to be: built beside the engine, then loaded."""

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from vllm.logger import init_logger
from vllm_deep_gemm_warmup.compiling.environment import Unplannable
from vllm_deep_gemm_warmup.compiling.locks import in_turn
from vllm_deep_gemm_warmup.kernel_caches import flashinfer_locks, read_kernel_caches
from vllm_deep_gemm_warmup.lineage import Lineage
from vllm_deep_gemm_warmup.settings import Settings

from . import ahead
from .backend import Backend
from .calls import Call
from .entry_points import STRATEGIES
from .machine import read_config
from .plan import Plan
from .progress import Progress
from .ready import Ready, make_ready, stored_plan
from .report.values import SpecResult
from .speaker import speaks, take_turns
from .spec import Spec, Target
from .work import Work

logger = init_logger(__name__)


def build(
    plan: Plan, device: torch.device, target: Target, settings: Settings
) -> list[SpecResult]:
    """Have every kernel of ``plan`` built and loaded; return what became of each spec.

    Behind them what was begun with before the warmup and is in no plan.

    Args:
        plan: What to build.
        device: The CUDA device in use.
        target: What the kernels are for, which is what DeepGEMM uses now.
        settings: The operator's.

    Raises:
        RuntimeError: A kernel that was called has failed on the device.
        Abandoned: Who started this process is dead.

    """
    specs = [s for s in plan.specs if STRATEGIES[s.entry_point].in_deep_gemm_cache]
    work, announced = _work(specs, target, settings)
    progress = work.progress if work else Progress(take_turns(), logger.info)
    with progress:
        try:
            ready = _make_ready(specs, work) if work else None
            results = _load(
                plan,
                ready,
                Backend(device, target, read_kernel_caches()),
                progress,
                settings,
            )
            if work is not None and ready is not None:
                results += _unconfirmed(announced, ready, work, target)
            return results
        finally:
            if work is not None:
                work.close()


def _work(
    specs: list[Spec], target: Target, settings: Settings
) -> tuple[Work | None, Mapping[Spec, str]]:
    """Return who builds apart from the library, begun or not; None: nobody can.

    And what was announced to it.
    """
    if not specs or settings.workers == 0:
        return None, {}
    try:
        return ahead.take_over(read_config(target, settings))
    except (Unplannable, OSError) as error:
        _say_in_process(len(specs), {str(error)})
        return None, {}


def _make_ready(specs: list[Spec], work: Work) -> Ready | None:
    try:
        ready = make_ready(specs, work)
    # A cache that cannot be written is among them: the library makes do without.
    except OSError as error:
        _say_in_process(len(specs), {str(error)})
        return None
    if ready.problems:
        _say_in_process(len(specs), set(ready.problems))
    return ready


def _say_in_process(shapes: int, problems: set[str]) -> None:
    if speaks():
        logger.info(
            "DeepGEMM warmup (%d shapes): kernels are compiled in this process, one "
            "after the other: %s; a cache that can be written and a C compiler (cc) "
            "let them be built beside it",
            shapes,
            "; ".join(sorted(problems)),
        )


def _load(
    plan: Plan,
    ready: Ready | None,
    backend: Backend,
    progress: Progress,
    settings: Settings,
) -> list[SpecResult]:
    progress.expect(len(plan.weights))
    lineage = Lineage()

    def called(spec: Spec, call: Call) -> None:
        progress.called(spec, call)
        # Where the library compiles, each call takes seconds.
        lineage.check()

    results = {}
    for spec in _in_turn(plan.specs):
        weights = plan.weights[spec]
        progress.begin(spec)
        if ready is not None and spec in ready.plan.kernels:
            calls, left = backend.load(
                spec,
                weights,
                ready,
                every_row=settings.every_row,
                listener=called,
            )
        else:
            calls, left = backend.run(
                spec,
                weights,
                every_row=settings.every_row,
                listener=called,
            )
        progress.finished(spec)
        results[spec] = SpecResult(
            spec,
            plan.layers_of(spec),
            tuple(calls),
            tuple(left),
            backend.target,
        )
    backend.finish()
    return [results[spec] for spec in plan.weights]


def _in_turn(specs: Sequence[Spec]) -> Iterator[Spec]:
    """Yield specs: what is loaded, then what is compiled in this process.

    Each of the latter while this rank alone of the node has it: the others find its
    kernels. None is ready before all have their kernels, so that no rank compiles
    while others wait for it in a collective.
    """
    yield from (s for s in specs if STRATEGIES[s.entry_point].in_deep_gemm_cache)
    others = [s for s in specs if not STRATEGIES[s.entry_point].in_deep_gemm_cache]
    names = [f"{spec.entry_point} {spec.shape}" for spec in others]
    if others:
        yield from (others[i] for i in in_turn(flashinfer_locks(), names))


def _unconfirmed(
    announced: Mapping[Spec, str], ready: Ready, work: Work, target: Target
) -> list[SpecResult]:
    """Return what was built, or found, for specs that no layer has in the end.

    Kernels that a layer takes all the same are not among it, and none was called.
    """
    results = []
    taken = set(ready.plan.entries)
    for spec, reason in announced.items():
        if spec in ready.plan.kernels or spec in ready.plan.problems:
            continue
        kernels = stored_plan(spec, work.config)
        calls = [
            Call(
                json.loads(kernel.shape)["rows"],
                ready.seconds(kernel.entry),
                (kernel.entry,) if kernel.entry in ready.built else (),
                ready.failures.get(kernel.entry),
            )
            for kernel in kernels
            if kernel.entry not in taken
        ]
        taken |= {kernel.entry for kernel in kernels}
        if calls:
            results.append(SpecResult(spec, (), tuple(calls), (), target, reason))
    return results
