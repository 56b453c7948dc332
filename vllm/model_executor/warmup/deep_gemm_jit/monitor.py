"""Decides what is said of a kernel that is built after the engine is ready.

vLLM's monitor (``vllm/utils/jit_monitor.py``) watches Triton, CuTeDSL and TileLang. It
offers no way to report to it, so this file, and no other, calls its private
``_handle_jit_event``, which holds its modes and its sentence. It replaces the private
``_..._impl`` names of ``vllm/utils/deep_gemm.py``, through which every call of DeepGEMM
goes, and the name by which modules of vLLM call FlashInfer. test_monitor.py fails when
one of them moves.
"""

import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm.utils import jit_monitor
from vllm_deep_gemm_warmup.kernel_caches import KernelCache, read_kernel_caches
from vllm_deep_gemm_warmup.metrics import BuildCounters, open_counters

from .cache import CacheWatch
from .jit_config import JitConfig
from .spec import EntryPoint

logger = init_logger(__name__)

# A call takes well below a millisecond, and a compile half a second at the least;
# what loading a kernel from the cache takes lies between.
_SLOW_NS = 5_000_000
# Clocks of file systems tick every few milliseconds.
_TICK_NS = 50_000_000
_MARK = "deep_gemm_jit_monitor"
_SUFFIX = "_impl"
# Where vLLM's name for it is another than that of the function.
_FUNCTIONS = {
    "_grouped_impl": "m_grouped_fp8_gemm_nt_contiguous",
    "_grouped_masked_impl": "fp8_m_grouped_gemm_nt_masked",
    "_grouped_fp4_impl": "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "_get_mn_major_tma_aligned_tensor_impl": "get_col_major_tma_aligned_tensor",
}
# They compute a number and run no kernel.
_HOST_ONLY = (
    "_get_mk_alignment_for_contiguous_layout_impl",
    "_get_theoretical_mk_alignment_for_contiguous_layout_impl",
)
_FLASHINFER = {
    "vllm.model_executor.kernels.linear.scaled_mm.flashinfer": (
        "flashinfer_fp8_blockscale_gemm"
    ),
    "vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe": (
        "flashinfer_cutlass_fused_moe"
    ),
}


class BuiltAfterReadyError(RuntimeError):
    """A kernel was built during inference, and vLLM's monitor is in error mode."""


class Monitor:
    """Looks into the kernel caches after a call that took long.

    Args:
        caches: Where new kernels appear.
        counters: Counts them for the server; None where nobody would see it.
        jit: What the engine was told; None if that is not known.

    """

    def __init__(
        self,
        caches: tuple[KernelCache, ...],
        counters: BuildCounters | None,
        jit: JitConfig | None,
    ) -> None:
        self.jit = jit
        # A process may be the child of one whose heap was frozen.
        self._frozen_before = gc.get_freeze_count()
        self._counters = counters
        self._caches = [(cache, CacheWatch(cache)) for cache in caches]
        self._lock = threading.Lock()
        self._children = _seconds_of_children()

    def is_ready(self) -> bool:
        """Whether the engine serves by now.

        vLLM starts its monitor at the end of a worker's start, after the capture of
        CUDA graphs. Without JIT warmup (eager) it does not; freezing the heap is
        what comes next, and only a capture does that earlier.
        """
        if jit_monitor.is_active():
            return True
        eager = self.jit is not None and self.jit.eager
        return eager and gc.get_freeze_count() > self._frozen_before

    def took_long(
        self, entry_point: str, nanoseconds: int, operands: list[Any]
    ) -> None:
        """Report the kernels that a call built, if it did.

        Raises:
            BuiltAfterReadyError: It did, and vLLM's monitor is in error mode.

        """
        start = time.time_ns() - nanoseconds
        with self._lock:
            if not self._compiled():
                return
            kernels = [
                name
                for cache, watch in self._caches
                for name in watch.new_entries()
                if _is_newer(cache, name, start)
            ]
        if not kernels or not self.is_ready():
            return
        if self._counters is not None:
            self._counters.add(entry_point, len(kernels), nanoseconds / 1e9)
        detail = f"{entry_point} {_describe(operands)}, {nanoseconds / 1e9:.2f} s"
        _report(entry_point, ", ".join(kernels), detail)

    def _compiled(self) -> bool:
        """Whether a child of this process, as a compiler is, has ended since.

        Others share the folder, and a call can be slow for any reason.
        """
        before, self._children = self._children, _seconds_of_children()
        return self._children > before


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def install(jit: JitConfig | None) -> None:
    """Watch DeepGEMM and FlashInfer in this process, from now on.

    To be called again as modules are loaded: what is watched already stays, and the
    last engine's config counts.
    """
    seams = list(_seams())
    watched = [getattr(value, _MARK) for *_, value in seams if hasattr(value, _MARK)]
    if watched:
        monitor = watched[0]
        monitor.jit = jit or monitor.jit
    else:
        monitor = Monitor(read_kernel_caches(), open_counters(EntryPoint), jit)
    for module, name, entry_point, value in seams:
        if not hasattr(value, _MARK):
            setattr(module, name, watch(value, entry_point, monitor))


