"""Decides how DeepGEMM is made to build a spec's kernels: by calling it."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from vllm.utils import deep_gemm as deep_gemm_utils

from .cache import CacheWatch, cache_folders
from .calls import Call, describe_failure
from .operands import Operands, allocate, dense_bytes
from .provider import Weights
from .rows import rows_to_run
from .spec import EntryPoint, GemmSpec, Target

# Of the free memory, for A and D where a driver refuses rows that overlap.
_DENSE_SHARE = 0.5
# A compiler that fails this often in a row on one spec fails on all of it.
_MAX_FAILURES_IN_A_ROW = 3


def read_target(device: torch.device) -> Target:
    """Read from ``device`` and DeepGEMM what the kernels are built for."""
    major, minor = torch.cuda.get_device_capability(device)
    return Target(major, minor, deep_gemm_utils.get_num_sms())


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one call passes: rows of A, and the grouped GEMM's row alignment."""

    rows: int
    alignment: int | None = None


def shapes_to_run(spec: GemmSpec, target: Target, *, every_row: bool) -> list[Shape]:
    """Return the calls that together take every kernel of ``spec``."""
    if spec.routing is not None:
        every_token = range(spec.rows.first, spec.rows.last + 1)
        return (
            [_padded(spec, tokens) for tokens in every_token]
            if every_row
            else list(_grouped_shapes(spec))
        )
    # FlashInfer's rows are few, and its windows are not DeepGEMM's.
    every_row |= spec.entry_point is EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM
    rows = rows_to_run(spec.rows, target, every_row=every_row)
    return [Shape(count) for count in rows]


def _grouped_shapes(spec: GemmSpec) -> Iterator[Shape]:
    """Yield every distinct padded row total that the spec's tokens can give.

    Both the total and the alignment grow with the tokens, so each value holds
    on one interval, whose end is found by doubling and halving.
    """
    tokens = spec.rows.first
    while tokens <= spec.rows.last:
        shape = _padded(spec, tokens)
        yield shape
        step = 1
        while tokens + step <= spec.rows.last and _padded(spec, tokens + step) == shape:
            step *= 2
        low, high = tokens + step // 2, min(tokens + step, spec.rows.last + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if _padded(spec, middle) == shape:
                low = middle
            else:
                high = middle
        tokens = high


def _padded(spec: GemmSpec, tokens: int) -> Shape:
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
        compute_aligned_M_and_alignment,
    )

    assert spec.routing is not None
    total, alignment = compute_aligned_M_and_alignment(
        M=tokens,
        num_topk=spec.routing.top_k,
        local_num_experts=spec.groups,
        alignment=deep_gemm_utils.get_mk_alignment_for_contiguous_layout()[0],
        expert_tokens_meta=None,
    )
    return Shape(total, alignment)


