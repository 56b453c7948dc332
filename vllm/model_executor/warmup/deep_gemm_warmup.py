"""The engine's DeepGEMM warmup: collect, plan, build, report.

Why: every kernel that a request will need has to be there before the first one;
    the base's warmup samples row counts by a copy of an old heuristic, compiles
    another GemmType for experts than serving uses, and says nothing at the end.
How: layers say what they run, DeepGEMM is called as serving calls it, a report
    names what was built, left out and not heard of.
Upstream: vllm-project/vllm#49905 (coverage), #56452 (providers).
Removal: when the base's warmup builds from specs and reports.
"""

import pathlib
import sys
import time
from collections.abc import Callable

import torch
from vllm.distributed.parallel_state import get_pp_group, get_world_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tracing import instrument
from vllm_deep_gemm_warmup import cache_place
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches
from vllm_deep_gemm_warmup.settings import Settings, read_settings

from .deep_gemm_jit import ahead
from .deep_gemm_jit.jit_config import read_jit_config
from .deep_gemm_jit.plan import Plan, make_plan
from .deep_gemm_jit.report import text
from .deep_gemm_jit.report.files import write_report
from .deep_gemm_jit.report.values import Report, SpecResult
from .deep_gemm_jit.speaker import speaks
from .deep_gemm_jit.spec import Target

logger = init_logger(__name__)

_MEGA_MOE_MODULES = (
    "vllm.models.deepseek_v4.nvidia.model",
    "vllm.models.kimi_k3.nvidia.model",
)
Stage = Callable[[torch.nn.Module, int, Settings], list[str]]
# Of a failure that every kernel shares, the first lines tell as much as all.
_PROBLEMS_SHOWN = 8


@instrument(span_name="DeepGEMM warmup")
def deep_gemm_warmup(model: torch.nn.Module, max_tokens: int) -> None:
    """Build every DeepGEMM kernel that serving ``model`` will need.

    Not called in mode ``skip``. ``enable_jit_warmup=False`` switches it off as well,
    but not where ``--enforce-eager`` has set it: without graphs it is needed the most.

    Args:
        model: Its weights are loaded.
        max_tokens: Most tokens of one step (``max_num_batched_tokens``).

    Raises:
        RuntimeError: ``VLLM_DEEP_GEMM_WARMUP_STRICT=1`` and a kernel failed to
            build or a layer should have registered and did not.

    """
    settings = read_settings()
    problems: list[str] = []
    try:
        for stage in (_warm, _warm_mega_moe):
            problems += _guarded(stage, model, max_tokens, settings)
    finally:
        ahead.end()
    if problems and settings.strict:
        raise RuntimeError("\n".join(problems))


def _guarded(
    stage: Stage, model: torch.nn.Module, max_tokens: int, settings: Settings
) -> list[str]:
    try:
        return stage(model, max_tokens, settings)
    # Engine start: a warmup that fails must not end it.
    except Exception as error:
        if settings.strict:
            raise
        logger.warning(
            "DeepGEMM warmup (rank %d, %s, max_tokens %d): %s: %s; the engine starts "
            "and kernels may be compiled in front of requests",
            _rank(),
            type(model).__name__,
            max_tokens,
            type(error).__name__,
            error,
        )
        logger.debug("DeepGEMM warmup failed", exc_info=True)
        return []


def _rank() -> int:
    """Return this process's rank, also where no group was made."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_initialized() else 0


def _warm(model: torch.nn.Module, max_tokens: int, settings: Settings) -> list[str]:
    """Plan, build and report; return what went wrong, a line each."""
    start = time.perf_counter()
    plan = make_plan(model, max_tokens)
    if not plan.outcomes:
        return []
    jit = read_jit_config(plan.config)
    if jit is not None and jit.switched_off:
        if speaks():
            logger.info("DeepGEMM warmup: nothing was warmed: %s", jit.switched_off)
        return []
    target, results = (
        _build(plan, model, max_tokens, settings) if plan.weights else (None, ())
    )
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
    else:
        _point_to_problems(report, settings)
    return text.problems(report)


def _publish(report: Report, settings: Settings) -> None:
    elsewhere = (cache_place.describe(cache) for cache in read_kernel_caches())
    problems = text.problems(report)
    hidden = len(problems) - _PROBLEMS_SHOWN
    for line in (
        *problems[:_PROBLEMS_SHOWN],
        *text.notices(report),
        *filter(None, elsewhere),
    ):
        logger.warning(line)
    if hidden > 0:
        logger.warning("DeepGEMM warmup: and %d more problems", hidden)
    if problems:
        logger.info(text.screen(report))
    if report.results:
        logger.info(text.summary(report))
    stage = get_pp_group().rank_in_group
    _write(report, settings, f"-stage{stage}" if stage else "")


def _point_to_problems(report: Report, settings: Settings) -> None:
    """Say in one line what went wrong on a rank that does not report."""
    problems = text.problems(report)
    if not problems:
        return
    rank = get_world_group().rank
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    logger.warning("rank %d: %s%s", rank, problems[0], more)
    _write(report, settings, f"-rank{rank}")


def _write(report: Report, settings: Settings, suffix: str) -> None:
    if settings.report is None:
        return
    path = _beside(settings.report, suffix)
    try:
        write_report(report, path)
    except OSError as error:
        logger.warning(
            "DeepGEMM warmup report (%s): %s; name a file that can be written",
            path,
            error,
        )


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def _build(
    plan: Plan, model: torch.nn.Module, max_tokens: int, settings: Settings
) -> tuple[Target, tuple[SpecResult, ...]]:
    # Talks to DeepGEMM: not to be imported for a model that has no use for it.
    from .deep_gemm_jit import monitor, sm_counts
    from .deep_gemm_jit.backend import read_target
    from .deep_gemm_jit.build import build

    device = torch.device("cuda", torch.cuda.current_device())
    whole, *parts = sm_counts.shares(read_target(device), max_tokens, plan.config)
    results = build(plan, device, whole.target, settings)
    for part in parts:
        with sm_counts.in_use(part.target):
            less = make_plan(model, part.max_tokens)
            results += build(less, device, part.target, settings)
    # For a model that has no linear layer on DeepGEMM, whose load would do it.
    monitor.install(read_jit_config(plan.config))
    return whole.target, tuple(results)


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
