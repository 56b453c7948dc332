"""Decides how plain block-FP8 GEMMs are called, on DeepGEMM and on FlashInfer."""

import torch
from vllm.utils import deep_gemm as deep_gemm_utils

from ..operands import BLOCK, Operands, allocate, dense_bytes
from ..provider import Weights
from ..rows import rows_to_run
from ..spec import GemmSpec, Target
from .strategy import Shape, ShapeT, Strategy


class Gemm(Strategy[GemmSpec, ShapeT, Operands]):
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


class PlainGemm(Gemm[Shape]):
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


class FlashInferGemm(Gemm[Shape]):
    """FlashInfer's own DeepGEMM, for few rows, which it wants dense."""

    takes_strided_rows = False
    in_deep_gemm_cache = False

    def shapes(self, spec: GemmSpec, target: Target, *, every_row: bool) -> list[Shape]:
        """Its rows are few, and its windows are not DeepGEMM's: all of them."""
        return [Shape(row) for row in range(spec.rows.first, spec.rows.last + 1)]

    def call(self, operands: Operands, shape: Shape) -> None:
        """Make one call through FlashInfer's runner, in less memory than serving's.

        The operator's workspace also holds the weight, as if that were bfloat16 and
        had to be quantized; the runner uses the part in front of it alone
        (FlashInfer 0.7.2, ``gemm`` of fp8_blockscale_gemm.cu).

        Raises:
            ValueError: The block scale is not float32, or FlashInfer wants less than
                A takes: its workspace has another form than is known here.

        """
        from flashinfer.gemm import gemm_base

        activation, _ = operands.a(shape.rows)
        weight, scale = operands.b
        if scale.dtype != torch.float32:
            raise ValueError(f"block scale is {scale.dtype}, FlashInfer reads float32")
        n, k = weight.shape
        runner = gemm_base.get_fp8_blockscale_gemm_runner_sm90()
        whole = runner.get_workspace_size(shape.rows, n, k)
        size = whole - _quantized_bytes(n, k, BLOCK)
        needed = _quantized_bytes(-(-shape.rows // 4) * 4, k, 1)
        if size < needed:
            raise ValueError(
                f"FlashInfer's workspace of {whole} bytes has no {needed} for A beside "
                f"those of the weight"
            )
        # Held until the call is made: the runner has its address alone.
        workspace = weight.new_empty(size, dtype=torch.uint8)
        runner.configure_workspace(workspace)
        runner.run_gemm(activation, weight, operands.d(shape.rows), None, scale)


def _quantized_bytes(rows: int, columns: int, block: int) -> int:
    """Return the bytes of float8_e4m3fn and its float32 scales of (block, 128)."""
    scales = -(-rows // block) * -(-columns // BLOCK)
    return rows * columns + 4 * scales
