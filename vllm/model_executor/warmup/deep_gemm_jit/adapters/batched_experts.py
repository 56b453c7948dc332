"""Decides what block-FP8 experts in batches run: a masked GEMM for each of two weights.

Tokens come by DeepEP low-latency or NIXL-EP, which give every local expert the same
number of rows and scales column by column (``low_latency_dispatch`` of DeepEP).
"""

from collections.abc import Sequence

import torch

from ..provider import Rejected, WarmupProvider
from ..spec import (
    EXPECTED_ROWS_STEP,
    EntryPoint,
    MaskedSpec,
    RowRange,
    ScaleLayout,
    TensorLayout,
)
from .experts import Experts, ExpertWeight, experts_of


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for each weight of DeepGEMM's batched experts."""
    experts = experts_of(module)
    names = {cls.__name__ for cls in type(experts).__mro__}
    if "BatchedDeepGemmExperts" not in names:
        return []
    return [BatchedExperts(experts, weight) for weight in ExpertWeight]


class BatchedExperts(Experts):
    """Describes one grouped masked GEMM of block-FP8 experts."""

    def get_deep_gemm_warmup_entry_points(
        self, layer: torch.nn.Module
    ) -> tuple[EntryPoint, ...]:
        """Return the function that it runs."""
        return (EntryPoint.FP8_M_GROUPED_GEMM_NT_MASKED,)

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Sequence[MaskedSpec] | Rejected:
        """Return the spec of this weight.

        Args:
            layer: The MoERunner.
            max_tokens: Most tokens that one rank can send in a step.

        """
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        weight, scale = self.get_deep_gemm_warmup_weights(layer)
        capacity = self._experts.max_num_tokens * self._experts.num_dispatchers
        return [
            MaskedSpec(
                entry_point=EntryPoint.FP8_M_GROUPED_GEMM_NT_MASKED,
                n=weight.shape[1],
                k=weight.shape[2],
                groups=weight.shape[0],
                rows=self._expected_rows(capacity, max_tokens),
                weight_scale=TensorLayout.of(scale),
                activation_scale=ScaleLayout.COLUMN_MAJOR,
                ue8m0_cast=is_deep_gemm_e8m0_used(),
                capacity=capacity,
            )
        ]

    def _expected_rows(self, capacity: int, max_tokens: int) -> RowRange:
        """Return what ``estimate_expected_m`` of the base can answer.

        Without data-parallel ranks it knows no token count and answers ``capacity``.
        """
        config = self._experts.moe_config
        ranks = config.moe_parallel_config.dp_size
        if ranks == 1:
            return RowRange(capacity, capacity)
        routed = max_tokens * ranks * config.experts_per_token
        each = routed // config.num_experts
        most = max(-(-each // EXPECTED_ROWS_STEP), 1) * EXPECTED_ROWS_STEP
        return RowRange(min(EXPECTED_ROWS_STEP, capacity), min(most, capacity))
