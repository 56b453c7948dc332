"""Decides how the grouped GEMM of experts is called, and for which row totals."""

import dataclasses
from collections.abc import Iterator

from vllm.utils import deep_gemm as deep_gemm_utils

from ..operands import Operands
from ..spec import ExpertRouting, GemmSpec, Target
from .gemm import Gemm
from .strategy import Shape

# The largest row total that is called. Of the public models' experts none takes a new
# kernel of DeepGEMM 2.8.1 above 5760 rows (45 blocks of 128); test_exhaustive.py keeps
# checking. A's scale, which is dense, would grow to hundreds of MiB on many ranks.
_MOST_ROWS = 1024 * 128


@dataclasses.dataclass(frozen=True)
class GroupedShape(Shape):
    """Rows of A, each expert's padded to ``alignment``."""

    alignment: int


class GroupedContiguousGemm(Gemm[GroupedShape]):
    """DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous``, for the tokens of experts."""

    def shapes(
        self, spec: GemmSpec, target: Target, *, every_row: bool
    ) -> list[GroupedShape]:
        if _routing(spec).counted:
            return _totals(spec, every_row=every_row)
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


def _totals(spec: GemmSpec, *, every_row: bool) -> list[GroupedShape]:
    """Return the row totals of experts whose tokens are counted, each block full."""
    block = deep_gemm_utils.get_mk_alignment_for_contiguous_layout()[0]
    here = spec.rows.last * min(_routing(spec).top_k, spec.groups)
    most = here + spec.groups * (block - 1)
    last = most if every_row else min(most, _MOST_ROWS)
    return [GroupedShape(total, block) for total in range(block, last + 1, block)]


def _distinct_padded(spec: GemmSpec) -> Iterator[GroupedShape]:
    """Yield the distinct padded row totals that the spec's tokens can give.

    Both the total and the alignment grow with the tokens, so each value holds
    on one interval, whose end is found by doubling and halving.
    """
    tokens = spec.rows.first
    while tokens <= spec.rows.last:
        shape = _padded(spec, tokens)
        yield shape
        if shape.rows >= _MOST_ROWS:
            return
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
