"""A warmed cache holds what the model's layers can take, and what is named here."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    RowRange,
    ScaleLayout,
    spec_from_json,
)
from vllm_deep_gemm_warmup import standin

from .specs import linear_spec

HERE = pathlib.Path(__file__).parent
LIMIT = 256
# The masked GEMM takes several ranks, FlashInfer's two modules of minutes and of hours.
ELSEWHERE = {
    EntryPoint.FP8_M_GROUPED_GEMM_NT_MASKED,
    EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM,
    EntryPoint.FLASHINFER_CUTLASS_FUSED_MOE,
}
# Built and not used: when `wo_a` is constructed, nothing says yet that an einsum will
# run it, and its kernels are begun with then (`ahead.py`) as a plain layer's.
BEFORE_LOADING = [
    linear_spec(2 * 128, 256, rows=RowRange(1, LIMIT), activation_scale=layout)
    for layout in (ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED, ScaleLayout.COLUMN_MAJOR)
]


def run(program: str, environ: Mapping[str, str], *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("sms", "workers"),
    [
        pytest.param(132, 2, id="built apart"),
        pytest.param(78, 2, id="built apart, 78 SMs", marks=pytest.mark.slow),
        pytest.param(132, 0, id="in process", marks=pytest.mark.slow),
    ],
)
def test_the_cache_is_the_union_of_what_every_row_of_every_layer_takes(
    sms: int,
    workers: int,
    fake_nvcc_environment: dict[str, str],
    tmp_path: pathlib.Path,
) -> None:
    environ = standin.environment(str(sms), base_env=fake_nvcc_environment) | {
        "DG_JIT_CACHE_DIR": str(tmp_path / "warmed"),
        "VLLM_DEEP_GEMM_WARMUP_WORKERS": str(workers),
        "VLLM_DEEP_GEMM_WARMUP_STRICT": "1",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    }
    warmed = run("whole.py", environ, str(tmp_path), str(LIMIT))

    specs = [spec_from_json(value) for value in warmed["specs"]]
    assert {spec.entry_point for spec in specs} == set(EntryPoint) - ELSEWHERE
    assert warmed["peak"] <= 256 << 20
    assert warmed["left"] == 0

    wanted = [*specs, *BEFORE_LOADING]
    cases = [{"name": str(s), "spec": s.to_json(), "sms": None} for s in wanted]
    swept = run(
        "sweep.py",
        environ | {"DG_JIT_CACHE_DIR": str(tmp_path / "swept")},
        json.dumps({"cases": cases, "sweep_first": True}),
    )
    taken: list[set[str]] = []
    for spec, result in zip(wanted, swept, strict=True):
        assert result["failures"] == []
        assert result["first"], spec
        taken.append(set(result["first"]))
    used = set[str]().union(*taken[: len(specs)])
    entries = set(warmed["entries"])
    assert used <= entries
    unused = set[str]().union(*taken[len(specs) :]) - used
    assert entries - used == (unused if workers else set())
