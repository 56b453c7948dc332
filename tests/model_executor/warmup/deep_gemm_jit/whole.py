"""Run as a program on a device: warm a model of many entry points from nothing.

    whole.py FOLDER LIMIT

Prints JSON: the specs of its plan, the entries of the cache after the warmup, the bytes
that the warmup took at most and those that it left.
"""

import json
import os
import pathlib
import sys
from typing import Any

import torch
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.model_executor.warmup.deep_gemm_jit.plan import make_plan
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm.v1.worker import workspace
from vllm_deep_gemm_warmup import kernel_caches

sys.path.insert(0, str(pathlib.Path(__file__).parents[4]))
from tests.model_executor import real_indexers
from tests.model_executor.real_layers import (
    FP8,
    load,
    make_experts,
    make_linear,
    one_rank,
    resident_bytes,
)
from tests.model_executor.warmup.deep_gemm_jit.layers import hyper_connected

HEADS = 64


def model_of(config: Any, device: torch.device) -> torch.nn.Module:
    """Make the layers of a model, one of each kind that one rank can have."""
    projection = load(make_linear(config, device, 576, 1024, FP8, prefix="proj"))
    wo_a = make_linear(config, device, 2 * 128, 256, FP8, prefix="wo_a")
    wo_a.is_bmm, wo_a.bmm_batch_size = True, 2
    config.kernel_config.moe_backend = "deep_gemm"
    experts = make_experts(config, device, 4, 2, 512, 256, FP8, prefix="experts")
    indexer = real_indexers.make_indexer(config, device, Indexer, HEADS, "indexer")
    real_indexers.bind_cache(indexer, device)
    return torch.nn.ModuleDict(
        {
            "proj": projection,
            "wo_a": load(wo_a),
            "experts": experts,
            "indexer": indexer,
            "decoder": hyper_connected(
                "vllm.models.deepseek_v4.nvidia.model",
                "DeepseekV4DecoderLayer",
                device,
                512,
                first=True,
            ),
        }
    )


def main() -> None:
    folder, limit = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    device = torch.device("cuda", 0)
    cache = kernel_caches.deep_gemm(pathlib.Path(os.environ["DG_JIT_CACHE_DIR"]))
    workspace.init_workspace_manager(device)
    with one_rank(folder) as config:
        config.scheduler_config.max_num_batched_tokens = limit
        config.scheduler_config.max_num_seqs = 70
        model = model_of(config, device)
        specs = make_plan(model, limit).specs
        held = resident_bytes(device)
        torch.cuda.reset_peak_memory_stats(device)
        deep_gemm_warmup(model, limit)
        peak = torch.cuda.max_memory_allocated(device) - held
        print(
            json.dumps(
                {
                    "specs": [spec.to_json() for spec in specs],
                    "entries": sorted(cache.entries()),
                    "peak": peak,
                    "left": resident_bytes(device) - held,
                }
            )
        )


if __name__ == "__main__":
    main()