def watch(
    function: Callable[..., Any], entry_point: str, monitor: Monitor
) -> Callable[..., Any]:
    """Return ``function`` with an eye on how long it takes."""
    clock = time.perf_counter_ns
    is_compiling = torch.compiler.is_compiling

    def watched(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces the call and must not meet a clock.
        if is_compiling():
            return function(*args, **kwargs)
        start = clock()
        result = function(*args, **kwargs)
        if (elapsed := clock() - start) > _SLOW_NS:
            monitor.took_long(entry_point, elapsed, [*args, *kwargs.values()])
        return result

    setattr(watched, _MARK, monitor)
    watched.__wrapped__ = function  # type: ignore[attr-defined]
    return watched


def _seams() -> Iterator[tuple[Any, str, str, Any]]:
    """Yield module, name, entry point and value of what is to be watched."""
    for name, value in list(vars(deep_gemm_utils).items()):
        if name.endswith(_SUFFIX) and value is not None and name not in _HOST_ONLY:
            entry_point = _FUNCTIONS.get(name, name[1 : -len(_SUFFIX)])
            yield deep_gemm_utils, name, entry_point, value
    for module_name, name in _FLASHINFER.items():
        module = sys.modules.get(module_name)
        if module is not None:
            yield module, name, name, getattr(module, name)


def _is_newer(cache: KernelCache, name: str, start: int) -> bool:
    """Whether the entry came after ``start``, in ns since the epoch.

    The last look may be long ago, and another process may share the folder.
    """
    try:
        stamp = os.stat(cache.folder / name / cache.marker).st_mtime_ns  # noqa: PTH116
    except OSError:
        return False
    return stamp >= start - _TICK_NS


def _report(entry_point: str, kernels: str, detail: str) -> None:
    backend = "FlashInfer" if entry_point.startswith("flashinfer") else "DeepGEMM"
    if jit_monitor.is_active():
        try:
            jit_monitor._handle_jit_event(
                backend=backend,
                event="kernel JIT compilation",
                fn_name=kernels,
                detail=detail,
            )
        except RuntimeError as error:
            raise BuiltAfterReadyError(str(error)) from None
        return
    # Eager execution: vLLM's monitor is off, in either mode.
    logger.warning(
        "%s kernel JIT compilation during inference: %s (%s)", backend, kernels, detail
    )


def _describe(operands: list[Any]) -> str:
    """Return N, K and rows of a call: the first operand's rows, the second's columns.

    A pair is a tensor and its scale, and the scale says nothing more.
    """
    values = [value[0] if isinstance(value, tuple) else value for value in operands]
    shapes = [tuple(value.shape) for value in values if torch.is_tensor(value)]
    if not shapes:
        return "without tensors"
    rows, *others = shapes
    if not others or len(others[0]) < 2:
        return f"rows={rows[0]} {rows}"
    *groups, n, k = others[0]
    count = f" groups={groups[0]}" if groups else ""
    return f"N={n} K={k}{count} rows={rows[0]}"
