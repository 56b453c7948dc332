"""Run as a program on a device, with our files or without: start layers, tell the time.

    warm_layers.py FOLDER CASE

CASE is JSON: `sizes`, the (N, K) of distinct layers, `copies` of each, `ranks`, the
`limit` of rows, and `load`, seconds that loading waits. Ranks are forked when all is
imported, and begin together. Prints JSON, for each rank: seconds of the construction,
of the load, of the first GEMMs and of the warmup; the last two are what a start waits
for once the weights are in.
"""

import json
import pathlib
import sys
import time
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from tests.model_executor.children import fork_ranks
from tests.model_executor.real_layers import (
    FP8,
    load,
    make_linear,
    one_rank,
    prepare_ranks,
)


def start(folder: pathlib.Path, rank: int, case: dict[str, Any]) -> dict[str, float]:
    """Start one rank; its seconds."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with one_rank(folder, rank, case["ranks"]) as config:
        config.scheduler_config.max_num_batched_tokens = case["limit"]
        torch.distributed.barrier()
        begin = time.monotonic()
        layers = [
            make_linear(config, device, n, k, FP8, prefix=f"layers.{n}.{k}.{copy}")
            for n, k in case["sizes"]
            for copy in range(case["copies"])
        ]
        constructed = time.monotonic()
        time.sleep(case["load"])
        for layer in layers:
            load(layer)
        loaded = time.monotonic()
        for layer in layers:
            k = layer.weight.shape[1]
            layer(torch.ones(case["limit"], k, dtype=torch.bfloat16, device=device))
        profiled = time.monotonic()
        deep_gemm_warmup(torch.nn.ModuleList(layers), case["limit"])
        return {
            "construct": constructed - begin,
            "load": loaded - constructed,
            "profile": profiled - loaded,
            "warmup": time.monotonic() - profiled,
        }


def main() -> None:
    """Fork the ranks and print what they say."""
    folder, case = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    prepare_ranks(folder)
    answers = fork_ranks(folder, case["ranks"], lambda rank: start(folder, rank, case))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
