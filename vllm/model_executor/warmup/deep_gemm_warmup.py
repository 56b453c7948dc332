"""The engine's DeepGEMM warmup: collect, plan, build, report.

Why: every kernel that a request will need has to be there before the first one;
    the base's warmup samples row counts by a copy of an old heuristic, compiles
    another GemmType for experts than serving uses, and says nothing at the end.
How: layers say what they run, DeepGEMM is called as serving calls it, a report
    names what was built, left out and not heard of.
Upstream: vllm-project/vllm#49905 (coverage), #56452 (providers).
Removal: when the base's warmup builds from specs and reports.
"""

import sys
import time
from typing import TYPE_CHECKING

import torch
import vllm.envs as envs
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tracing import instrument
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches
from vllm_deep_gemm_warmup.settings import Settings, read_settings

from .deep_gemm_jit.calls import Call
from .deep_gemm_jit.plan import Plan, make_plan
from .deep_gemm_jit.report import Report, SpecResult, write_json
from .deep_gemm_jit.speaker import speaks
from .deep_gemm_jit.spec import Spec, Target

if TYPE_CHECKING:
    from .deep_gemm_jit.ready import Ready

logger = init_logger(__name__)

_MEGA_MOE_MODULES = (
    "vllm.models.deepseek_v4.nvidia.model",
    "vllm.models.kimi_k3.nvidia.model",
)
_SECONDS_BETWEEN_LINES = 5.0


@instrument(span_name="DeepGEMM warmup")
def deep_gemm_warmup(model: torch.nn.Module, max_tokens: int) -> None:
    """Build every DeepGEMM kernel that serving ``model`` will need.

    Args:
        model: Its weights are loaded.
        max_tokens: Most tokens of one step (``max_num_batched_tokens``).

    Raises:
        RuntimeError: ``VLLM_DEEP_GEMM_WARMUP_STRICT=1`` and a kernel failed to
            build or a layer should have registered and did not.

    """
    settings = read_settings()
    problems: list[str] = []
    for stage in (_warm, _warm_mega_moe):
        try:
            problems += stage(model, max_tokens, settings)
        # Engine start: a warmup that fails must not end it.
        except Exception as error:
            if settings.strict:
                raise
            logger.warning(
                "DeepGEMM warmup (%s, max_tokens %d): %s: %s; the engine starts and "
                "kernels may be compiled in front of requests",
                type(model).__name__,
                max_tokens,
                type(error).__name__,
                error,
            )
            logger.debug("DeepGEMM warmup failed", exc_info=True)
    if problems and settings.strict:
        raise RuntimeError("\n".join(problems))


def _warm(model: torch.nn.Module, max_tokens: int, settings: Settings) -> list[str]:
    """Plan, build and report; return what went wrong, a line each."""
    start = time.perf_counter()
    plan = make_plan(model, max_tokens)
    if not plan.outcomes:
        return []
    target, results = _build(plan, settings) if plan.weights else (None, ())
    report = Report(
        plan=plan,
        results=results,
        max_tokens=max_tokens,
        mode="full" if settings.every_row else "relax",
        target=target,
        seconds=time.perf_counter() - start,
    )
    if speaks():
        _publish(report, settings)
    return report.problems()


def _publish(report: Report, settings: Settings) -> None:
    for line in (*report.problems(), *report.notices()):
        logger.warning(line)
    if report.results:
        logger.info(report.summary())
    if settings.report is None:
        return
    stage = get_pp_group().rank_in_group
    path = settings.report
    if stage:
        path = path.with_name(f"{path.stem}-stage{stage}{path.suffix}")
    try:
        write_json(report, path)
    except OSError as error:
        logger.warning(
            "DeepGEMM warmup report (%s): %s; name a file that can be written",
            path,
            error,
        )


def _build(plan: Plan, settings: Settings) -> tuple[Target, tuple[SpecResult, ...]]:
    # Talks to DeepGEMM: not to be imported for a model that has no use for it.
    from .deep_gemm_jit.backend import Backend, read_target

    device = torch.device("cuda", torch.cuda.current_device())
    target = read_target(device)
    ready = _make_ready(plan, target, settings)
    backend = Backend(device, target, read_kernel_caches())
    progress = _Progress(len(plan.weights))
    results = []
    for spec, weights in plan.weights.items():
        how = {"every_row": settings.every_row, "listener": progress.called}
        if ready is not None and spec in ready.plan.kernels:
            calls, left = backend.load(spec, weights, ready, **how)
        else:
            calls, left = backend.run(spec, weights, **how)
        progress.specs += 1
        results.append(
            SpecResult(spec, plan.layers_of(spec), tuple(calls), tuple(left))
        )
    backend.finish()
    return target, tuple(results)


def _make_ready(plan: Plan, target: Target, settings: Settings) -> "Ready | None":
    """Have kernels built apart from the library, or say why they are not."""
    from vllm_deep_gemm_warmup.compiling.session import Session

    from .deep_gemm_jit.ahead import take_over
    from .deep_gemm_jit.entry_points import STRATEGIES
    from .deep_gemm_jit.machine import Unplannable, read_config
    from .deep_gemm_jit.ready import make_ready
    from .deep_gemm_jit.work import Work

    specs = [s for s in plan.weights if STRATEGIES[s.entry_point].in_deep_gemm_cache]
    if not specs or settings.workers == 0:
        return None
    ready, problems = None, set()
    try:
        config = read_config(target, settings)
        work = Work(logger, speaks(), envs.VLLM_ENGINE_READY_TIMEOUT_S)
        ready = make_ready(
            specs, config, take_over(config), lambda: Session(config, work.heard)
        )
        problems = set(ready.problems)
    # A cache that cannot be written is among them: the library makes do without.
    except (Unplannable, OSError) as error:
        problems.add(str(error))
    if problems and speaks():
        logger.info(
            "DeepGEMM warmup (%d shapes): kernels are compiled in this process, one "
            "after the other: %s",
            len(specs),
            "; ".join(sorted(problems)),
        )
    return ready


class _Progress:
    """Logs a line every few seconds while kernels are being built."""

    def __init__(self, total: int) -> None:
        self.specs = 0
        self._total = total
        self._built = 0
        self._start = self._last = time.perf_counter()
        self._speaks = speaks()

    def called(self, spec: Spec, call: Call) -> None:
        self._built += len(call.built)
        now = time.perf_counter()
        if self._speaks and now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            logger.info(
                "DeepGEMM warmup: %d of %d shapes, %d kernels built, %.0f s, now %s",
                self.specs,
                self._total,
                self._built,
                now - self._start,
                spec,
            )


def _warm_mega_moe(
    model: torch.nn.Module, max_tokens: int, settings: Settings
) -> list[str]:
    """Leave Blackwell's MegaMoE to the base, whose layers it knows."""
    if current_platform.is_device_capability_family(100) and any(
        name in sys.modules for name in _MEGA_MOE_MODULES
    ):
        from vllm_deep_gemm_warmup.diversion import base_deep_gemm_warmup

        base_deep_gemm_warmup().deepgemm_fp8_fp4_mega_moe_warmup(model, max_tokens)
    return []
