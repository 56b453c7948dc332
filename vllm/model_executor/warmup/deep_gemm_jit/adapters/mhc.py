"""Decides what layers with hyper-connections (mHC) run: a GEMM for each projection."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..provider import Rejected, WarmupProvider
from ..spec import EntryPoint, HcPrenormSpec, RowRange, SplitRule
from .loaded import is_a

# Decoder layers that call ``tf32_hc_prenorm_gemm``, and how they split K: through
# ``_hc_prenorm_gemm_outputs``, or by the delayed functions of the base's
# ``kernels/mhc/tilelang.py``.
_LAYERS: Mapping[tuple[str, str], SplitRule] = {
    (
        "vllm.models.deepseek_v4.nvidia.model",
        "DeepseekV4DecoderLayer",
    ): SplitRule.EXACT,
    ("vllm.models.glm5next.common.model", "Glm5NextDecoderLayer"): SplitRule.EXACT,
    (
        "vllm.models.deepseek_v41.nvidia.model",
        "DeepseekV4DecoderLayer",
    ): SplitRule.BUCKETED,
}
# The first layer of DeepSeek's sums its projection over the streams, which are all
# alike there, and has no use for the one it was made of.
_BROADCAST, _ATTENTION, _FFN = "hc_attn_fn_broadcast", "hc_attn_fn", "hc_ffn_fn"


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for each projection of a layer with hyper-connections."""
    for (defined_in, name), splits in _LAYERS.items():
        if is_a(module, defined_in, name):
            return [
                HcProjection(attribute, splits) for attribute in _projections(module)
            ]
    return []


def _projections(layer: torch.nn.Module) -> list[str]:
    attention = _ATTENTION if getattr(layer, _BROADCAST, None) is None else _BROADCAST
    # GLM's layers of a drafter have none.
    return [name for name in (attention, _FFN) if hasattr(layer, name)]


class HcProjection:
    """Describes the GEMM of one projection.

    Up to 32 rows, layers behind the first take a kernel of TileLang's. They count
    here all the same: up to 64 rows are split alike.
    """

    def __init__(self, attribute: str, splits: SplitRule) -> None:
        self._attribute = attribute
        self._splits = splits

    def get_deep_gemm_warmup_weights(
        self, layer: torch.nn.Module
    ) -> tuple[torch.Tensor]:
        """Return the projection (N, K) float32.

        Args:
            layer: The decoder layer.

        """
        weight: torch.Tensor = getattr(layer, self._attribute)
        return (weight.detach(),)

    def get_deep_gemm_warmup_entry_points(
        self, layer: torch.nn.Module
    ) -> tuple[EntryPoint, ...]:
        """Return the function that it runs."""
        return (EntryPoint.TF32_HC_PRENORM_GEMM,)

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Sequence[HcPrenormSpec] | Rejected:
        """Return the spec of this projection.

        Args:
            layer: The decoder layer.
            max_tokens: Most tokens of one step; with sequence parallelism the ranks
                of a tensor-parallel group share them.

        """
        from vllm.utils.deep_gemm import is_deep_gemm_supported

        if not is_deep_gemm_supported():
            return Rejected("hyper-connections run on TileLang, not on DeepGEMM")
        (weight,) = self.get_deep_gemm_warmup_weights(layer)
        return [
            HcPrenormSpec(
                entry_point=EntryPoint.TF32_HC_PRENORM_GEMM,
                n=weight.shape[0],
                k=weight.shape[1],
                rows=RowRange(1, -(-max_tokens // _ranks_that_share(layer))),
                splits=self._splits,
            )
        ]


def _ranks_that_share(layer: Any) -> int:
    from vllm.distributed import get_tensor_model_parallel_world_size

    shares = getattr(layer, "use_sequence_parallel", False) or getattr(
        layer, "is_sequence_parallel", False
    )
    return get_tensor_model_parallel_world_size() if shares else 1
