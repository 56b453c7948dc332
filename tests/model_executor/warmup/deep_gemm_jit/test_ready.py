"""The warmup loads what other processes have built, with a call for each kernel."""

import dataclasses
import json
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend
from vllm.model_executor.warmup.deep_gemm_jit.kernels import (
    Kernel,
    KernelPlan,
    json_of,
)
from vllm.model_executor.warmup.deep_gemm_jit.progress import Progress, Turn
from vllm.model_executor.warmup.deep_gemm_jit.ready import Ready
from vllm.model_executor.warmup.deep_gemm_jit.spec import RowRange, Target
from vllm.model_executor.warmup.deep_gemm_jit.work import Work, describe_work
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup import kernel_caches
from vllm_deep_gemm_warmup.compiling.building import Outcome
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.kernel import shape_text
from vllm_deep_gemm_warmup.compiling.store import Context, PlanStore

from ....processes import wait_for
from ...real_layers import FP8, load
from ...starts import compiler
from .specs import linear_spec

GEMM = "fp8_gemm_nt"
APART = "compiled in this process"
Warm = Callable[..., dict[str, Any]]
LIMIT = 8192


@pytest.fixture
def warm(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    caplog_vllm: pytest.LogCaptureFixture,
) -> Warm:
    """Warm a model with two compilers at once; the report of it."""
    caplog_vllm.set_level(logging.INFO)
    report = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "2")
    # The kernels of FlashInfer are another matter.
    wrapper = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", wrapper)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(report))

    def warm(model: torch.nn.Module, limit: int = 1000) -> dict[str, Any]:
        caplog_vllm.clear()
        deep_gemm_warmup(model, limit)
        found: dict[str, Any] = json.loads(report.read_text())
        # The fake nvcc cannot build FlashInfer's module, where that is chosen.
        found["specs"] = [s for s in found["specs"] if s["entry_point"] == GEMM]
        return found

    return warm


def test_a_cold_cache_is_filled_apart_and_a_full_one_needs_no_process(
    warm: Warm,
    linear: Callable[..., torch.nn.Module],
    caplog_vllm: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G40, G44, G53."""
    model = torch.nn.ModuleList([load(linear(n, 896, FP8)) for n in (320, 832)])
    cold = warm(model)
    said = caplog_vllm.text
    built = cold["kernels"]["built"]
    assert built >= 10
    assert "kernels to build, 2 at a time" in said
    assert APART not in said
    assert [spec["failed"] for spec in cold["specs"]] == [[]] * len(cold["specs"])
    # One call a kernel. Of two layouts of a scale the second has its transpose alone,
    # and layers of one K share that.
    assert sum(spec["calls"] for spec in cold["specs"]) == built

    # No process could be started.
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    full = warm(model)
    assert full["kernels"]["built"] == 0
    assert [spec["failed"] for spec in full["specs"]] == [[]] * len(full["specs"])
    assert [s["calls"] for s in full["specs"]] == [s["calls"] for s in cold["specs"]]
    assert APART not in caplog_vllm.text
    assert "0 kernels built, all were there" in caplog_vllm.text


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A file with a line for each compile; the first eight compilers run together."""
    works = f"{os.environ['CUDA_HOME']}/bin/nvcc"
    log = tmp_path / "compiled"
    eight = f"until [ $(wc -l < {log}) -ge 8 ]; do sleep 0.05; done"
    count = f'case "$*" in *--cubin*) echo x >> {log}; {eight};; esac'
    home = compiler(tmp_path, f'{count}\nexec {works} "$@"')
    monkeypatch.setenv("CUDA_HOME", home["CUDA_HOME"])
    return log


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(1536, 4096), (4096, 4096), (16384, 1024)], id="G32"),
        pytest.param([(24576, 2560), (2560, 12288)], id="G40"),
    ],
)
def test_reported_shapes_are_compiled_eight_at_a_time_and_each_kernel_once(
    warm: Warm,
    linear: Callable[..., torch.nn.Module],
    counted: pathlib.Path,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    shapes: list[tuple[int, int]],
) -> None:
    """G32, G40; G44: of each shape, as many calls as kernels, and two at most more."""
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "8")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    scheduler = vllm_config.scheduler_config
    monkeypatch.setattr(scheduler, "max_num_batched_tokens", LIMIT)
    model = torch.nn.ModuleList([load(linear(*shape, FP8)) for shape in shapes])
    report = warm(model, LIMIT)
    assert report["seconds"] > 0
    assert report["kernels"]["failed"] == 0
    compiles = len(counted.read_text().split())
    assert compiles == report["kernels"]["built"] > 20
    assert {(spec["n"], spec["k"]) for spec in report["specs"]} == set(shapes)
    for spec in report["specs"]:
        assert spec["calls"] <= len(spec["built"]) + len(spec["hit"]) + 2


