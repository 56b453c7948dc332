"""Run as a program on a device: build specs one after the other, as a new start does.

Reads cases from its argument, each with ``specs``, and ``free``: the bytes of the
device that are left beside the specs' weights, or null. Each case has a process and a
cache folder of its own, forked before the device is touched: DeepGEMM remembers what it
has loaded. Prints a JSON list of what became of each.
"""

import functools
import gc
import json
import os
import pathlib
import sys
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.spec import GemmSpec, spec_from_json
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches

sys.path.insert(0, str(pathlib.Path(__file__).parents[4]))
from tests.model_executor.children import in_children

Weights = tuple[torch.Tensor, torch.Tensor]


def weights_of(spec: GemmSpec, device: torch.device) -> Weights:
    """Return what a layer of that spec holds."""
    return (
        torch.empty(
            (spec.groups, spec.n, spec.k), dtype=torch.float8_e4m3fn, device=device
        ),
        torch.empty(spec.weight_scale.shape, device=device),
    )


def leave(free: int, device: torch.device) -> torch.Tensor:
    """Take all of the device's memory but so many bytes."""
    torch.cuda.empty_cache()
    left, _ = torch.cuda.mem_get_info(device)
    return torch.empty(left - free, dtype=torch.uint8, device=device)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Build the specs of a case."""
    device = torch.device("cuda", 0)
    specs = [spec_from_json(value) for value in case["specs"]]
    weights: list[Weights | None] = [None] * len(specs)
    if case["free"] is not None:
        weights = [weights_of(s, device) for s in specs if isinstance(s, GemmSpec)]
        rest = leave(case["free"], device)
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    backend = Backend(device, read_target(device), read_kernel_caches())
    results = []
    for spec, operands in zip(specs, weights, strict=True):
        calls, left = backend.run(
            spec, operands, every_row=False, listener=lambda spec, call: None
        )
        results.append(
            {
                "rows": [call.rows for call in calls],
                "built": [name for call in calls for name in call.built],
                "failures": [call.failure for call in calls if call.failure],
                "left": left,
            }
        )
    backend.finish()
    gc.collect()
    found = {
        "specs": results,
        "free": free,
        "peak": torch.cuda.max_memory_allocated(device) - held,
        "kept": torch.cuda.memory_allocated(device) - held,
    }
    if case["free"] is not None:
        del rest
    return found


def main() -> None:
    root = pathlib.Path(os.environ["DG_JIT_CACHE_DIR"])

    def answer(case: dict[str, Any], cache: pathlib.Path) -> dict[str, Any]:
        os.environ.update(case["environ"], DG_JIT_CACHE_DIR=str(cache))
        return run(case)

    caches = [(root / str(n), case) for n, case in enumerate(json.loads(sys.argv[1]))]
    jobs = [(cache, functools.partial(answer, case, cache)) for cache, case in caches]
    print(json.dumps(in_children(jobs, at_once=1)))


if __name__ == "__main__":
    main()
