"""Run as a program on a device: warm specs and sweep all their rows, either first.

Reads a JSON list of cases from its argument and prints a JSON list of results;
a process of its own a run, because DeepGEMM remembers what it has loaded.
"""

import json
import sys
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.calls import Call
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    GemmSpec,
    RowRange,
    ScaleLayout,
    TensorLayout,
)
from vllm.utils import deep_gemm as deep_gemm_utils


def spec_of(case: dict[str, Any], last: int) -> GemmSpec:
    n, k = case["n"], case["k"]
    blocks = (-(-n // 128), k // 128)
    return GemmSpec(
        entry_point=EntryPoint.FP8_GEMM_NT,
        n=n,
        k=k,
        groups=1,
        rows=RowRange(case["first"], last),
        weight_scale=TensorLayout(blocks, (blocks[1], 1), "float32"),
        activation_scale=ScaleLayout(case["layout"]),
        ue8m0_cast=True,
    )


def run(case: dict[str, Any], *, sweep_first: bool) -> dict[str, Any]:
    """Warm and sweep one shape, its limits in ascending order."""
    deep_gemm_utils.set_num_sms(case["sms"])
    device = torch.device("cuda", 0)
    backend = Backend(device, read_target(device))
    first: list[str] = []
    second: list[str] = []
    failures: list[str] = []

    def collect(calls: list[Call], into: list[str]) -> None:
        into.extend(name for call in calls for name in call.built)
        failures.extend(call.failure for call in calls if call.failure)

    for limit in case["limits"]:
        spec = spec_of(case, limit)
        for every_row, into in (
            (sweep_first, first),
            (not sweep_first, second),
        ):
            calls = backend.run(
                spec, None, every_row=every_row, listener=lambda spec, call: None
            )
            collect(calls, into)
    return {**case, "first": first, "second": second, "failures": failures}


def main() -> None:
    request = json.loads(sys.argv[1])
    results = [
        run(case, sweep_first=request["sweep_first"]) for case in request["cases"]
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
