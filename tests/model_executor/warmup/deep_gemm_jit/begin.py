"""Run as a program on a device: construct, load, profile and warm layers.

    begin.py FOLDER RANKS N...

Each rank is a process, forked as vLLM forks its workers, constructs a layer for each N,
loads them, runs the first of them at the limit as the memory-profiling run does, and
warms them up. Prints JSON: for each rank its report's kernels, the compiles before the
forward and after it, and what the warmup logged.
"""

import json
import logging
import os
import pathlib
import sys
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from real_layers import (  # type: ignore[import-not-found]
    FP8,
    load,
    make_linear,
    one_rank,
    prepare_to_fork,
)

LIMIT, K = 512, 768


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compiles(folder: pathlib.Path) -> int:
    """Count what the compiler has written into its log."""
    log = folder / "compiled"
    return len(log.read_text().split()) if log.exists() else 0


def start(folder: pathlib.Path, rank: int, ranks: int, sizes: list[int]) -> Any:
    """Start one rank and return what is to be printed."""
    log = Log()
    logging.getLogger("vllm").addHandler(log)
    logging.getLogger("vllm").setLevel(logging.INFO)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with one_rank(folder, rank, ranks) as config:
        config.scheduler_config.max_num_batched_tokens = LIMIT
        layers = [
            load(make_linear(config, device, n, K, FP8, prefix=f"layers.{n}"))
            for n in sizes
        ]
        rows = torch.ones(LIMIT, K, dtype=torch.bfloat16, device=device)
        layers[0](rows)
        forward = compiles(folder)
        deep_gemm_warmup(torch.nn.ModuleList(layers), LIMIT)
        for layer in layers:
            layer(rows)
    lines = [line for line in log.lines if "DeepGEMM warmup" in line]
    return {"said": lines, "forward": forward, "all": compiles(folder)}


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    ranks = int(sys.argv[2])
    sizes = [int(size) for size in sys.argv[3:]]
    prepare_to_fork()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                found = start(folder, rank, ranks, sizes)
                (folder / f"answer-{rank}").write_text(json.dumps(found))
                status = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        sys.exit(f"ranks ended with {statuses}")
    answers = [(folder / f"answer-{rank}").read_text() for rank in range(ranks)]
    print(json.dumps([json.loads(answer) for answer in answers]))


if __name__ == "__main__":
    main()
