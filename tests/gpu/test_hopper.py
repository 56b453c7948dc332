"""What the stand-in cannot show: a real driver, real kernels, real numbers.

Run by name on a Hopper machine, not on the stand-in: python -m pytest -m gpu
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from .gemm_specs import gemm_spec

pytestmark = pytest.mark.gpu

SWEEP = (
    pathlib.Path(__file__).parents[1] / "model_executor/warmup/deep_gemm_jit/sweep.py"
)
# Qwen3-0.6B's qkv_proj.
CASE = {
    "name": "Qwen3-0.6B qkv",
    "sms": None,
    "spec": gemm_spec(
        "fp8_gemm_nt",
        n=4096,
        k=1024,
        rows={"first": 1, "last": 8192},
        weight_scale={"shape": [32, 8], "stride": [8, 1], "dtype": "float32"},
    ),
}

OVERLAP = """
import json, torch
from vllm.utils import deep_gemm
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.operands import allocate
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint, GemmSpec, RowRange, ScaleLayout, TensorLayout)
device = torch.device("cuda", 0)
spec = GemmSpec(entry_point=EntryPoint.FP8_GEMM_NT, n=1024, k=2048, groups=1,
    rows=RowRange(1, 512), ue8m0_cast=True,
    weight_scale=TensorLayout((8, 16), (16, 1), "float32"),
    activation_scale=ScaleLayout.COLUMN_MAJOR)
before = torch.cuda.memory_allocated()
for rows in (1, 33, 64, 512):
    operands = allocate(spec, 512, None, device, overlapping=True)
    b = operands.weight, operands.weight_scale
    deep_gemm.fp8_gemm_nt(operands.a(rows), b, operands.d(rows))
    torch.cuda.synchronize()
del operands, b
print(json.dumps({"left": torch.cuda.memory_allocated() - before}))
"""

NUMBERS = """
import json, torch
from vllm.utils import deep_gemm
torch.manual_seed(0)
m, n, k = 257, 576, 1024
a = (torch.randn(m, k, device="cuda") / 4).to(torch.float8_e4m3fn)
b = (torch.randn(n, k, device="cuda") / 4).to(torch.float8_e4m3fn)
a_scale = torch.rand(m, k // 128, device="cuda") + 0.5
b_scale = torch.rand(-(-n // 128), k // 128, device="cuda") + 0.5
d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), d, is_deep_gemm_e8m0_used=False)
wide = b_scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
left = a.double() * a_scale.double().repeat_interleave(128, 1)
exact = left @ (b.double() * wide).T
error = ((d.double() - exact).norm() / exact.norm()).item()
print(json.dumps({"error": error}))
"""


def run(tmp_path: pathlib.Path, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "DG_JIT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_driver_takes_rows_that_overlap_and_nothing_stays_allocated(
    tmp_path: pathlib.Path,
) -> None:
    assert run(tmp_path, "-c", OVERLAP) == {"left": 0}


def test_a_gemm_is_right(tmp_path: pathlib.Path) -> None:
    """Relative error against float64; bfloat16 output alone gives about 2e-3."""
    assert run(tmp_path, "-c", NUMBERS)["error"] < 1e-2


@pytest.mark.parametrize("sweep_first", [False, True], ids=["missing", "unneeded"])
def test_sampled_rows_take_the_kernels_of_all_rows(
    tmp_path: pathlib.Path, sweep_first: bool
) -> None:
    request = json.dumps({"cases": [CASE], "sweep_first": sweep_first})
    (result,) = run(tmp_path, str(SWEEP), request)
    assert result["failures"] == []
    assert result["first"]
    assert result["second"] == []
