"""Run as a program: construct, load and warm one layer for each N of its arguments.

    start.py [--bf16] [--einsum] [--forget] [--ranks R] N...

``--einsum`` adds DeepSeek-V4's output projection of two groups, (2, 128, 256), and
serves it after the warmup. ``--forget`` takes the modules of models away before: the
base's quantization configs import some of them.
``--bf16`` adds a plain linear layer and a plain layer of experts, and warms up without
asking first whether DeepGEMM is supported. ``--ranks`` forks that many ranks of one
tensor-parallel group, as vLLM starts its workers, on a machine where no CUDA toolkit is
to be found; each constructs the layers and ends.

Prints JSON: the kernel that each layer got, which are stamped, what of the library was
imported, what of the base's models after the warmup, what was logged until the layers
were loaded, what as a warning, what by the warmup, and what a forward raised. A process
of its own, because vLLM and DeepGEMM settle on their device, compiler and switches
once.
"""

import argparse
import functools
import json
import logging
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup import kernel_caches, toolchain

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from vllm.model_executor.warmup import deep_gemm_warmup as ours
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

from tests.model_executor.children import fork_ranks
from tests.model_executor.real_layers import (
    FP8,
    load,
    make_bf16_layers,
    make_linear,
    one_rank,
    prepare_ranks,
)

_MODELS = "vllm.models."
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


def models() -> list[str]:
    """Return the modules of models that are imported, MegaMoE's among them."""
    assert all(name.startswith(_MODELS) for name in ours._MEGA_MOE_MODULES)
    return sorted(name for name in sys.modules if name.startswith(_MODELS))


def forward(layer: torch.nn.Module, rows: int, device: torch.device) -> str:
    """Run the layer as the profiling run does; return the error, or nothing."""
    try:
        layer(torch.ones(rows, 256, dtype=torch.bfloat16, device=device))
    except RuntimeError as error:
        return str(error)
    return ""


def make_projection(config: Any, device: torch.device) -> torch.nn.Module:
    """Make and load ``wo_a``, whose two groups run in one einsum."""
    layer = make_linear(config, device, 2 * 128, 256, FP8, prefix="wo_a")
    layer.is_bmm, layer.bmm_batch_size = True, 2
    loaded: torch.nn.Module = load(layer)
    return loaded


def serve(wo_a: Any, device: torch.device) -> dict[str, Any]:
    """Run the einsum with 1, 18 and 32 rows, laid out as serving quantizes them.

    Returns its weight's scale, what was in the cache before, and what was built.
    """
    cache = kernel_caches.deep_gemm(kernel_caches.deep_gemm_root())
    weight, scale = wo_a.quant_method.fp8_linear.get_deep_gemm_warmup_weights(wo_a)
    packed = scale.dtype == torch.int32
    columns = 1 if packed else 2
    before = cache.entries()
    for rows in (1, 18, 32):
        aligned = -(-rows // 4) * 4
        a = torch.empty(2 * rows * 256, dtype=weight.dtype, device=device)
        a_scale = torch.zeros(2 * columns * aligned, dtype=scale.dtype, device=device)
        deep_gemm_utils.fp8_einsum(
            "bhr,hdr->bhd",
            (
                a.as_strided((rows, 2, 256), (256, rows * 256, 1)),
                a_scale.as_strided((rows, 2, columns), (1, columns * aligned, aligned)),
            ),
            (weight, scale),
            torch.empty(rows, 2, 128, dtype=torch.bfloat16, device=device),
            recipe=(1, 1, 128) if packed else (1, 128, 128),
        )
    return {
        "scale": [str(scale.dtype), tuple(scale.shape)],
        "before": sorted(before),
        "built": sorted(cache.entries() - before),
    }


def start(folder: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start on one rank and return what is to be printed."""
    log = Log()
    logging.getLogger("vllm").addHandler(log)
    # What an engine logs by default.
    logging.getLogger("vllm").setLevel(logging.INFO)
    device = torch.device("cuda", 0)
    with one_rank(folder) as config:
        config.scheduler_config.max_num_batched_tokens = options.limit
        layers = [
            load(make_linear(config, device, n, 256, FP8, prefix=f"layers.{n}"))
            for n in options.sizes
        ]
        extra = [make_projection(config, device)] if options.einsum else []
        plain = make_bf16_layers(config, device) if options.bf16 else []
        said = len(log.records)
        constructed = [line for line in log.lines(logging.INFO) if "DeepGEMM" in line]
        if options.forget:
            for name in models():
                del sys.modules[name]
        # As kernel_warmup does; its question imports the library.
        if options.bf16 or deep_gemm_utils.is_deep_gemm_supported():
            model = torch.nn.ModuleList([*layers, *plain, *extra])
            deep_gemm_warmup(model, options.limit)
        return {
            "progress": log.progress(),
            "einsum": [serve(layer, device) for layer in extra],
            "models": models(),
            "capability": torch.cuda.get_device_capability(device),
            "constructed": constructed,
            "imported": [name for name in LIBRARY if name in sys.modules],
            "said": log.lines(logging.NOTSET)[said:],
            "forward": [forward(layer, options.limit, device) for layer in layers],
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
    prepare_ranks(folder)

    def construct(rank: int) -> None:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        with one_rank(folder, rank, options.ranks) as config:
            for n in options.sizes:
                make_linear(config, device, n, 256, FP8, prefix=f"layers.{n}")

    fork_ranks(folder, options.ranks, construct)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--forget", action="store_true")
    parser.add_argument("--einsum", action="store_true")
    parser.add_argument("--ranks", type=int)
    parser.set_defaults(limit=64)
    return parser.parse_args(words)


def main() -> None:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        if options.ranks:
            start_ranks(pathlib.Path(folder), options)
        else:
            print(json.dumps(start(pathlib.Path(folder), options)))


if __name__ == "__main__":
    main()
