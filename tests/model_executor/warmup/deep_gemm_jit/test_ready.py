"""The warmup loads what other processes have built, with a call for each kernel."""

import dataclasses
import json
import logging
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend
from vllm.model_executor.warmup.deep_gemm_jit.kernels import Kernel, KernelPlan
from vllm.model_executor.warmup.deep_gemm_jit.ready import Ready
from vllm.model_executor.warmup.deep_gemm_jit.spec import RowRange, Target
from vllm.model_executor.warmup.deep_gemm_jit.work import describe_work
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup.compiling.building import Outcome
from vllm_deep_gemm_warmup.compiling.kernel import shape_text

from ...real_layers import FP8, load
from .specs import linear_spec

GEMM = "fp8_gemm_nt"
APART = "compiled in this process"
Warm = Callable[[torch.nn.Module], dict[str, Any]]


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

    def warm(model: torch.nn.Module) -> dict[str, Any]:
        caplog_vllm.clear()
        deep_gemm_warmup(model, 1000)
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


def test_an_estimate_beyond_vllm_s_patience_warns() -> None:
    """G33: 300 kernels, a timeout of 600 s."""
    said = describe_work(300, 1, 600)
    line, warns = said
    assert warns
    assert "300 kernels to build, 1 at a time, about 750 s" in line
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in line
    said = describe_work(300, 16, 600)
    assert not said[1]
