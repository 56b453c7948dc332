"""Decides how FlashInfer's fused experts are called: with which numbers of tokens."""

import dataclasses
import sys

import torch

from ..operands import is_usable
from ..provider import Weights
from ..spec import FusedMoeSpec, Target
from .strategy import Shape, Strategy

# FlashInfer 0.7.2.post1 (fp8_blockscale_gemm_kernel.cuh, jit_utils.cuh): from so many
# tokens on, the weights are its GEMM's second operand and no longer its first.
_SWAPPED_BELOW = {78: 64}
_SWAPPED_BELOW_ELSE = 32
# Tiles are so many columns wide, of the tokens where the operands are swapped.
_TILE_WIDTHS = range(16, 129, 8)
_TILE_ROWS = 128
_SMALL_TILE_ROWS = 64
# Of a lone expert, two SMs load a tile together from so many tokens on, where tiles
# and SMs are even in number.
_LONE_EXPERT_PAIRS = 1024

_MODULE = "flashinfer.fused_moe.core"


@dataclasses.dataclass(frozen=True)
class FusedMoeOperands:
    """Device memory for calls of one spec.

    Attributes:
        spec: Whose operands these are.
        activation: bfloat16 zeros (tokens, hidden).
        output: bfloat16 (tokens, hidden).
        weights: As the spec's provider gives them.

    """

    spec: FusedMoeSpec
    activation: torch.Tensor
    output: torch.Tensor
    weights: Weights


class FlashInferFusedMoe(Strategy[FusedMoeSpec, Shape, FusedMoeOperands]):
    """FlashInfer's ``cutlass_fused_moe`` for block-FP8 experts.

    It runs both GEMMs and builds their kernels. Each call sends every token to one
    expert, since the number of tokens alone decides and the operator's own memory
    grows with the experts of a token.
    """

    takes_strided_rows = False
    in_deep_gemm_cache = False

    def shapes(
        self, spec: FusedMoeSpec, target: Target, *, every_row: bool
    ) -> list[Shape]:
        tokens = fewest_tokens(spec, target.sm_count)
        if every_row:
            tokens = list(range(spec.rows.first, tokens[-1] + 1))
        return [Shape(count) for count in tokens]

    def allocate(
        self,
        spec: FusedMoeSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> FusedMoeOperands:
        """Take the layer's own weights: there is no room for others of their size.

        Raises:
            RuntimeError: The operator's module is not in this process.
            ValueError: The weights are not on ``device``, or were freed.

        """
        if not _module_is_loaded():
            raise RuntimeError(
                "FlashInfer's module of fused experts is not loaded, and building it "
                "takes longer than a start may; the flashinfer-jit-cache package has it"
            )
        if weights is None or not all(is_usable(tensor, device) for tensor in weights):
            raise ValueError("the weights of its layers were freed or moved")
        activation = torch.zeros(
            max_rows, spec.hidden, dtype=torch.bfloat16, device=device
        )
        return FusedMoeOperands(spec, activation, torch.empty_like(activation), weights)

    def dense_bytes(self, spec: FusedMoeSpec) -> int:
        """Of a token: its row, its result, and at each step of the operator."""
        return 8 * (spec.hidden + spec.width) + 4 * spec.experts + 256

    def call(self, operands: FusedMoeOperands, shape: Shape) -> None:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.quantization.utils.flashinfer_utils import (
            activation_to_flashinfer_type,
        )
        from vllm.utils.flashinfer import flashinfer_cutlass_fused_moe

        spec, tokens = operands.spec, shape.rows
        device = operands.activation.device
        w13, w13_scale, w2, w2_scale = operands.weights
        tp_rank, tp_size = spec.tp
        ep_rank, ep_size = spec.ep
        flashinfer_cutlass_fused_moe(
            input=operands.activation[:tokens],
            token_selected_experts=torch.full(
                (tokens, 1), ep_rank * spec.experts, dtype=torch.int32, device=device
            ),
            token_final_scales=torch.zeros(tokens, 1, device=device),
            fc1_expert_weights=w13,
            fc2_expert_weights=w2,
            output=operands.output[:tokens],
            output_dtype=torch.bfloat16,
            quant_scales=[w13_scale, w2_scale],
            tp_size=tp_size,
            tp_rank=tp_rank,
            ep_size=ep_size,
            ep_rank=ep_rank,
            activation_type=activation_to_flashinfer_type(
                MoEActivation[spec.activation]
            ),
            use_deepseek_fp8_block_scale=True,
            # It decides nothing here, and gets us a runner of our own: serving's has
            # memory for the most rows that it ever saw at each call.
            use_fused_finalize=False,
        )


def fewest_tokens(spec: FusedMoeSpec, sm_count: int) -> list[int]:
    """Return the fewest tokens of every class that takes kernels of its own, ascending.

    Args:
        spec: Of which only numbers of tokens in ``rows`` count.
        sm_count: SMs of the device.

    """
    classes: dict[tuple[tuple[int, ...], ...], int] = {}
    for tokens in _window_starts(spec, sm_count):
        kernels = tuple(
            _kernel(tokens, n, spec.experts, sm_count)
            for n in (spec.w13_rows, spec.hidden)
        )
        classes.setdefault(kernels, tokens)
    return list(classes.values())


def _window_starts(spec: FusedMoeSpec, sm_count: int) -> list[int]:
    """Return the numbers of tokens at which a kernel can change.

    From a tile on an SM on, for one column of tiles, a wider tile is always better:
    nothing changes any more.
    """
    first, last = spec.rows.first, spec.rows.last
    columns = -(-sm_count // spec.experts)
    starts = {
        *range(1, _SMALL_TILE_ROWS + 2, _TILE_WIDTHS.step),
        _swapped_below(sm_count),
        *range(1, columns * _TILE_ROWS, _TILE_ROWS),
        _LONE_EXPERT_PAIRS,
    }
    return sorted({first, *(start for start in starts if first < start <= last)})


def _kernel(tokens: int, n: int, experts: int, sm_count: int) -> tuple[int, ...]:
    """Return what tells the kernels of one weight apart, of which N and K are fixed."""
    swapped = tokens < _swapped_below(sm_count)
    rows, columns = (n, tokens) if swapped else (tokens, n)
    tile_rows = _SMALL_TILE_ROWS if rows <= _SMALL_TILE_ROWS else _TILE_ROWS
    width = _tile_width(-(-rows // tile_rows) * experts, columns, sm_count)
    paired = (
        experts == 1
        and tokens >= _LONE_EXPERT_PAIRS
        and n % (2 * width) == sm_count % 2 == 0
    )
    return int(swapped), tile_rows, width, int(paired)


def _tile_width(tiles_of_a_column: int, columns: int, sm_count: int) -> int:
    """Return the width with the fewest waves, then the fullest last one."""

    def cost(width: int) -> tuple[int, int, int]:
        tiles = tiles_of_a_column * -(-columns // width)
        waves = -(-tiles // sm_count)
        return waves, waves * sm_count - tiles, width

    return min(_TILE_WIDTHS, key=cost)


def _swapped_below(sm_count: int) -> int:
    return _SWAPPED_BELOW.get(sm_count, _SWAPPED_BELOW_ELSE)


def _module_is_loaded() -> bool:
    """Whether a call finds the operator built: vLLM's profile run has made one."""
    core = sys.modules.get(_MODULE)
    return (
        core is not None and core.get_cutlass_fused_moe_module.cache_info().currsize > 0
    )