class Backend:
    """Builds specs on one device by calling DeepGEMM as serving does."""

    def __init__(self, device: torch.device, target: Target) -> None:
        self._device = device
        self._target = target
        self._overlaps: dict[EntryPoint, bool] = {}
        self._caches = [CacheWatch(folder) for folder in cache_folders()]

    def run(
        self,
        spec: GemmSpec,
        weights: Weights | None,
        *,
        every_row: bool,
        listener: Callable[[GemmSpec, Call], None],
    ) -> list[Call]:
        """Call DeepGEMM until every kernel of ``spec`` is built and loaded.

        Args:
            spec: What to cover.
            weights: The weight and block scale of a layer that has this spec.
            every_row: Call with every row count and not one of each window.
            listener: Told of each call.

        Returns:
            The calls made. One that failed says why and the rest go on, until
            several in a row have failed.

        """
        calls: list[Call] = []
        try:
            shapes = shapes_to_run(spec, self._target, every_row=every_row)
            operands = self._allocate(spec, shapes, weights)
        # Engine start: whatever keeps this spec from being built, the others go on.
        except Exception as error:
            calls.append(Call(spec.rows.first, 0.0, (), describe_failure(error)))
            listener(spec, calls[-1])
            return calls
        for shape in shapes:
            if _keeps_failing(calls):
                break
            start = time.perf_counter()
            failure = _try(operands, shape)
            calls.append(
                Call(
                    shape.rows,
                    time.perf_counter() - start,
                    self._new_entries(),
                    failure,
                )
            )
            listener(spec, calls[-1])
        return calls

    def finish(self) -> None:
        """Wait for the device, so that a fault of ours shows here and not later.

        Raises:
            RuntimeError: A kernel that was called has failed on the device.

        """
        torch.cuda.synchronize(self._device)
        if not all(self._overlaps.values()):
            # Dense operands can be large, and the KV cache is sized already.
            torch.cuda.empty_cache()

    def _new_entries(self) -> tuple[str, ...]:
        return tuple(name for cache in self._caches for name in cache.new_entries())

    def _allocate(
        self, spec: GemmSpec, shapes: Sequence[Shape], weights: Weights | None
    ) -> Operands:
        max_rows = max(shape.rows for shape in shapes)
        if self._rows_may_overlap(spec, shapes, weights):
            return allocate(spec, max_rows, weights, self._device, overlapping=True)
        # The spec before left its rows in PyTorch's cache, where they are not free.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        limit = int(free * _DENSE_SHARE) // dense_bytes(spec)
        return allocate(
            spec,
            min(max_rows, max(1, limit)),
            weights,
            self._device,
            overlapping=False,
        )

    def _rows_may_overlap(
        self, spec: GemmSpec, shapes: Sequence[Shape], weights: Weights | None
    ) -> bool:
        """Find out once for each entry point, by its first spec's smallest call.

        A driver could refuse a tensor map whose rows lie over each other. One row
        lies over no other, so it tells nothing and costs nothing. A call that fails
        in both forms has another reason, and memory is saved.
        """
        first = next((shape for shape in shapes if shape.rows > 1), None)
        if first is None or not _takes_strides(spec):
            return False
        if spec.entry_point not in self._overlaps:
            overlapping, dense = (
                allocate(spec, first.rows, weights, self._device, overlapping=form)
                for form in (True, False)
            )
            self._overlaps[spec.entry_point] = self._works(
                overlapping, first
            ) or not self._works(dense, first)
        return self._overlaps[spec.entry_point]

    def _works(self, operands: Operands, shape: Shape) -> bool:
        if _try(operands, shape) is not None:
            return False
        torch.cuda.synchronize(self._device)
        return True


def _try(operands: Operands, shape: Shape) -> str | None:
    """Make one call and return why it failed, or None."""
    if shape.rows > operands.max_rows:
        needed = shape.rows * dense_bytes(operands.spec) >> 20
        return f"needs {needed} MiB, more than half of the free memory"
    try:
        _call(operands, shape)
    # Engine start: DeepGEMM raises RuntimeError, FlashInfer's build also OSError
    # and what its tools raise.
    except Exception as error:
        return describe_failure(error)
    return None


def _takes_strides(spec: GemmSpec) -> bool:
    """Whether the function takes rows at any stride; FlashInfer wants them dense."""
    return spec.entry_point is not EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM


def _keeps_failing(calls: Sequence[Call]) -> bool:
    recent = calls[-_MAX_FAILURES_IN_A_ROW:]
    return len(recent) == _MAX_FAILURES_IN_A_ROW and all(
        call.failure is not None for call in recent
    )


def _call(operands: Operands, shape: Shape) -> None:
    spec = operands.spec
    b = (operands.weight, operands.weight_scale)
    a, d = operands.a(shape.rows), operands.d(shape.rows)
    if spec.entry_point is EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM:
        torch.ops.vllm.flashinfer_fp8_blockscale_gemm(a[0], *b)
        return
    if spec.routing is None:
        deep_gemm_utils.fp8_gemm_nt(a, b, d, is_deep_gemm_e8m0_used=spec.ue8m0_cast)
        return
    assert shape.alignment is not None and operands.grouped_layout is not None
    layout = operands.grouped_layout
    options = {"use_psum_layout": True} if spec.routing.prefix_sum else {}
    if not spec.routing.prefix_sum:
        layout = layout[: shape.rows]
    with deep_gemm_utils.mk_alignment_scope(shape.alignment):
        deep_gemm_utils.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, **options)
