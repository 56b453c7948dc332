"""Kernels that another process finds and builds are those that DeepGEMM asks for."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.kernels import (
    KernelPlan,
    json_of,
    plan_from_session,
)
from vllm.model_executor.warmup.deep_gemm_jit.machine import read_config
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    RowRange,
    ScaleLayout,
    Target,
)
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.settings import read_settings

from .specs import grouped_spec, linear_spec

SWEEP = pathlib.Path(__file__).with_name("sweep.py")
# One of each entry point, and of each way to lay out a scale.
SPECS = {
    "plain": linear_spec(576, 7168, rows=RowRange(32, 2048)),
    "small k": linear_spec(2048, 128, rows=RowRange(1, 1000)),
    "aligned": linear_spec(
        1024,
        2048,
        rows=RowRange(1, 1000),
        activation_scale=ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED,
    ),
    "w13": grouped_spec(
        1536, 2048, 128, rows=RowRange(1, 1000), activation_scale=ScaleLayout.ROW_MAJOR
    ),
    "w2": grouped_spec(2048, 768, 128, rows=RowRange(1, 1000)),
}


@pytest.fixture(scope="module")
def plan(
    device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KernelPlan]:
    """What a process of its own finds, which has no part of this one's DeepGEMM."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("plan")
        monkeypatch.setenv("DG_JIT_CACHE_DIR", str(folder))
        monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "2")
        deep_gemm_utils.is_deep_gemm_e8m0_used()
        config = read_config(Target(9, 0, 132), read_settings())
        with Session(config) as session:
            for spec in SPECS.values():
                session.add_spec(json_of(spec), build=False)
            session.settle()
            yield plan_from_session(SPECS.values(), session)


def test_it_finds_exactly_what_the_library_builds_in_process(
    plan: KernelPlan,
    fake_nvcc_environment: dict[str, str],
    tmp_path: pathlib.Path,
) -> None:
    cases = [
        {"name": name, "spec": spec.to_json(), "sms": None}
        for name, spec in SPECS.items()
    ]
    done = subprocess.run(
        [sys.executable, str(SWEEP), json.dumps({"cases": cases, "sweep_first": True})],
        env={**fake_nvcc_environment, "DG_JIT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert plan.problems == {}
    for number, (result, spec) in enumerate(zip(results, SPECS.values(), strict=True)):
        kernels = plan.kernels[spec]
        assert {kernel.entry for kernel in kernels} == set(result["first"])
        for kernel in kernels:
            entry = tmp_path / str(number) / "cache" / kernel.entry
            assert (entry / "kernel.cu").read_text() == kernel.source
