"""Decides which kernels a spec takes: calls DeepGEMM on a device that is not there.

A program: `python -m ... REQUEST` reads specs and writes their kernels, JSON lines
both. It runs on the stand-in device with an `nvcc` that compiles nothing, and forks
for each spec, since DeepGEMM does not tell which of the kernels that it has loaded
already a call takes.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import IO, Any

import torch
from vllm_deep_gemm_warmup.compiling.environment import use_cache
from vllm_deep_gemm_warmup.compiling.kernel import Kernel, Places, shape_text
from vllm_deep_gemm_warmup.kernel_caches import deep_gemm

from .cache import CacheWatch
from .entry_points import STRATEGIES, Shape
from .spec import EntryPoint, Spec, Target, spec_from_json

_IMPORTED_WITH_US = (EntryPoint.FP8_GEMM_NT,)


def find_kernels(
    spec: Spec, target: Target, cache: pathlib.Path, places: Places, *, every_row: bool
) -> list[Kernel]:
    """Call DeepGEMM as the warmup does and return the kernels that it built.

    Args:
        spec: What to call.
        target: What this process's device poses as.
        cache: An empty folder for this process's DeepGEMM, which has built nothing.
        places: Of the compiler and of the library.
        every_row: Sample nothing.

    Raises:
        RuntimeError: A call failed, or an entry is not what can be built elsewhere.

    """
    device = torch.device("cuda", 0)
    strategy = STRATEGIES[spec.entry_point]
    shapes = strategy.shapes(spec, target, every_row=every_row)
    operands = strategy.allocate(
        spec,
        max(shape.rows for shape in shapes),
        None,
        device,
        overlapping=strategy.takes_strided_rows,
    )
    watch = CacheWatch(deep_gemm(cache))
    kernels = []
    for shape in shapes:
        strategy.call(operands, shape)
        folder = cache / "cache"
        kernels += [_read(folder / name, shape, places) for name in watch.new_entries()]
    return kernels


def _read(folder: pathlib.Path, shape: Shape, places: Places) -> Kernel:
    meta = (folder / "meta.json").read_text()
    source = pathlib.Path(_source_in(json.loads(meta)["command"]))
    kernel = Kernel(
        entry=folder.name,
        source=(folder / "kernel.cu").read_text(),
        record=dataclasses.replace(places, folder=source.parent).take_out(meta),
        shape=shape_text(dataclasses.asdict(shape)),
    )
    if kernel.unusual:
        raise RuntimeError(
            f"{kernel.unusual} is set: the library does more than to compile"
        )
    return kernel


def _source_in(command: str) -> str:
    return next(word for word in command.split() if word.endswith("/kernel.cu"))


def _answer(spec: Spec, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
    cache = pathlib.Path(request["scratch"], f"spec-{number}")
    use_cache(cache)
    target = Target(*request["target"])
    places = Places(
        pathlib.Path(request["nvcc"]), cache, pathlib.Path(request["library"])
    )
    try:
        kernels = find_kernels(
            spec, target, cache, places, every_row=request["every_row"]
        )
    # Worker process: whatever keeps this spec from being planned is said to the engine.
    except Exception as error:
        reason = " ".join(str(error).split("\nC++ trace")[0].split())
        return {"problem": f"{type(error).__name__}: {reason}"}
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return {"kernels": [kernel.to_json() for kernel in kernels]}


def _fork(line: str, number: int, request: Mapping[str, Any], answers: IO[str]) -> None:
    """Have a child answer one line; it alone touches the device."""
    value = json.loads(line)
    spec = spec_from_json(value)
    if spec.entry_point not in _IMPORTED_WITH_US:
        # Every child would import it again.
        importlib.import_module("vllm.model_executor.layers.fused_moe.deep_gemm_utils")
    assert not torch.cuda.is_initialized()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found = _answer(spec, number, request)
            answers.write(json.dumps({"spec": value, **found}) + "\n")
            answers.flush()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if ended:
        problem = f"its planner ended with {os.waitstatus_to_exitcode(ended)}"
        print(json.dumps({"spec": value, "problem": problem}), file=answers)
        answers.flush()


def main() -> None:
    """Answer the lines of standard input until it ends."""
    request = json.loads(sys.argv[1])
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for number, line in enumerate(sys.stdin):
        _fork(line, number, request, answers)


if __name__ == "__main__":
    main()
