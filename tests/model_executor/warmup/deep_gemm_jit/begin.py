"""Run as a program on a device: construct, load, profile and warm layers.

    begin.py FOLDER RANKS N... [--k K] [--limit M] [--profile M] [--serve M]...
             [--own N] [--raises RANK] [--signal TEXT]

Each rank is a process, forked as vLLM forks its workers, constructs a layer for each N,
loads them, runs the first of them as the memory-profiling run does, warms them up, and
serves. ``--own`` is a layer that rank 0 has as well. The model of rank ``--raises``
raises when its layers are asked for, after a second. Once a rank has logged TEXT, there
is a file ``signal`` in FOLDER.

Prints JSON: for each rank the compiles before the forward, before it serves and after
that, the files of FOLDER when its warmup ended, what the warmup logged, and as a
warning, and how long the rank took, in seconds.
"""

import argparse
import functools
import json
import logging
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

sys.path.insert(0, str(pathlib.Path(__file__).parents[4]))
from tests.model_executor.children import fork_ranks
from tests.model_executor.real_layers import (
    FP8,
    load,
    make_linear,
    one_rank,
    prepare_ranks,
)


class Log(logging.Handler):
    """Keeps what is logged, and touches a file once that has a text."""

    def __init__(self, text: str | None, file: pathlib.Path) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._text, self._file = text, file

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if self._text is not None and self._text in record.getMessage():
            self._file.touch()

    def lines(self, level: int) -> list[str]:
        """Return what was said of the warmup at that level or above."""
        said = [record for record in self.records if record.levelno >= level]
        lines = (record.getMessage() for record in said)
        return [line for line in lines if "DeepGEMM warmup" in line]


class Broken(torch.nn.ModuleList):  # type: ignore[misc]
    """A model that breaks the walk over its layers."""

    def named_modules(self, *_: Any, **__: Any) -> Iterator[Any]:
        time.sleep(1.0)
        raise RuntimeError("no such luck")


def compiles(folder: pathlib.Path) -> int:
    """Count what the compiler has written into its log."""
    log = folder / "compiled"
    return len(log.read_text().split()) if log.exists() else 0


def start(options: argparse.Namespace, rank: int) -> Any:
    """Start one rank and return what is to be printed."""
    begin, folder = time.perf_counter(), options.folder
    log = Log(options.signal, folder / "signal")
    logging.getLogger("vllm").addHandler(log)
    logging.getLogger("vllm").setLevel(logging.INFO)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)

    def run(layer: torch.nn.Module, rows: int) -> None:
        layer(torch.empty(rows, options.k, dtype=torch.bfloat16, device=device))

    with one_rank(folder, rank, options.ranks) as config:
        config.scheduler_config.max_num_batched_tokens = options.limit
        own = options.own if rank == 0 else []
        layers = [
            load(make_linear(config, device, n, options.k, FP8, prefix=f"layers.{n}"))
            for n in (*options.sizes, *own)
        ]
        run(layers[0], options.profile or options.limit)
        forward = compiles(folder)
        kind = Broken if rank == options.raises else torch.nn.ModuleList
        deep_gemm_warmup(kind(layers), options.limit)
        files = sorted(path.name for path in folder.iterdir())
        warmed = compiles(folder)
        for layer in layers:
            for rows in options.serve or [options.limit]:
                run(layer, rows)
    return {
        "said": log.lines(logging.NOTSET),
        "warned": log.lines(logging.WARNING),
        "forward": forward,
        "warmed": warmed,
        "all": compiles(folder),
        "files": files,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("sizes", nargs="+", type=int)
    parser.add_argument("--k", type=int, default=768)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--profile", type=int)
    parser.add_argument("--serve", action="append", type=int)
    parser.add_argument("--own", action="append", type=int, default=[])
    parser.add_argument("--raises", type=int)
    parser.add_argument("--signal")
    options = parser.parse_args()
    folder = options.folder
    prepare_ranks(folder)
    start_rank = functools.partial(start, options)
    print(json.dumps(fork_ranks(folder, options.ranks, start_rank)))


if __name__ == "__main__":
    main()
