"""Real indexers of sparse attention outside an engine: made, bound and run."""

import dataclasses
import itertools
import types
from collections.abc import Sequence
from typing import Any

import torch

from .real_layers import engine

HIDDEN, LORA, PAGE = 256, 128, 64
_TOKENS, _BLOCKS = 512, 4
# ``head_dim`` is not the indexer's: G38 is a warmup that took the one for the other.
_HF_CONFIG = {
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_kpool": 4,
    "head_dim": 512,
    "hidden_size": HIDDEN,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": LORA,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def make_indexer(
    config: Any, device: torch.device, cls: type, heads: int, prefix: str
) -> Any:
    """Make an indexer of DeepSeek-V3.2's constructor, its cache not bound."""
    from vllm.config import set_current_vllm_config

    with engine(config, device), set_current_vllm_config(config):
        return cls(
            config,
            _hf_config(heads),
            HIDDEN,
            LORA,
            None,
            config.cache_config,
            torch.empty((_TOKENS, 2048), dtype=torch.int32),
            prefix=prefix,
        )


def make_attention(config: Any, device: torch.device, heads: int, prefix: str) -> Any:
    """Make DeepSeek-V3.2's attention, whose indexer does not keep the config."""
    from vllm.config import set_current_vllm_config
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    with engine(config, device), set_current_vllm_config(config):
        return DeepseekV32Attention(
            config,
            _hf_config(heads),
            prefix,
            topk_indices_buffer=torch.empty((_TOKENS, 2048), dtype=torch.int32),
            # Else the model's head sizes decide, and this model has none.
            attn_backend=FlashMLASparseBackend,
        )


def _hf_config(heads: int) -> Any:
    config = types.SimpleNamespace(**_HF_CONFIG, index_n_heads=heads)
    config.rope_parameters = dict(config.rope_parameters)
    return config


def bind_cache(indexer: Any, device: torch.device) -> None:
    """Give an indexer its cache as the engine does, (blocks, 1, states, bytes)."""
    width = indexer.k_cache.head_dim
    indexer.k_cache.bind_kv_cache(
        torch.zeros((_BLOCKS, 1, PAGE, width), dtype=torch.uint8, device=device)
    )


class Steps:
    """Runs steps of a bound indexer with the metadata that vLLM builds for them."""

    def __init__(self, config: Any, device: torch.device, indexer: Any) -> None:
        from vllm.model_executor.layers.rotary_embedding import get_rope
        from vllm.v1.attention.backends.mla.indexer import (
            DeepseekV32IndexerMetadataBuilder,
        )

        self._config, self._device, self._indexer = config, device, indexer
        spec = indexer.k_cache.get_kv_cache_spec(config)
        with engine(config, device):
            self._builder = DeepseekV32IndexerMetadataBuilder(
                dataclasses.replace(spec, block_size=PAGE),
                [indexer.k_cache.prefix],
                config,
                device,
                block_table_width=_BLOCKS,
            )
            self._rope = get_rope(
                64,
                max_position=4096,
                rope_parameters=_HF_CONFIG["rope_parameters"],
                is_neox_style=False,
            )

    def run(self, tokens: Sequence[int]) -> Any:
        """Run one step of requests with so many new tokens; return its metadata."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        total = sum(tokens)
        with (
            torch.inference_mode(),
            engine(self._config, self._device),
            set_current_vllm_config(self._config),
        ):
            metadata = self._builder.build(0, self._common(tokens))
            layers = {self._indexer.k_cache.prefix: metadata}
            with set_forward_context(layers, self._config, num_tokens=total):
                self._indexer(
                    torch.zeros((total, HIDDEN)),
                    torch.zeros((total, LORA)),
                    torch.zeros(total, dtype=torch.int64),
                    self._rope,
                )
        return metadata

    def _common(self, tokens: Sequence[int]) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        # Made on the host: a kernel that adds does nothing on the stand-in.
        starts = [0, *itertools.accumulate(tokens)]
        lengths = torch.full((len(tokens),), 200, dtype=torch.int32, device="cpu")
        query_start_loc = torch.tensor(starts, dtype=torch.int32, device="cpu")
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc.to(self._device),
            query_start_loc_cpu=query_start_loc,
            seq_lens=lengths.to(self._device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(tokens),
            num_actual_tokens=starts[-1],
            max_query_len=max(tokens),
            max_seq_len=200,
            block_table_tensor=torch.zeros((len(tokens), _BLOCKS), dtype=torch.int32),
            slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        )
