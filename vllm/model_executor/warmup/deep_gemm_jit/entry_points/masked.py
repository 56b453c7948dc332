"""Decides how the grouped GEMM of batched experts is called: for which expected_m."""

import dataclasses

import torch
from vllm.utils import deep_gemm as deep_gemm_utils

from ..operands import BLOCK, choose_weights
from ..provider import Weights
from ..spec import EXPECTED_ROWS_STEP, MaskedSpec, Target
from .strategy import Shape, Strategy

# TMA wants column-major scales padded to so many rows; more of them tell DeepGEMM
# nothing that it asks (test_exhaustive.py calls it with all).
_ALIGNED_ROWS = 4


@dataclasses.dataclass(frozen=True)
class MaskedOperands:
    """Device memory for calls of one spec, dense, with few rows for each expert.

    Attributes:
        a: A (E, rows, K) float8_e4m3fn and its scale (E, rows, K / 128) float32,
            column by column.
        b: Weight (E, N, K) float8_e4m3fn and its block scale.
        d: D (E, rows, N) bfloat16.
        rows_of_experts: int32 zeros: no expert has rows.

    """

    a: tuple[torch.Tensor, torch.Tensor]
    b: tuple[torch.Tensor, torch.Tensor]
    d: torch.Tensor
    rows_of_experts: torch.Tensor


class MaskedGemm(Strategy[MaskedSpec, Shape, MaskedOperands]):
    """DeepGEMM's ``fp8_m_grouped_gemm_nt_masked``.

    A shape's rows are ``expected_m``, which alone decides on the kernel. A call
    takes tens of microseconds: none of the values that serving sends is left out.
    """

    def shapes(
        self, spec: MaskedSpec, target: Target, *, every_row: bool
    ) -> list[Shape]:
        first, last = spec.rows.first, spec.rows.last
        if every_row:
            return [Shape(expected) for expected in range(first, last + 1)]
        start = -(-first // EXPECTED_ROWS_STEP) * EXPECTED_ROWS_STEP
        expected = {*range(start, last + 1, EXPECTED_ROWS_STEP), last}
        return [Shape(rows) for rows in sorted(expected)]

    def allocate(
        self,
        spec: MaskedSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> MaskedOperands:
        rows = min(spec.capacity, _ALIGNED_ROWS + spec.capacity % _ALIGNED_ROWS)
        columns = spec.k // BLOCK
        return MaskedOperands(
            a=(
                torch.empty(
                    (spec.groups, rows, spec.k),
                    dtype=torch.float8_e4m3fn,
                    device=device,
                ),
                torch.zeros((spec.groups, columns, rows), device=device).mT,
            ),
            b=choose_weights(spec, weights, device, overlapping=overlapping),
            d=torch.empty(
                (spec.groups, rows, spec.n), dtype=torch.bfloat16, device=device
            ),
            rows_of_experts=torch.zeros(spec.groups, dtype=torch.int32, device=device),
        )

    def dense_bytes(self, spec: MaskedSpec) -> int:
        """Its operands do not grow with ``expected_m``."""
        return 1

    def call(self, operands: MaskedOperands, shape: Shape) -> None:
        deep_gemm_utils.fp8_m_grouped_gemm_nt_masked(
            operands.a, operands.b, operands.d, operands.rows_of_experts, shape.rows
        )
