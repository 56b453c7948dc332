"""Real layers whose kernels the base's code chooses by itself."""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.spec import Spec

from ...real_layers import FP8, make_experts

# Hidden size, width, tokens of a rank and step at most, data-parallel ranks.
MakeBatchedExperts = Callable[[int, int, int, int], Any]
# Specs, bytes of the device that are free beside their weights, variables.
FreshCase = tuple[Sequence[Spec], int | None, dict[str, str]]
Fresh = Callable[[Sequence[FreshCase]], list[dict[str, Any]]]
# Local experts, one of them redundant, and what each token is sent to.
LOCAL_EXPERTS, TOP_K = 5, 2


@pytest.fixture
def batched_experts(
    vllm_config: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeBatchedExperts]:
    """Make and load experts as on one of the ranks of DeepEP low-latency.

    Its package and its ranks are not here: the layer is made for one rank, and gets
    the experts that the other ranks would have brought it.
    """
    from vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe import (
        BatchedDeepGemmExperts,
    )

    numbers = itertools.count()

    def make(hidden: int, width: int, limit: int, ranks: int) -> Any:
        monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm")
        runner: Any = make_experts(
            vllm_config,
            device,
            LOCAL_EXPERTS,
            TOP_K,
            hidden,
            width,
            FP8,
            prefix=f"batched.{next(numbers)}.experts",
        )
        kernel = runner._quant_method.moe_kernel.impl
        config = kernel.fused_experts.experts.moe_config
        kernel.fused_experts = BatchedDeepGemmExperts(
            moe_config=dataclasses.replace(
                config,
                num_experts=LOCAL_EXPERTS * ranks,
                moe_parallel_config=dataclasses.replace(
                    config.moe_parallel_config, dp_size=ranks
                ),
            ),
            quant_config=kernel.fused_experts.experts.quant_config,
            max_num_tokens=limit,
            num_dispatchers=ranks,
        )
        return runner

    yield make
    vllm_config.compilation_config.static_forward_context.clear()


@pytest.fixture
def fresh(fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path) -> Fresh:
    """Run ``fresh.py``: build each case's specs in a process and cache of its own."""

    def fresh(cases: Sequence[FreshCase]) -> list[dict[str, Any]]:
        asked = [
            {
                "specs": [spec.to_json() for spec in specs],
                "free": free,
                "environ": variables,
            }
            for specs, free, variables in cases
        ]
        program = pathlib.Path(__file__).with_name("fresh.py")
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(asked)],
            env={**fake_nvcc_environment, "DG_JIT_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return results

    return fresh
