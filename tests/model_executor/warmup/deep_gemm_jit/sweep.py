"""Run as a program on a device: warm specs and sweep all their rows, either first.

Reads cases from its argument and prints a JSON list of results. Each case has a
process and a cache folder of its own, forked before the device is touched, because
DeepGEMM remembers what it has loaded and one case would hide what another lacks.
"""

import functools
import json
import os
import pathlib
import sys
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.spec import spec_from_json
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches

sys.path.insert(0, str(pathlib.Path(__file__).parents[4]))
from tests.model_executor.children import in_children


def run(case: dict[str, Any], *, sweep_first: bool) -> dict[str, Any]:
    """Warm and sweep one spec: its sampled calls, and those of every row."""
    device = torch.device("cuda", 0)
    if case["sms"] is not None:
        deep_gemm_utils.set_num_sms(case["sms"])
    target = read_target(device)
    backend = Backend(device, target, read_kernel_caches())
    spec = spec_from_json(case["spec"])
    (first, first_left), (second, second_left) = (
        backend.run(spec, None, every_row=every_row, listener=lambda spec, call: None)
        for every_row in (sweep_first, not sweep_first)
    )
    return {
        "name": case["name"],
        "target": str(target),
        "first": [name for call in first for name in call.built],
        "second": [name for call in second for name in call.built],
        "last_new": max((call.rows for call in first if call.built), default=0),
        "failures": [
            *(call.failure for call in (*first, *second) if call.failure),
            *first_left,
            *second_left,
        ],
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    root = pathlib.Path(os.environ["DG_JIT_CACHE_DIR"])

    def answer(case: dict[str, Any], cache: pathlib.Path) -> dict[str, Any]:
        os.environ["DG_JIT_CACHE_DIR"] = str(cache)
        return run(case, sweep_first=request["sweep_first"])

    caches = [
        (root / str(number), case) for number, case in enumerate(request["cases"])
    ]
    jobs = [(cache, functools.partial(answer, case, cache)) for cache, case in caches]
    print(json.dumps(in_children(jobs)))


if __name__ == "__main__":
    main()
