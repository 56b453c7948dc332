"""Real vLLM layers outside an engine: configs, construction, loading."""

import contextlib
import gc
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
COMPRESSED_TENSORS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
    "ignore": [],
}
INC = {
    "quant_method": "inc",
    "bits": 8,
    "data_type": "fp",
    "group_size": [128, 128],
    "sym": True,
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}

_HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@contextlib.contextmanager
def one_rank(folder: pathlib.Path, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
    """Yield a VllmConfig, and be one rank of its engine meanwhile.

    Args:
        folder: A model's folder and a rendezvous file go there.
        rank: Which one.
        ranks: How many there are in the tensor-parallel group.

    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    config = VllmConfig(model_config=_model_config(folder / f"rank{rank}"))
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=ranks,
            rank=rank,
            local_rank=rank,
            backend="gloo",
            distributed_init_method=f"file://{folder / 'rendezvous'}",
        )
        initialize_model_parallel(ranks)
        yield config
    cleanup_dist_env_and_memory()


def prepare_ranks(folder: pathlib.Path) -> None:
    """Import, and find out, what ranks that are forked then need not.

    vLLM asks a process of its own what a model class is, once for each rank.
    """
    quantization_config(FP8)
    _model_config(folder / "model")
    assert not torch.cuda.is_initialized()


def _model_config(folder: pathlib.Path) -> Any:
    from vllm.config import ModelConfig

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_HF_CONFIG))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16")


def make_linear(
    config: Any,
    device: torch.device,
    n: int,
    k: int,
    quantization: dict[str, Any],
    prefix: str = "layers.0.proj",
) -> torch.nn.Module:
    """Make a ReplicatedLinear as a model does, its weights not loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    with engine(config, device), set_current_vllm_config(config):
        layer: torch.nn.Module = ReplicatedLinear(
            k,
            n,
            bias=False,
            quant_config=quantization_config(quantization),
            prefix=prefix,
        )
    return layer


def make_bf16_layers(config: Any, device: torch.device) -> list[torch.nn.Module]:
    """Make and load a linear layer and a layer of experts without quantization."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.linear import ReplicatedLinear

    with engine(config, device), set_current_vllm_config(config):
        layers = [
            ReplicatedLinear(2048, 2048, bias=False, prefix="layers.0.proj"),
            FusedMoEFactory(4, 2, 256, 128, prefix="layers.0.experts"),
        ]
        return [load(layer) for layer in layers]


def construct_experts(
    config: Any,
    device: torch.device,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    quantization: dict[str, Any],
    prefix: str,
) -> torch.nn.Module:
    """Make a layer of ``experts`` of (``hidden``, ``width``), not loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    with engine(config, device), set_current_vllm_config(config):
        runner: torch.nn.Module = FusedMoEFactory(
            experts,
            top_k,
            hidden,
            width,
            quant_config=quantization_config(quantization),
            prefix=prefix,
        )
    return runner


def make_experts(
    config: Any, device: torch.device, *arguments: Any, **named: Any
) -> torch.nn.Module:
    """Make and load what ``construct_experts`` makes."""
    from vllm.config import set_current_vllm_config

    layer = construct_experts(config, device, *arguments, **named)
    with engine(config, device), set_current_vllm_config(config):
        return load(layer)


def run_experts(
    config: Any, device: torch.device, runner: torch.nn.Module, hidden: int, rows: int
) -> torch.Tensor:
    """Run a layer of 4 experts of ``hidden`` columns for so many tokens."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with (
        torch.inference_mode(),
        engine(config, device),
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=rows),
    ):
        output: torch.Tensor = runner(torch.zeros(rows, hidden), torch.zeros(rows, 4))
    return output


def make_mla(
    config: Any, device: torch.device, quantization: dict[str, Any], prefix: str
) -> torch.nn.Module:
    """Make MLA attention of DeepSeek's head sizes and one head, its weights loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.v1.attention.backends.mla.prefill.flash_attn import (
        FlashAttnPrefillBackend,
    )

    rank, nope, rope, value = 512, 128, 64, 128
    with engine(config, device), set_current_vllm_config(config):
        projection = ColumnParallelLinear(
            rank,
            nope + value,
            bias=False,
            quant_config=quantization_config(quantization),
            prefix=f"{prefix}.kv_b_proj",
        )
        layer: torch.nn.Module = MLAAttention(
            num_heads=1,
            scale=1.0,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=value,
            q_lora_rank=None,
            kv_lora_rank=rank,
            kv_b_proj=projection,
            cache_config=config.cache_config,
            prefix=f"{prefix}.attn",
            # Else the model's head sizes decide, and this model has none.
            prefill_backend_cls=FlashAttnPrefillBackend,
        )
    return load(layer)


@contextlib.contextmanager
def engine(config: Any, device: torch.device) -> Iterator[None]:
    """Default dtype and device as while a model is constructed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def quantization_config(value: dict[str, Any]) -> Any:
    """Return vLLM's quantization config for a ``quantization_config`` of HF."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    value = json.loads(json.dumps(value))
    method = value["quant_method"]
    return get_quantization_config(method).from_config(value)


def load(layer: torch.nn.Module) -> torch.nn.Module:
    """Finish a load as the engine does once the checkpoint is read."""
    for module in layer.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
    return layer


def resident_bytes(device: torch.device) -> int:
    """Bytes that are allocated on ``device``, without what earlier tests have left."""
    gc.collect()
    return int(torch.cuda.memory_allocated(device))
