"""Decides what the indexer of sparse attention runs, at a prompt and at a decode.

Of vLLM 0.33.0 it relies on private names: ``MLAAttention._vllm_config`` and, of
``v1/attention/backends/mla/indexer.py``, ``_use_flattening`` and
``_supports_native_decode``. test_indexer.py fails when one of them moves.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..provider import Rejected, WarmupProvider
from ..spec import (
    EntryPoint,
    MqaLogitsSpec,
    PagedMqaLogitsSpec,
    PagedMqaMetadataSpec,
    RowRange,
    Spec,
    TensorLayout,
)
from .loaded import is_a

_DENSE = ("vllm.model_executor.layers.sparse_attn_indexer", "SparseAttnIndexer")
_POOLED = ("vllm.models.glm5next.nvidia.sparse_indexer", "SparseAttnIndexerKpool")
_ENTRY_POINTS = (
    EntryPoint.FP8_FP4_MQA_LOGITS,
    EntryPoint.FP8_FP4_PAGED_MQA_LOGITS,
    EntryPoint.GET_PAGED_MQA_LOGITS_METADATA,
)
# GLM-5-Next pads the heads of its queries to the fewest that DeepGEMM takes
# (glm5next/common/attention.py, Indexer.forward).
_FEWEST_POOLED_HEADS = 32


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for an indexer, from the module that knows its config.

    That is the indexer itself or, for DeepSeek-V3.2's, the attention that holds it.
    """
    own: Any = module
    config = getattr(own, "vllm_config", None)
    if config is not None:
        return [Indexer(own, config)] if _has_scores(own) else []
    config = getattr(own, "_vllm_config", None)
    indexer = getattr(own, "indexer", None)
    if config is None or not _has_scores(indexer) or hasattr(indexer, "vllm_config"):
        return []
    return [Indexer(indexer, config)]


def _has_scores(indexer: Any) -> bool:
    op = getattr(indexer, "indexer_op", None)
    return op is not None and (is_a(op, *_DENSE) or is_a(op, *_POOLED))


class Indexer:
    """Describes the scores of an indexer and the metadata of its decodes.

    Args:
        indexer: Holds ``indexer_op``, ``n_head`` and ``k_cache``.
        vllm_config: The engine's.

    """

    def __init__(self, indexer: Any, vllm_config: Any) -> None:
        self._indexer = indexer
        self._vllm_config = vllm_config

    def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> None:
        """Return nothing: the scores are of activations alone.

        Args:
            layer: The indexer, or the attention that holds it.

        """

    def get_deep_gemm_warmup_entry_points(
        self, layer: torch.nn.Module
    ) -> tuple[EntryPoint, ...]:
        """Return the functions that an indexer runs."""
        return _ENTRY_POINTS

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Sequence[Spec] | Rejected:
        """Return the scores of a prompt, and for each depth those of a decode.

        Args:
            layer: The indexer, or the attention that holds it.
            max_tokens: Most tokens of one step.

        Raises:
            ValueError: The engine has not given the indexer its cache.

        """
        from vllm.platforms import current_platform

        if not current_platform.is_device_capability_family(90):
            return Rejected("its scores are known for SM90 alone")
        return [self._prompt(max_tokens), *self._decodes(max_tokens)]

    def _prompt(self, max_tokens: int) -> MqaLogitsSpec:
        return MqaLogitsSpec(
            entry_point=EntryPoint.FP8_FP4_MQA_LOGITS,
            rows=RowRange(1, max_tokens),
            heads=self._heads(),
            head_dim=self._indexer.indexer_op.head_dim,
        )

    def _decodes(self, max_tokens: int) -> Iterator[Spec]:
        page, page_stride = self._page()
        for next_n, batch in decode_batches(self._vllm_config, max_tokens).items():
            yield PagedMqaLogitsSpec(
                entry_point=EntryPoint.FP8_FP4_PAGED_MQA_LOGITS,
                rows=RowRange(1, batch),
                heads=self._heads(),
                head_dim=self._indexer.indexer_op.head_dim,
                next_n=next_n,
                page=page,
                page_stride=page_stride,
            )
            yield PagedMqaMetadataSpec(
                entry_point=EntryPoint.GET_PAGED_MQA_LOGITS_METADATA,
                rows=RowRange(1, batch),
                next_n=next_n,
                page_states=page.shape[0],
            )

    def _heads(self) -> int:
        heads: int = self._indexer.n_head
        if is_a(self._indexer.indexer_op, *_POOLED):
            return max(heads, _FEWEST_POOLED_HEADS)
        return heads

    def _page(self) -> tuple[TensorLayout, int]:
        """Return one block of the index cache and the bytes from block to block."""
        cache = self._indexer.indexer_op.k_cache.kv_cache
        if cache.dim() != 3:
            raise ValueError(
                f"index cache of shape {tuple(cache.shape)}: it is not (blocks, "
                "states, bytes); the warmup runs before the engine bound it"
            )
        return TensorLayout.of(cache[0]), cache.stride(0)


def decode_batches(vllm_config: Any, max_tokens: int) -> Mapping[int, int]:
    """Return for every next_n of a decode the largest batch that it is run with.

    The requests of a decode have up to 1 + drafted tokens, all the same number. They
    are passed as they are where SM90 has a kernel for that number, else each token
    as a request (vLLM 0.33.0, ``DeepseekV32IndexerMetadataBuilder.build``).

    Args:
        vllm_config: The engine's.
        max_tokens: Most tokens of one step.

    """
    batches: dict[int, int] = {}
    for next_n, batch in _decodes(vllm_config, max_tokens):
        batches[next_n] = max(batch, batches.get(next_n, 0))
    return batches


def _decodes(vllm_config: Any, max_tokens: int) -> Iterator[tuple[int, int]]:
    from vllm.v1.attention.backends.mla import indexer as backend

    requests = vllm_config.scheduler_config.max_num_seqs
    flattens = backend._use_flattening(vllm_config)
    deepest = min(1 + vllm_config.num_speculative_tokens, max_tokens)
    for depth in range(1, deepest + 1):
        native = depth == 1 or (not flattens and backend._supports_native_decode(depth))
        batch = min(requests, max_tokens // depth)
        yield (depth, batch) if native else (1, min(requests * depth, max_tokens))
