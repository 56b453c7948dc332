"""Decides what MLA runs for the context of a prompt that it has begun."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..provider import PROVIDER_ATTRIBUTE, Rejected, WarmupProvider, Weights
from ..spec import RowRange, Spec
from .loaded import is_a

_ATTENTION = ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention")


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for an attention whose projection runs on DeepGEMM."""
    if not is_a(module, *_ATTENTION):
        return []
    projection: Any = module.kv_b_proj
    provider = getattr(projection, PROVIDER_ATTRIBUTE, None)
    return [] if provider is None else [MlaContext(projection, provider)]


class MlaContext:
    """Describes what MLA runs for the context of a prompt that it has begun.

    The keys and values of that context are computed again by ``kv_b_proj``, in
    chunks that ``max_num_batched_tokens`` does not bound but a workspace of its own
    (``_compute_prefill_context`` of the base's ``mla_attention.py``).
    """

    def __init__(self, projection: torch.nn.Module, provider: WarmupProvider) -> None:
        self._projection = projection
        self._provider = provider

    def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> Weights | None:
        """Return weight (N, K) float8_e4m3fn and block scale of ``kv_b_proj``.

        Args:
            layer: The MLAAttention.

        """
        return self._provider.get_deep_gemm_warmup_weights(self._projection)

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Sequence[Spec] | Rejected:
        """Return the rows of ``kv_b_proj`` that its own provider does not name.

        Args:
            layer: The MLAAttention.
            max_tokens: Most rows that one step can send; those are the provider's.

        """
        attention: Any = layer
        most = attention.chunked_prefill_workspace_size
        if most <= max_tokens:
            return Rejected(f"context chunks of {most} rows are no more than a step's")
        every = self._provider.get_deep_gemm_warmup_specs(self._projection, most)
        if isinstance(every, Rejected):
            return every
        beyond = RowRange(max_tokens + 1, most)
        return [
            dataclasses.replace(spec, rows=beyond)
            for spec in every
            if spec.rows.last == most
        ]
