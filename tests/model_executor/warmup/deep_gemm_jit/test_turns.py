"""What is compiled in the engine itself is compiled by one rank of a node at a time."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import read_target
from vllm.model_executor.warmup.deep_gemm_jit.build import build
from vllm.model_executor.warmup.deep_gemm_jit.entry_points import STRATEGIES
from vllm.model_executor.warmup.deep_gemm_jit.plan import Plan, Registered
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    GemmSpec,
    RowRange,
    ScaleLayout,
)
from vllm_deep_gemm_warmup.kernel_caches import FOLDER
from vllm_deep_gemm_warmup.settings import read_settings

from .specs import linear_spec

FEW = EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM
# Another rank, which compiles what it was told.
HOLDER = """
import sys
from pathlib import Path
from vllm_deep_gemm_warmup.compiling.locks import in_turn
next(turns := in_turn(Path(sys.argv[1]), sys.argv[2:]))
print("here", flush=True)
sys.stdin.readline()
"""


def few_rows(n: int) -> GemmSpec:
    return linear_spec(
        n,
        256,
        entry_point=FEW,
        rows=RowRange(1, 1),
        activation_scale=ScaleLayout.NONE,
    )


@pytest.mark.usefixtures("one_engine")
def test_what_another_rank_compiles_is_waited_for(
    device: torch.device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's module takes minutes to build: its call is stood in for."""
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    specs = first, other = few_rows(256), few_rows(512)
    locks = tmp_path / FOLDER / "locks"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(locks), f"{FEW} {first.shape}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "here\n"
    called = []

    def call(operands: Any, shape: Any) -> None:
        called.append((operands.spec, holder.poll() is None))
        holder.kill()
        holder.wait()

    monkeypatch.setattr(STRATEGIES[FEW], "call", call)
    plan = Plan((Registered("proj", specs),), dict.fromkeys(specs))

    results = build(
        plan,
        device,
        read_target(device),
        read_settings({"VLLM_DEEP_GEMM_WARMUP_WORKERS": "0"}),
    )

    assert called == [(other, True), (first, False)]
    assert [result.spec for result in results] == [first, other]
