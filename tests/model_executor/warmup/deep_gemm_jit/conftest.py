"""Real layers whose kernels the base's code chooses by itself."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ...real_layers import FP8, make_experts

# Hidden size, width, tokens of a rank and step at most, data-parallel ranks.
MakeBatchedExperts = Callable[[int, int, int, int], Any]
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
