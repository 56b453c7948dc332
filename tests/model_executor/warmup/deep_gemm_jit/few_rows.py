"""Run as a program on a device: FlashInfer's kernels, which a layer's few rows take.

    few_rows.py FOLDER

FlashInfer builds its module first, where ``FLASHINFER_WORKSPACE_BASE`` has none. Prints
JSON: FlashInfer's kernels after a warmup, by the N of a layer, and those after each
count of rows was served; the bytes that the kernels of an ``lm_head`` take at most, of
a layer with its weights and of one whose weights are gone, and why they fail.
"""

import json
import os
import pathlib
import sys
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.plan import make_plan
from vllm.model_executor.warmup.deep_gemm_jit.spec import EntryPoint, GemmSpec
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup import kernel_caches

sys.path.insert(0, str(pathlib.Path(__file__).parents[4]))
from tests.model_executor.real_layers import (
    FP8,
    load,
    make_linear,
    one_rank,
    resident_bytes,
)

LIMIT, K = 64, 1024
# On 132 SMs FlashInfer splits the rows of a wide layer only.
SIZES = (1024, 9216)
HEAD = (151936, 4096)


def entries() -> frozenset[str]:
    root = pathlib.Path(os.environ["TRTLLM_DG_CACHE_DIR"])
    return kernel_caches.flashinfer(root).entries()


def serve(config: Any, device: torch.device, n: int) -> dict[str, Any]:
    """Warm a layer and send it every row count up to where DeepGEMM takes over."""
    before = entries()
    layer = load(make_linear(config, device, n, K, FP8, prefix=f"layers.{n}"))
    deep_gemm_warmup(torch.nn.ModuleList([layer]), LIMIT)
    warmed = entries() - before
    for rows in range(1, LIMIT + 1):
        layer(torch.ones(rows, K, dtype=torch.bfloat16, device=device))
    return {"warmed": sorted(warmed), "served": sorted(entries() - before)}


def head(config: Any, device: torch.device, *, freed: bool) -> dict[str, Any]:
    """Build what an ``lm_head`` takes with few rows; return the bytes and failures."""
    layer = load(make_linear(config, device, *HEAD, FP8, prefix=f"head.{freed}"))
    plan = make_plan(torch.nn.ModuleList([layer]), LIMIT)
    (spec,) = (
        spec
        for spec in plan.specs
        # The layers before are in the engine's record.
        if isinstance(spec, GemmSpec)
        and spec.n == HEAD[0]
        and spec.entry_point is EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM
    )
    weights = plan.weights[spec]
    assert weights is not None
    if freed:
        for tensor in weights:
            tensor.untyped_storage().resize_(0)
    backend = Backend(device, read_target(device), kernel_caches.read_kernel_caches())
    held = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    calls, left = backend.run(spec, weights, every_row=False, listener=lambda *_: None)
    return {
        "peak": torch.cuda.max_memory_allocated(device) - held,
        "kept": resident_bytes(device) - held,
        "failures": [call.failure for call in calls if call.failure],
        "left": left,
    }


def main() -> None:
    device = torch.device("cuda", 0)
    with one_rank(pathlib.Path(sys.argv[1])) as config:
        print(
            json.dumps(
                {
                    "rows": {n: serve(config, device, n) for n in SIZES},
                    "loaded": head(config, device, freed=False),
                    "freed": head(config, device, freed=True),
                }
            )
        )


if __name__ == "__main__":
    main()
