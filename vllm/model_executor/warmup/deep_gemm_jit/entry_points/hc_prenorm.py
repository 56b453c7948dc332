"""Decides how the GEMM of the hyper-connections is called, for which splits of K."""

import dataclasses
from collections.abc import Callable

import torch
from vllm.utils import deep_gemm as deep_gemm_utils

from ..operands import TMA_BYTES, is_usable
from ..provider import Weights
from ..spec import HcPrenormSpec, SplitRule, Target
from .strategy import Shape, Strategy


@dataclasses.dataclass(frozen=True)
class HcPrenormShape(Shape):
    """Rows of A, with K in so many parts."""

    splits: int


@dataclasses.dataclass(frozen=True)
class HcPrenormOperands:
    """Device memory for calls of one spec.

    Attributes:
        activation: Flat bfloat16 storage of A.
        row_stride: Elements from row to row of A.
        weight: B (N, K) float32.

    """

    activation: torch.Tensor
    row_stride: int
    weight: torch.Tensor


class HcPrenormGemm(Strategy[HcPrenormSpec, HcPrenormShape, HcPrenormOperands]):
    """DeepGEMM's ``tf32_hc_prenorm_gemm``: one kernel for each number of splits."""

    def shapes(
        self, spec: HcPrenormSpec, target: Target, *, every_row: bool
    ) -> list[HcPrenormShape]:
        splits_of = _splits_of(spec)
        rows = range(spec.rows.first, spec.rows.last + 1)
        every = [HcPrenormShape(count, splits_of(count)) for count in rows]
        if every_row:
            return every
        # Of each number of splits the last in this order, that with the fewest rows.
        fewest = {shape.splits: shape for shape in reversed(every)}
        return sorted(fewest.values(), key=lambda shape: shape.rows)

    def allocate(
        self,
        spec: HcPrenormSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> HcPrenormOperands:
        stride = TMA_BYTES // 2 if overlapping else spec.k
        if weights is None or not is_usable(weights[0], device):
            weights = (torch.empty((spec.n, spec.k), device=device),)
        return HcPrenormOperands(
            activation=torch.empty(
                (max_rows - 1) * stride + spec.k, dtype=torch.bfloat16, device=device
            ),
            row_stride=stride,
            weight=weights[0],
        )

    def dense_bytes(self, spec: HcPrenormSpec) -> int:
        return 2 * spec.k

    def call(self, operands: HcPrenormOperands, shape: HcPrenormShape) -> None:
        n, k = operands.weight.shape
        # Small whatever the rows: serving splits K only where rows are few.
        d = operands.weight.new_empty((shape.splits, shape.rows, n))
        deep_gemm_utils.tf32_hc_prenorm_gemm(
            operands.activation.as_strided((shape.rows, k), (operands.row_stride, 1)),
            operands.weight,
            d,
            d.new_empty((shape.splits, shape.rows)),
            shape.splits,
        )


def _splits_of(spec: HcPrenormSpec) -> Callable[[int], int]:
    """Return the base's own function from a row count to the number of splits."""
    from vllm.model_executor.kernels.mhc.tilelang_kernels import compute_num_split
    from vllm.model_executor.kernels.mhc.warmup import compute_mhc_pre_num_splits

    if spec.splits is SplitRule.BUCKETED:
        return lambda rows: compute_mhc_pre_num_splits(spec.k, rows)
    # As ``_hc_prenorm_gemm_outputs`` calls it: tiles of 64 columns, 64 rows a block.
    return lambda rows: compute_num_split(64, spec.k, -(-rows // 64))
