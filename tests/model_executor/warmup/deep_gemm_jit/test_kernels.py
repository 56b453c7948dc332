"""Kernels that another process finds and builds are those that DeepGEMM asks for."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.entry_points import STRATEGIES
from vllm.model_executor.warmup.deep_gemm_jit.kernels import (
    KernelPlan,
    json_of,
    plan_from_session,
)
from vllm.model_executor.warmup.deep_gemm_jit.machine import read_config
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    ExpertRouting,
    RowRange,
    ScaleLayout,
    Spec,
    SplitRule,
    Target,
)
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup import standin
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.settings import read_settings

from .specs import (
    einsum_spec,
    grouped_spec,
    hc_prenorm_spec,
    linear_spec,
    logits_spec,
    masked_spec,
    metadata_spec,
    paged_logits_spec,
)

SWEEP = pathlib.Path(__file__).with_name("sweep.py")
# One of each entry point in DeepGEMM's cache, of each way to lay out a scale, and of
# each way to route tokens. FlashInfer's kernels have a cache that nobody plans for.
SPECS: dict[str, Spec] = {
    "plain": linear_spec(576, 7168, rows=RowRange(32, 1000)),
    "small k": linear_spec(2048, 128, rows=RowRange(1, 300)),
    "aligned": linear_spec(
        1024,
        2048,
        rows=RowRange(1, 300),
        activation_scale=ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED,
    ),
    "w13": grouped_spec(
        1536, 2048, 128, rows=RowRange(1, 300), activation_scale=ScaleLayout.ROW_MAJOR
    ),
    "w2": grouped_spec(2048, 768, 128, rows=RowRange(1, 300)),
    "w2, one id a row": grouped_spec(
        2048, 768, 128, rows=RowRange(1, 300), routing=ExpertRouting(8, False)
    ),
    "w2, counted": grouped_spec(
        2048,
        768,
        16,
        rows=RowRange(1, 1000),
        routing=ExpertRouting(8, prefix_sum=True, counted=True),
    ),
    "batched": masked_spec(3072, 4096, 16, 512),
    "wo_a": einsum_spec(2, 1024, 4096, 300),
    "hyper-connections": hc_prenorm_spec(4096, 1000, SplitRule.EXACT),
    "hyper-connections, delayed": hc_prenorm_spec(7168, 1000, SplitRule.BUCKETED),
    "prompt": logits_spec(rows=RowRange(1, 70)),
    "decode": paged_logits_spec(rows=RowRange(1, 70)),
    "decode of four": paged_logits_spec(rows=RowRange(1, 70), next_n=4),
    "metadata": metadata_spec(rows=RowRange(1, 70)),
    "metadata of four": metadata_spec(rows=RowRange(1, 70), next_n=4),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Specs, and the SMs of the device that they are for."""

    sms: int
    names: tuple[str, ...]

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: SPECS[name] for name in self.names}

    def __str__(self) -> str:
        return f"{len(self.names)} for {self.sms} SMs"


def planned(case: Case, folder: pathlib.Path) -> KernelPlan:
    """Return what a process of its own finds, without this one's DeepGEMM."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DG_JIT_CACHE_DIR", str(folder))
        monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "2")
        deep_gemm_utils.is_deep_gemm_e8m0_used()
        config = read_config(Target(9, 0, case.sms), read_settings())
        with Session(config) as session:
            for spec in case.specs.values():
                session.add_spec(json_of(spec), build=False)
            session.settle()
            return plan_from_session(case.specs.values(), session)


def swept(
    case: Case, environ: Mapping[str, str], cache: pathlib.Path
) -> list[dict[str, Any]]:
    """Return what every row of each spec takes, in a process for each."""
    cases = [
        {"name": name, "spec": spec.to_json(), "sms": None}
        for name, spec in case.specs.items()
    ]
    on_device = standin.environment(str(case.sms), base_env=environ)
    done = subprocess.run(
        [sys.executable, str(SWEEP), json.dumps({"cases": cases, "sweep_first": True})],
        env={**on_device, "DG_JIT_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(132, ("small k", "metadata")), id="few"),
        pytest.param(Case(132, tuple(SPECS)), id="132", marks=pytest.mark.slow),
        pytest.param(Case(78, tuple(SPECS)), id="78", marks=pytest.mark.slow),
    ],
)
def test_it_finds_exactly_what_the_library_builds_in_process(
    case: Case,
    device: torch.device,
    fake_nvcc_environment: dict[str, str],
    tmp_path: pathlib.Path,
) -> None:
    plan = planned(case, tmp_path / "plan")
    results = swept(case, fake_nvcc_environment, tmp_path)

    assert plan.problems == {}
    assert [result["name"] for result in results] == list(case.names)
    for number, (name, result) in enumerate(zip(case.names, results, strict=True)):
        assert result["failures"] == [], name
        assert result["target"] == f"sm90-{case.sms}sm"
        kernels = plan.kernels[SPECS[name]]
        assert {kernel.entry for kernel in kernels} == set(result["first"]) != set()
        for kernel in kernels:
            entry = tmp_path / str(number) / "cache" / kernel.entry
            assert (entry / "kernel.cu").read_text() == kernel.source


def test_every_entry_point_that_is_planned_for_is_among_them() -> None:
    planned_for = {
        entry for entry, strategy in STRATEGIES.items() if strategy.in_deep_gemm_cache
    }
    assert {spec.entry_point for spec in SPECS.values()} == planned_for
