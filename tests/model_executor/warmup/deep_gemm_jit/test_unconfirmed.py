"""What was announced and turns out otherwise: in offline plans and in the report."""

import json
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit import ahead
from vllm.model_executor.warmup.deep_gemm_jit.backend import read_target
from vllm.model_executor.warmup.deep_gemm_jit.kernels import json_of
from vllm.model_executor.warmup.deep_gemm_jit.machine import read_config
from vllm.model_executor.warmup.deep_gemm_jit.plan import make_plan
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup import kernel_caches
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.settings import read_settings

from ...real_layers import FP8, load

# Groups, N and K: no other test has kernels of these.
GROUPS, N, K, LIMIT = 2, 384, 1152, 256
Model = Callable[[], torch.nn.Module]


@pytest.fixture
def started(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[Callable[[], None]]:
    """Begin as a process does that has constructed nothing."""
    monkeypatch.setattr(vllm_config.scheduler_config, "max_num_batched_tokens", LIMIT)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "2")
    wrapper = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", wrapper)
    report = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(report))

    def start() -> None:
        monkeypatch.setattr(ahead, "_process", ahead._Process())

    start()
    yield start
    ahead.end()


@pytest.fixture
def model(linear: Callable[..., torch.nn.Module]) -> Model:
    """Construct and load a layer as DeepSeek-V4 does, and a plain one beside it."""

    def make() -> torch.nn.Module:
        wo_a: Any = linear(GROUPS * N, K, FP8, prefix="layers.0.wo_a")
        wo_a.is_bmm, wo_a.bmm_batch_size = True, GROUPS
        plain = linear(N, K, FP8, prefix="layers.0.wo_b")
        return torch.nn.ModuleDict({"wo_a": load(wo_a), "wo_b": load(plain)})

    return make


def entries() -> frozenset[str]:
    root = kernel_caches.deep_gemm_root()
    return kernel_caches.deep_gemm(root).entries()


def warm(layers: torch.nn.Module, tmp_path: pathlib.Path, limit: int = LIMIT) -> Any:
    deep_gemm_warmup(layers, limit)
    return json.loads((tmp_path / "report.json").read_text())


def unconfirmed(report: Any) -> list[Any]:
    return [spec for spec in report["specs"] if spec["unconfirmed"]]


def test_a_cache_that_was_planned_offline_is_full_for_an_einsum_s_layer(
    started: Callable[[], None],
    model: Model,
    vllm_config: Any,
    device: torch.device,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """And for one that is planned with other rows than it was announced with."""
    ahead.only_ask()
    layers = model()
    announced = ahead.announced(vllm_config)
    specs = {*announced, *make_plan(layers, LIMIT).specs}
    specs |= {*make_plan(layers, LIMIT + 64).specs}
    settings = read_settings()
    with Session(read_config(read_target(device), settings)) as session:
        for spec in specs:
            session.add_spec(json_of(spec))
        session.settle()
        assert all(isinstance(plan, tuple) for plan in session.plans.values())
    before = entries()
    assert before

    # No process could be started.
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    caplog_vllm.set_level(logging.INFO, "vllm")
    for limit in (LIMIT, LIMIT + 64):
        started()
        report = warm(model(), tmp_path, limit)
        assert report["kernels"] == {"built": 0, "failed": 0, "unconfirmed": 0}
        (row,) = [spec for spec in unconfirmed(report) if spec["n"] == GROUPS * N]
        assert row["unconfirmed"] == "announced at construction, confirmed by no layer"
        assert row["layers"] == row["built"] == row["failed"] == []
        assert row["hit"]
        assert entries() == before
    said = caplog_vllm.text
    assert "0 kernels built, all were there" in said
    assert "ahead of the weights" not in said
    assert "in this process" not in said


def test_what_is_built_for_no_layer_is_counted_and_named(
    started: Callable[[], None],
    linear: Callable[..., torch.nn.Module],
    tmp_path: pathlib.Path,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    caplog_vllm.set_level(logging.INFO, "vllm")
    before = entries()
    wo_a: Any = linear(GROUPS * N, 2 * K, FP8, prefix="layers.0.wo_a")
    wo_a.is_bmm, wo_a.bmm_batch_size = True, GROUPS
    report = warm(torch.nn.ModuleDict({"wo_a": load(wo_a)}), tmp_path)
    new = entries() - before
    assert report["kernels"]["built"] == len(new)
    rows = unconfirmed(report)
    named = [kernel["kernel"] for row in rows for kernel in row["built"]]
    assert len(named) == report["kernels"]["unconfirmed"] > 0
    assert set(named) < new
    # A row for each layout of the scale that a start may have.
    assert {(row["n"], row["k"]) for row in rows} == {(GROUPS * N, 2 * K)}
    assert [row["layers"] for row in rows] == [[]] * len(rows)
    said = caplog_vllm.text
    assert f"{len(new)} kernels built, {len(named)} of them for no layer" in said


def test_where_every_layer_is_what_it_announced_nothing_is_for_no_layer(
    started: Callable[[], None],
    linear: Callable[..., torch.nn.Module],
    tmp_path: pathlib.Path,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    caplog_vllm.set_level(logging.INFO, "vllm")
    layers = torch.nn.ModuleList([load(linear(N, 3 * K, FP8))])
    report = warm(layers, tmp_path)
    assert report["kernels"]["built"] > 0
    assert report["kernels"]["unconfirmed"] == 0
    assert unconfirmed(report) == []
    assert "for no layer" not in caplog_vllm.text
