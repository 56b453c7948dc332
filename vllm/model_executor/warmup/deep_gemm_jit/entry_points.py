"""Decides, for each entry point, which calls take all its kernels and how one is made.

An entry point is a value of ``EntryPoint`` and a strategy in the table below, and
nothing else: the backend runs whatever stands here.
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from vllm.utils import deep_gemm as deep_gemm_utils

from .operands import Operands, allocate, dense_bytes
from .provider import Weights
from .rows import rows_to_run
from .spec import EntryPoint, ExpertRouting, GemmSpec, Spec, Target


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one call passes: rows of A."""

    rows: int


@dataclasses.dataclass(frozen=True)
class GroupedShape(Shape):
    """Rows of A, each expert's padded to ``alignment``."""

    alignment: int


SpecT = TypeVar("SpecT", bound=Spec)
ShapeT = TypeVar("ShapeT", bound=Shape)
OperandsT = TypeVar("OperandsT")


class Strategy(abc.ABC, Generic[SpecT, ShapeT, OperandsT]):
    """How the kernels of one entry point are made to be built.

    Whatever a method raises becomes a row of the report.

    Attributes:
        takes_strided_rows: The function takes rows at any stride, so that those of
            the operands may overlap.

    """

    takes_strided_rows: ClassVar[bool] = True

    @abc.abstractmethod
    def shapes(self, spec: SpecT, target: Target, *, every_row: bool) -> list[ShapeT]:
        """Return the calls that together take every kernel of ``spec``.

        Args:
            spec: What to cover.
            target: What the kernels are built for.
            every_row: Sample nothing.

        """

    @abc.abstractmethod
    def allocate(
        self,
        spec: SpecT,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> OperandsT:
        """Return what ``call`` needs for up to ``max_rows`` rows.

        Args:
            spec: What will be called.
            max_rows: Most rows of one call.
            weights: Of a layer that has this spec.
            device: The CUDA device in use.
            overlapping: Rows lie over each other, so that memory does not grow
                with them.

        """

    @abc.abstractmethod
    def dense_bytes(self, spec: SpecT) -> int:
        """Return the bytes, at most, that a row takes where rows do not overlap."""

    @abc.abstractmethod
    def call(self, operands: OperandsT, shape: ShapeT) -> None:
        """Make one call, as serving makes it."""


class _Gemm(Strategy[GemmSpec, ShapeT, Operands]):
    """D = A @ B.T with one A, as ``Operands`` holds it."""

    def allocate(
        self,
        spec: GemmSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> Operands:
        return allocate(spec, max_rows, weights, device, overlapping=overlapping)

    def dense_bytes(self, spec: GemmSpec) -> int:
        return dense_bytes(spec)


class _PlainGemm(_Gemm[Shape]):
    """DeepGEMM's ``fp8_gemm_nt``: its kernels change with the row count M."""

    def shapes(self, spec: GemmSpec, target: Target, *, every_row: bool) -> list[Shape]:
        rows = rows_to_run(spec.rows, target, every_row=every_row)
        return [Shape(count) for count in rows]

    def call(self, operands: Operands, shape: Shape) -> None:
        deep_gemm_utils.fp8_gemm_nt(
            operands.a(shape.rows),
            operands.b,
            operands.d(shape.rows),
            is_deep_gemm_e8m0_used=operands.spec.ue8m0_cast,
        )


class _FlashInferGemm(_Gemm[Shape]):
    """FlashInfer's own DeepGEMM, for few rows, which it wants dense."""

    takes_strided_rows = False

    def shapes(self, spec: GemmSpec, target: Target, *, every_row: bool) -> list[Shape]:
        """Its rows are few, and its windows are not DeepGEMM's: all of them."""
        return [Shape(row) for row in range(spec.rows.first, spec.rows.last + 1)]

    def call(self, operands: Operands, shape: Shape) -> None:
        activation, _ = operands.a(shape.rows)
        torch.ops.vllm.flashinfer_fp8_blockscale_gemm(activation, *operands.b)


class _GroupedContiguousGemm(_Gemm[GroupedShape]):
    """DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous``, for the tokens of experts."""

    def shapes(
        self, spec: GemmSpec, target: Target, *, every_row: bool
    ) -> list[GroupedShape]:
        if every_row:
            every_token = range(spec.rows.first, spec.rows.last + 1)
            return [_padded(spec, tokens) for tokens in every_token]
        return list(_distinct_padded(spec))

    def call(self, operands: Operands, shape: GroupedShape) -> None:
        layout = operands.grouped_layout
        assert layout is not None
        options = {}
        if _routing(operands.spec).prefix_sum:
            options["use_psum_layout"] = True
        else:
            layout = layout[: shape.rows]
        with deep_gemm_utils.mk_alignment_scope(shape.alignment):
            deep_gemm_utils.m_grouped_fp8_gemm_nt_contiguous(
                operands.a(shape.rows),
                operands.b,
                operands.d(shape.rows),
                layout,
                **options,
            )


def _distinct_padded(spec: GemmSpec) -> Iterator[GroupedShape]:
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


def _padded(spec: GemmSpec, tokens: int) -> GroupedShape:
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
        compute_aligned_M_and_alignment,
    )

    total, alignment = compute_aligned_M_and_alignment(
        M=tokens,
        num_topk=_routing(spec).top_k,
        local_num_experts=spec.groups,
        alignment=deep_gemm_utils.get_mk_alignment_for_contiguous_layout()[0],
        expert_tokens_meta=None,
    )
    return GroupedShape(total, alignment)


def _routing(spec: GemmSpec) -> ExpertRouting:
    if spec.routing is None:
        raise ValueError(
            f"{spec.entry_point} ({spec}): the spec has no routing; set it in its "
            "provider"
        )
    return spec.routing


STRATEGIES: Mapping[EntryPoint, Strategy[Any, Any, Any]] = {
    EntryPoint.FP8_GEMM_NT: _PlainGemm(),
    EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS: _GroupedContiguousGemm(),
    EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: _FlashInferGemm(),
}
