"""Run as a program: construct, load and warm one layer for each N of its arguments.

    start.py [--bf16] [--ranks R] N...

``--bf16`` adds a plain linear layer and a plain layer of experts, and warms up without
asking first whether DeepGEMM is supported. ``--ranks`` forks that many ranks of one
tensor-parallel group, as vLLM starts its workers, on a machine where no CUDA toolkit is
to be found; each constructs the layers and ends.

Prints JSON: the kernel that each layer got, which are stamped, what of the library was
imported, what was logged until the layers were loaded, what as a warning, what by the
warmup, and what a forward raised. A process of its own, because vLLM and DeepGEMM
settle on their device, compiler and switches once.
"""

import argparse
import functools
import json
import logging
import os
import pathlib
import sys
import tempfile
from typing import Any

import torch
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup import toolchain

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from real_layers import (  # type: ignore[import-not-found]
    FP8,
    load,
    make_bf16_layers,
    make_linear,
    one_rank,
    quantization_config,
)
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

LIMIT = 64
# DeepGEMM under its two names, and the one module of ours that calls it.
LIBRARY = (
    "deep_gemm",
    "vllm.third_party.deep_gemm",
    "vllm.model_executor.warmup.deep_gemm_jit.backend",
)


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def progress(self) -> list[tuple[float, str]]:
        """Return when the warmup said something, in seconds, and what."""
        return [
            (record.created, record.getMessage())
            for record in self.records
            if record.getMessage().startswith("DeepGEMM warmup")
        ]

    def lines(self, level: int) -> list[str]:
        return [r.getMessage() for r in self.records if r.levelno >= level]


def forward(layer: torch.nn.Module, device: torch.device) -> str:
    """Run the layer as the profiling run does; return the error, or nothing."""
    try:
        layer(torch.ones(LIMIT, 256, dtype=torch.bfloat16, device=device))
    except RuntimeError as error:
        return str(error)
    return ""


def start(folder: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start on one rank and return what is to be printed."""
    log = Log()
    logging.getLogger("vllm").addHandler(log)
    # What an engine logs by default.
    logging.getLogger("vllm").setLevel(logging.INFO)
    device = torch.device("cuda", 0)
    with one_rank(folder) as config:
        layers = [
            load(make_linear(config, device, n, 256, FP8, prefix=f"layers.{n}"))
            for n in options.sizes
        ]
        plain = make_bf16_layers(config, device) if options.bf16 else []
        said = len(log.records)
        constructed = [line for line in log.lines(logging.INFO) if "DeepGEMM" in line]
        # As kernel_warmup does; its question imports the library.
        if options.bf16 or deep_gemm_utils.is_deep_gemm_supported():
            deep_gemm_warmup(torch.nn.ModuleList([*layers, *plain]), LIMIT)
        return {
            "progress": log.progress(),
            "constructed": constructed,
            "imported": [name for name in LIBRARY if name in sys.modules],
            "said": log.lines(logging.NOTSET)[said:],
            "forward": [forward(layer, device) for layer in layers],
            "kernels": [
                type(layer.quant_method.fp8_linear).__name__ for layer in layers
            ],
            "stamped": [
                hasattr(layer, "deep_gemm_warmup_provider") for layer in layers
            ],
            "warnings": [
                line for line in log.lines(logging.WARNING) if "DeepGEMM" in line
            ],
        }


def start_ranks(folder: pathlib.Path, options: argparse.Namespace) -> None:
    """Fork the ranks, wait for them, and fail if one has failed."""
    from vllm.plugins import load_general_plugins

    # The facts of a machine without a toolkit; what is made of them is the real thing.
    toolchain.read_facts = toolchain.check.read_facts = functools.partial(
        toolchain.read_facts, search_path=(), fallback=folder / "no" / "cuda"
    )
    load_general_plugins()
    logger = logging.getLogger("vllm")
    logger.handlers = [logging.StreamHandler()]
    logger.setLevel(logging.INFO)
    quantization_config(FP8)  # what it imports, the ranks need not
    children = []
    for rank in range(options.ranks):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            with one_rank(folder, rank, options.ranks) as config:
                for n in options.sizes:
                    make_linear(config, device, n, 256, FP8, prefix=f"layers.{n}")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    if any(statuses):
        sys.exit(f"ranks ended with {statuses}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.ranks:
            start_ranks(pathlib.Path(folder), options)
        else:
            print(json.dumps(start(pathlib.Path(folder), options)))


if __name__ == "__main__":
    main()
