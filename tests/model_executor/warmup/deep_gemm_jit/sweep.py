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
    ExpertRouting,
    GemmSpec,
    RowRange,
    ScaleLayout,
    TensorLayout,
)
from vllm.utils import deep_gemm as deep_gemm_utils


def spec_of(case: dict[str, Any], last: int) -> GemmSpec:
    n, k, groups = case["n"], case["k"], case.get("groups", 1)
    rows, columns = -(-n // 128), k // 128
    scale = TensorLayout((rows, columns), (columns, 1), "float32")
    routing = None
    entry_point = EntryPoint.FP8_GEMM_NT
    if groups > 1:
        entry_point = EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS
        scale = TensorLayout(
            (groups, rows, columns), (rows * columns, columns, 1), "float32"
        )
        routing = ExpertRouting(case["top_k"], prefix_sum=True)
    return GemmSpec(
        entry_point=entry_point,
        n=n,
        k=k,
        groups=groups,
        rows=RowRange(case["first"], last),
        weight_scale=scale,
        activation_scale=ScaleLayout(case["layout"]),
        ue8m0_cast=True,
        routing=routing,
    )


def run(case: dict[str, Any], *, sweep_first: bool) -> dict[str, Any]:
    """Warm and sweep one shape, its limits in ascending order."""
    device = torch.device("cuda", 0)
    if case["sms"] is not None:
        deep_gemm_utils.set_num_sms(case["sms"])
    target = read_target(device)
    backend = Backend(device, target)
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
    return {
        **case,
        "target": str(target),
        "first": first,
        "second": second,
        "failures": failures,
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    results = [
        run(case, sweep_first=request["sweep_first"]) for case in request["cases"]
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