@pytest.mark.slow
def test_ranks_of_another_split_build_what_they_do_not_share(
    warm: Warm, linear: Callable[..., torch.nn.Module]
) -> None:
    """G58: filled for eight tensor-parallel ranks, started with four."""

    def entries_after(*shapes: tuple[int, int]) -> frozenset[str]:
        warm(torch.nn.ModuleList([load(linear(*shape, FP8)) for shape in shapes]))
        return kernel_caches.deep_gemm(cache).entries()

    cache = kernel_caches.deep_gemm_root()
    eight = entries_after((512, 1152), (1152, 256))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
    both = entries_after((1024, 1152), (1152, 512))
    assert eight < both
    assert (
        before.items()
        <= {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}.items()
    )


def test_without_a_c_compiler_the_library_compiles_by_itself(
    warm: Warm,
    linear: Callable[..., torch.nn.Module],
    caplog_vllm: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    """The stand-in cannot be built; nvcc has a compiler of its own."""
    # Torch's compiler wants a C compiler too, the first time that a layer is loaded.
    layer = load(linear(448, 896, FP8))
    compiler = shutil.which("g++")
    assert compiler is not None
    monkeypatch.setenv("NVCC_CCBIN", compiler)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "bin").mkdir()
    for program in ("sh", "cp", "cat"):
        found = shutil.which(program)
        assert found is not None
        (tmp_path / "bin" / program).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    report = warm(torch.nn.ModuleList([layer]))
    assert report["kernels"]["built"] >= 5
    assert report["kernels"]["failed"] == 0
    (line,) = {line for line in caplog_vllm.messages if APART in line}
    assert "no C compiler (cc) on PATH" in line


def test_a_kernel_that_could_not_be_built_is_a_row_and_not_tried_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = linear_spec(256, 640, rows=RowRange(64, 256))
    kernels = tuple(
        Kernel(f"gemm.{rows}", "", "{}", shape_text({"rows": rows}))
        for rows in (64, 128, 256)
    )
    ready = Ready(
        KernelPlan({spec: kernels}, {}),
        {
            "gemm.64": Outcome("gemm.64", 2.0, built=True),
            "gemm.128": Outcome(
                "gemm.128", 2.0, failure="nvcc ended with 1: why", final=True
            ),
            "gemm.256": Outcome("gemm.256"),
        },
    )
    calls, left = Backend(device, Target(9, 0, 132), ()).load(
        spec, None, ready, every_row=False, listener=lambda *_: None
    )
    assert left == []
    found = {call.rows: call for call in calls}
    assert found[128].failure == "gemm.128: nvcc ended with 1: why"
    assert found[64].built == ("gemm.64",)
    assert found[256] == dataclasses.replace(found[256], built=(), failure=None)


@pytest.fixture
def work(tmp_path: pathlib.Path) -> Iterator[Work]:
    """One compiler at a time, which does not end, and an engine that has 600 s."""
    program = tmp_path / "nvcc"
    program.write_text(f"#!/bin/sh\necho x >> {tmp_path}/compiled\nexec sleep 600\n")
    program.chmod(0o755)
    context = Context(9, 0, 132, "", "", (), every_row=False)
    folder = tmp_path / "root"
    config = Config(
        context, folder, folder / "work", program, tmp_path, 1, 600.0, "engine"
    )
    logger = logging.getLogger("vllm.deep_gemm_warmup")
    progress = Progress(Turn(None, first=True), logger.info)
    made = Work(config, progress, logger, speaks=True, timeout=600.0)
    yield made
    made.close()


def test_an_estimate_beyond_vllm_s_patience_warns_before_the_first_kernel(
    work: Work, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    """G33: 300 kernels, a timeout of 600 s."""
    spec = json_of(linear_spec(256, 640))
    command = "@NVCC@ @FOLDER@/kernel.cu"
    record = json.dumps({"command": command, "compiler_options": {}})
    kernels = tuple(Kernel(f"gemm.{n}", "", record, "{}") for n in range(300))
    PlanStore(work.config.work, work.config.context).save(spec, kernels)
    session = work.begin()
    session.add_spec(spec)
    wait_for(lambda: caplog_vllm.records)
    assert {it.levelno for it in caplog_vllm.records} == {logging.WARNING}
    assert "300 kernels to build, 1 at a time, about 750 s" in caplog_vllm.text
    assert session.outcomes == {}


def test_an_estimate_beyond_vllm_s_patience_warns() -> None:
    """G33, and not with 16 workers."""
    said = describe_work(300, 1, 600)
    line, warns = said
    assert warns
    assert "300 kernels to build, 1 at a time, about 750 s" in line
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in line
    said = describe_work(300, 16, 600)
    assert not said[1]
