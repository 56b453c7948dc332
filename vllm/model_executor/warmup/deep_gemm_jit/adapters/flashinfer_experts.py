"""Decides what block-FP8 experts on FlashInfer run: one operator for both weights."""

from collections.abc import Sequence
from typing import Any

import torch

from ..provider import Rejected, WarmupProvider, Weights
from ..spec import EntryPoint, FusedMoeSpec, RowRange, TensorLayout
from .experts import experts_of
from .loaded import is_a

_EXPERTS = (
    "vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe",
    "FlashInferExperts",
)


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for experts on FlashInfer's CUTLASS backend."""
    experts: Any = experts_of(module)
    if not is_a(experts, *_EXPERTS) or not experts.use_deepseek_fp8_block_scale:
        return []
    return [FlashInferExperts(experts)]


class FlashInferExperts:
    """Speaks for experts whose kernels FlashInfer compiles.

    Nothing but the whole fused operator reaches them, so one spec stands for the
    GEMMs of both weights.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> Weights:
        """Return w13 (E, N, K), its block scale, w2 (E, K, N / 2) and its block scale.

        N / 2 is N where the activation has no gate.

        Args:
            layer: The MoERunner.

        """
        routed: Any = layer.routed_experts
        experts = self._experts
        return routed.w13_weight, experts.w1_scale, routed.w2_weight, experts.w2_scale

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Sequence[FusedMoeSpec] | Rejected:
        """Return the spec of the layer.

        Args:
            layer: The MoERunner.
            max_tokens: See ``GroupedExperts``.

        """
        from vllm.distributed.parallel_state import get_dp_group
        from vllm.utils.math_utils import round_up

        experts, routed = self._experts, layer.routed_experts
        if list(experts.block_shape) != [128, 128]:
            return Rejected(f"block size {experts.block_shape} is not [128, 128]")
        w13, w13_scale, w2, w2_scale = self.get_deep_gemm_warmup_weights(layer)
        tokens = round_up(max_tokens, experts.moe_config.sp_size)
        activation: Any = routed.activation
        return [
            FusedMoeSpec(
                entry_point=EntryPoint.FLASHINFER_CUTLASS_FUSED_MOE,
                hidden=w2.shape[1],
                width=w2.shape[2],
                w13_rows=w13.shape[1],
                experts=w13.shape[0],
                rows=RowRange(1, tokens * get_dp_group().world_size),
                w13_scale=TensorLayout.of(w13_scale),
                w2_scale=TensorLayout.of(w2_scale),
                activation=activation.name,
                tp=(experts.tp_rank, experts.tp_size),
                ep=(experts.ep_rank, experts.ep_size),
            )
        ]
