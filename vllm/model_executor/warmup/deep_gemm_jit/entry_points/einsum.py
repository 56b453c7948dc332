"""Decides how the FP8 einsum of a layer with several weights is called."""

import dataclasses

import torch
from vllm.utils import deep_gemm as deep_gemm_utils

from ..operands import BLOCK, TMA_BYTES, choose_weights
from ..provider import Weights
from ..rows import rows_to_run
from ..spec import EinsumSpec, ScaleLayout, Target
from .strategy import Shape, Strategy

_EQUATION = "bhr,hdr->bhd"


@dataclasses.dataclass(frozen=True)
class EinsumOperands:
    """Device memory for calls of one spec, laid out as serving's.

    Serving quantizes by ``fused_inv_rope_fp8_quant`` (the base's ``deepseek_v4``):
    the rows of one GEMM lie behind those of the one before, and so do its scales,
    column by column and padded to TMA's alignment. In the overlapping form rows lie
    ``TMA_BYTES`` apart, over each other.

    Attributes:
        spec: Whose operands these are.
        weight: Weight (h, N, K) float8_e4m3fn.
        weight_scale: Its block scale.
        activation: Flat storage of A, float8_e4m3fn.
        activation_scale: Flat storage of A's scale, zero.
        output: Flat bfloat16 storage of D.
        overlapping: Which form this is.

    """

    spec: EinsumSpec
    weight: torch.Tensor
    weight_scale: torch.Tensor
    activation: torch.Tensor
    activation_scale: torch.Tensor
    output: torch.Tensor
    overlapping: bool

    @property
    def b(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and their block scale."""
        return self.weight, self.weight_scale

    def a(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (rows, h, K) and its scale (rows, h, K / 128), or packed K / 512."""
        groups, k = self.spec.groups, self.spec.k
        stride = TMA_BYTES if self.overlapping else k
        columns, aligned = _scale_columns(self.spec), _aligned(rows)
        return (
            self.activation.as_strided((rows, groups, k), (stride, rows * stride, 1)),
            self.activation_scale.as_strided(
                (rows, groups, columns), (1, columns * aligned, aligned)
            ),
        )

    def d(self, rows: int) -> torch.Tensor:
        """Return D (rows, h, N)."""
        groups, n = self.spec.groups, self.spec.n
        stride = TMA_BYTES // 2 if self.overlapping else n
        return self.output.as_strided((rows, groups, n), (groups * stride, stride, 1))


class Einsum(Strategy[EinsumSpec, Shape, EinsumOperands]):
    """DeepGEMM's ``fp8_einsum``: its kernels change with the row count b."""

    reads_every_weight = True

    def shapes(
        self, spec: EinsumSpec, target: Target, *, every_row: bool
    ) -> list[Shape]:
        rows = rows_to_run(spec.rows, target, every_row=every_row)
        return [Shape(count) for count in rows]

    def allocate(
        self,
        spec: EinsumSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> EinsumOperands:
        weight, weight_scale = choose_weights(spec, weights, device, overlapping=False)
        steps = max_rows * spec.groups - 1
        strides = (TMA_BYTES, TMA_BYTES // 2) if overlapping else (spec.k, spec.n)
        return EinsumOperands(
            spec=spec,
            weight=weight,
            weight_scale=weight_scale,
            activation=torch.empty(
                steps * strides[0] + spec.k, dtype=torch.float8_e4m3fn, device=device
            ),
            activation_scale=torch.zeros(
                spec.groups * _scale_columns(spec) * _aligned(max_rows),
                dtype=torch.int32 if _is_packed(spec) else torch.float32,
                device=device,
            ),
            output=torch.empty(
                steps * strides[1] + spec.n, dtype=torch.bfloat16, device=device
            ),
            overlapping=overlapping,
        )

    def dense_bytes(self, spec: EinsumSpec) -> int:
        return spec.groups * (spec.k + 2 * spec.n)

    def call(self, operands: EinsumOperands, shape: Shape) -> None:
        deep_gemm_utils.fp8_einsum(
            _EQUATION,
            operands.a(shape.rows),
            operands.b,
            operands.d(shape.rows),
            recipe=operands.spec.recipe,
        )


def _is_packed(spec: EinsumSpec) -> bool:
    return spec.activation_scale is ScaleLayout.PACKED_UE8M0


def _scale_columns(spec: EinsumSpec) -> int:
    columns = spec.k // BLOCK
    return -(-columns // 4) if _is_packed(spec) else columns


def _aligned(rows: int) -> int:
    """Round up to as many numbers of four bytes as TMA wants."""
    return -(-rows // 4) * 4
