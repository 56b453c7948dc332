"""Decides what is said of block-FP8 experts on FlashInfer: they are not warmed."""

from typing import Any

import torch

from ..provider import Rejected, WarmupProvider
from .loaded import is_a

_RUNNER = ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner")
_EXPERTS = (
    "vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe",
    "FlashInferExperts",
)


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for experts on FlashInfer's CUTLASS backend."""
    if not is_a(module, *_RUNNER):
        return []
    runner: Any = module
    kernel = getattr(runner._quant_method, "moe_kernel", None)
    experts: Any = None if kernel is None else kernel.impl.fused_experts
    if not is_a(experts, *_EXPERTS) or not experts.use_deepseek_fp8_block_scale:
        return []
    return [FlashInferExperts()]


class FlashInferExperts:
    """Speaks for experts whose kernels FlashInfer compiles, 5 or 6 for each GEMM.

    Which of them a call takes depends on its number of tokens; nothing but the whole
    fused operator reaches them.
    """

    def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> None:
        """Return nothing."""

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Rejected:
        """Say that nothing is warmed, and what to do about it."""
        return Rejected(
            "it runs on FlashInfer's CUTLASS experts, which compile kernels of their "
            "own and are not warmed; --moe-backend deep_gemm is"
        )
