"""What watching a call of DeepGEMM costs: wrapped and bare, in one run.

    vllm-deep-gemm standin -- python tests/benchmarks/monitor.py

Calls a Python function that does nothing, with the operands of a GEMM, bare and as
the monitor wraps it, in turns, and prints the nanoseconds of a call: the best of many
rounds each, and their difference. What the function itself does is left out on purpose:
the wrapper's cost does not depend on it.
"""

import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.warmup.deep_gemm_jit.monitor import Monitor, watch

CALLS = 100_000
ROUNDS = 15


def function(*args: Any, **kwargs: Any) -> None:
    """Stand for one of DeepGEMM's."""


def measure(rounds: int = ROUNDS, calls: int = CALLS) -> dict[str, float]:
    """Return the nanoseconds of a call, by form."""
    operand = torch.empty(0)
    a, b, d = (operand, operand), (operand, operand), operand
    forms: dict[str, Callable[..., None]] = {
        "bare": function,
        "wrapped": watch(function, "fp8_gemm_nt", Monitor((), None, None)),
    }
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(rounds):
        for name, form in forms.items():

            def call(form: Callable[..., None] = form) -> None:
                form(a, b, d, disable_ue8m0_cast=False)

            seconds = timeit.timeit(call, number=calls)
            best[name] = min(best[name], 1e9 * seconds / calls)
    return best


def main() -> int:
    best = measure()
    for name, nanoseconds in best.items():
        print(f"{name:<8} {nanoseconds:7.1f} ns per call")
    print(f"monitor  {best['wrapped'] - best['bare']:7.1f} ns per call")
    return 0


if __name__ == "__main__":
    sys.exit(main())
