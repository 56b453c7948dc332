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
import selectors
import shutil
import sys
from collections.abc import Mapping
from typing import IO, Any

import torch
from vllm_deep_gemm_warmup.compiling.cpus import available_cpus
from vllm_deep_gemm_warmup.compiling.environment import use_cache
from vllm_deep_gemm_warmup.compiling.kernel import Kernel, Places, shape_text
from vllm_deep_gemm_warmup.kernel_caches import deep_gemm

from .cache import CacheWatch
from .calls import describe_failure
from .entry_points import STRATEGIES, Shape
from .spec import EntryPoint, Spec, Target, spec_from_json

_IMPORTED_WITH_US = (EntryPoint.FP8_GEMM_NT,)
_MOST_CHILDREN = 8


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
        reason = " ".join(describe_failure(error).split())
        return {"problem": f"{type(error).__name__}: {reason}"}
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return {"kernels": [kernel.to_json() for kernel in kernels]}


@dataclasses.dataclass(frozen=True)
class _Child:
    """A process that plans one spec; it alone touches the device."""

    pid: int
    spec: Mapping[str, Any]
    answer: pathlib.Path


def _fork(spec: Spec, number: int, request: Mapping[str, Any]) -> _Child:
    if spec.entry_point not in _IMPORTED_WITH_US:
        # Every child would import it again.
        importlib.import_module("vllm.model_executor.layers.fused_moe.deep_gemm_utils")
    assert not torch.cuda.is_initialized()
    path = pathlib.Path(request["scratch"], f"answer-{number}")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            path.write_text(json.dumps(_answer(spec, number, request)))
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return _Child(pid, spec.to_json(), path)


def _collect(child: _Child) -> dict[str, Any]:
    _, ended = os.waitpid(child.pid, 0)
    if ended:
        status = os.waitstatus_to_exitcode(ended)
        return {"problem": f"its planner ended with {status}"}
    found: dict[str, Any] = json.loads(child.answer.read_text())
    child.answer.unlink()
    return found


class _Planner:
    """Several children at once, for the lines that come."""

    def __init__(self, request: Mapping[str, Any], answers: IO[str]) -> None:
        self._request, self._answers = request, answers
        self._most = min(_MOST_CHILDREN, available_cpus())
        self._lines: list[bytes] = []
        self._number = 0
        self._children: dict[int, _Child] = {}

    def run(self, lines: int) -> None:
        """Answer the lines of a descriptor until it ends."""
        selector, rest = selectors.DefaultSelector(), b""
        selector.register(lines, selectors.EVENT_READ)
        # Who asks is gone when the lines end: nobody waits for what is not done.
        while True:
            for key, _ in selector.select():
                if key.fd != lines:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    child = self._children.pop(key.fd)
                    self._say(child.spec, _collect(child))
                elif data := os.read(lines, 1 << 16):
                    *whole, rest = (rest + data).split(b"\n")
                    self._lines += whole
                else:
                    return
            while self._lines and len(self._children) < self._most:
                self._start(self._lines.pop(0), selector)

    def _start(self, line: bytes, selector: selectors.BaseSelector) -> None:
        value = json.loads(line)
        self._number += 1
        try:
            spec = spec_from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            self._say(value, {"problem": f"it is no spec: {error!r}"})
            return
        child = _fork(spec, self._number, self._request)
        descriptor = os.pidfd_open(child.pid)
        self._children[descriptor] = child
        selector.register(descriptor, selectors.EVENT_READ)

    def _say(self, spec: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps({"spec": spec, **found}) + "\n")
        self._answers.flush()


def main() -> None:
    """Answer the lines of standard input until it ends."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _Planner(json.loads(sys.argv[1]), answers).run(0)


if __name__ == "__main__":
    main()
