"""A kernel that is built after ready is reported with what took it, and counted.

Private names of the base that the monitor relies on are set and called here: when one
of them moves, these tests fail.
"""

import gc
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from vllm.model_executor.warmup.deep_gemm_jit import monitor
from vllm.model_executor.warmup.deep_gemm_jit.jit_config import JitConfig
from vllm.model_executor.warmup.deep_gemm_jit.spec import EntryPoint
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm.utils import jit_monitor
from vllm.v1.worker import workspace
from vllm_deep_gemm_warmup import metrics, node
from vllm_deep_gemm_warmup.kernel_caches import KernelCache, deep_gemm, flashinfer

from ...real_layers import FP8, load, make_experts, run_experts

LIMIT = 64
GRAPHS = JitConfig(warmup=True, eager=False)
EAGER = JitConfig(warmup=False, eager=True)
MakeLinear = Callable[..., torch.nn.Module]
_FLASHINFER = "vllm.model_executor.kernels.linear.scaled_mm.flashinfer"


@pytest.fixture(autouse=True)
def unwatched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[None]:
    """A process that watches nothing yet, and that has a place to count in."""
    deep_gemm_utils._lazy_init()
    monkeypatch.setenv(node.MEETING, str(tmp_path / "meeting"))
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path / "flashinfer"))
    wrapper = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", wrapper)
    for module, name, _, value in monitor._seams():
        # Set even where it is bare: what a test watches is undone.
        monkeypatch.setattr(module, name, getattr(value, "__wrapped__", value))
    yield
    gc.unfreeze()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Start vLLM's monitor, in a mode."""

    def serve(mode: str = "warn") -> None:
        monkeypatch.setattr(jit_monitor, "_active", True)
        monkeypatch.setattr(jit_monitor, "_mode", mode)

    return serve


@pytest.fixture
def counted(tmp_path: pathlib.Path) -> Callable[[str], tuple[float, float]]:
    """Return builds and seconds of an entry point, as a registry shows them."""
    registry = CollectorRegistry()
    registry.register(metrics.BuildCollector(tmp_path / "meeting"))

    def counted(entry_point: str) -> tuple[float, float]:
        builds, seconds = (
            registry.get_sample_value(f"{name}_total", {metrics.LABEL: entry_point})
            for name in (metrics.BUILDS, metrics.SECONDS)
        )
        assert builds is not None
        assert seconds is not None
        return builds, seconds

    return counted


def forward(layer: Any, rows: int) -> None:
    """Run the layer's GEMM as its forward does, after the quantization."""
    kernel = layer.quant_method.fp8_linear
    weight, weight_scale = kernel.get_deep_gemm_warmup_weights(layer)
    columns = weight.shape[1]
    given = torch.empty(rows, columns, dtype=weight.dtype, device="cuda")
    scale = torch.empty(columns // 128, rows, device="cuda").t()
    kernel.apply_block_scaled_mm(given, weight, scale, weight_scale)


def test_the_shape_that_was_not_warmed_is_reported_in_warn_mode(
    linear: MakeLinear,
    serve: Callable[..., None],
    caplog_vllm: pytest.LogCaptureFixture,
    counted: Callable[[str], tuple[float, float]],
) -> None:
    """G62, and G41: the warmed shape builds nothing in a first or a second run."""
    warm = load(linear(768, 1408, FP8))
    deep_gemm_warmup(torch.nn.ModuleDict({"warm": warm}), LIMIT)
    # The warmup would find it in the engine's record.
    cold = load(linear(832, 1408, FP8))
    serve()
    caplog_vllm.clear()
    for _ in range(2):
        for rows in (1, 17, 33, LIMIT):
            forward(warm, rows)
    assert "JIT" not in caplog_vllm.text
    assert counted("fp8_gemm_nt") == (0.0, 0.0)
    for _ in range(2):
        forward(cold, 33)
    # vLLM's logger may reach caplog in two ways.
    (message,) = {
        record.getMessage()
        for record in caplog_vllm.records
        if "JIT" in record.getMessage() and record.levelname == "WARNING"
    }
    assert re.fullmatch(
        r"DeepGEMM kernel JIT compilation during inference: sm90_fp8_gemm_1d2d\.\w+ "
        r"\(fp8_gemm_nt N=832 K=1408 rows=33, \d+\.\d\d s\)\. This causes a .*",
        message,
    )
    builds, seconds = counted("fp8_gemm_nt")
    assert (builds, seconds > 0) == (1.0, True)


def test_the_shape_that_was_not_warmed_ends_the_call_in_error_mode(
    linear: MakeLinear,
    serve: Callable[..., None],
    counted: Callable[[str], tuple[float, float]],
) -> None:
    """G62. It is counted all the same."""
    layer = load(linear(896, 1408, FP8))
    serve("error")
    with pytest.raises(
        monitor.BuiltAfterReadyError, match=r"^DeepGEMM kernel JIT .* N=896 K=1408 rows"
    ):
        forward(layer, 33)
    assert counted("fp8_gemm_nt")[0] == 1.0
    forward(layer, 34)


def test_experts_that_were_not_warmed_end_the_call_in_error_mode(
    vllm_config: Any,
    device: torch.device,
    serve: Callable[..., None],
    counted: Callable[[str], tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G62, of the grouped GEMM of a layer of experts, run through the layer."""
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm")
    workspace.init_workspace_manager(device)
    sizes = 4, 2, 1408, 256
    experts = make_experts(vllm_config, device, *sizes, FP8, prefix="cold.experts")
    monitor.install(GRAPHS)
    serve("error")
    # The first of its two weights; the scale of its tokens may take a kernel as well.
    with pytest.raises(
        monitor.BuiltAfterReadyError,
        match=r"^DeepGEMM kernel JIT .* N=512 K=1408 groups=4 rows",
    ):
        run_experts(vllm_config, device, experts, 1408, 33)
    assert counted("m_grouped_fp8_gemm_nt_contiguous")[0] >= 1.0
    workspace.reset_workspace_manager()


def test_what_is_built_before_ready_is_not_reported(
    linear: MakeLinear,
    caplog_vllm: pytest.LogCaptureFixture,
    counted: Callable[[str], tuple[float, float]],
) -> None:
    """Nor when vLLM captures graphs, for which it freezes the heap as well."""
    layer = load(linear(960, 1408, FP8))
    gc.freeze()
    forward(layer, 33)
    assert "JIT" not in caplog_vllm.text
    assert counted("fp8_gemm_nt") == (0.0, 0.0)


def test_eager_execution_has_no_monitor_of_vllm_and_has_a_warning(
    linear: MakeLinear,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
    counted: Callable[[str], tuple[float, float]],
) -> None:
    monkeypatch.setattr(vllm_config.kernel_config, "enable_jit_warmup", False)
    monkeypatch.setattr(vllm_config.model_config, "enforce_eager", True)
    layer = load(linear(1024, 1408, FP8))
    forward(layer, 33)
    assert "JIT" not in caplog_vllm.text
    gc.freeze()
    forward(layer, 1)
    assert "inference: sm90_fp8_gemm_1d2d." in caplog_vllm.text
    assert "N=1024 K=1408 rows=1," in caplog_vllm.text
    assert counted("fp8_gemm_nt")[0] == 1.0


def test_jit_warmup_switched_off_makes_no_call(
    linear: MakeLinear,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """G63. Not so where vLLM takes it back by itself, for eager execution."""
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    caplog_vllm.set_level("INFO", "vllm")
    calls = []

    def library(*args: Any, **kwargs: Any) -> None:
        calls.append(args)

    monkeypatch.setattr(deep_gemm_utils, "_fp8_gemm_nt_impl", library)
    monkeypatch.setattr(vllm_config.kernel_config, "enable_jit_warmup", False)
    for eager in (False, True):
        monkeypatch.setattr(vllm_config.model_config, "enforce_eager", eager)
        layer = load(linear(256, 1408, FP8))
        assert calls == []
        deep_gemm_warmup(torch.nn.ModuleDict({"proj": layer}), LIMIT)
        assert bool(calls) == eager
    assert "nothing was warmed: kernel_config.enable_jit_warmup is off" in (
        caplog_vllm.text
    )


def publish(cache: KernelCache, name: str) -> None:
    """Add an entry, as a compiler does."""
    (cache.folder / name).mkdir(parents=True)
    (cache.folder / name / cache.marker).touch()


def run_compiler() -> None:
    """Take long, and have had a child that worked, as a call with a compiler has."""
    subprocess.run(["sleep", "0.1"], check=True)


def slow(nanoseconds: int = 2 * monitor._SLOW_NS) -> None:
    time.sleep(nanoseconds / 1e9)


def test_flashinfer_is_watched_where_vllm_calls_it(
    serve: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    caplog_vllm: pytest.LogCaptureFixture,
    counted: Callable[[str], tuple[float, float]],
) -> None:
    """Its module takes minutes to build: its function is one that leaves an entry."""
    cache = flashinfer(tmp_path / "flashinfer")

    def build(**operands: Any) -> torch.Tensor:
        publish(cache, "fp8_gemm_kernel_swapAB")
        run_compiler()
        rows, columns = operands["input"].shape[0], operands["weight"].shape[0]
        return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")

    name = f"{_FLASHINFER}.flashinfer_fp8_blockscale_gemm"
    monkeypatch.setattr(name, build)
    monitor.install(GRAPHS)
    serve()
    operands = torch.empty(5, 128, device="cuda"), torch.empty(64, 128, device="cuda")
    torch.ops.vllm.flashinfer_fp8_blockscale_gemm(*operands, torch.ones(1))
    assert (
        "FlashInfer kernel JIT compilation during inference: fp8_gemm_kernel_swapAB "
        "(flashinfer_fp8_blockscale_gemm N=64 K=128 rows=5, "
    ) in caplog_vllm.text
    assert counted("flashinfer_fp8_blockscale_gemm")[0] == 1.0


def test_a_slow_call_that_built_nothing_is_none_of_ours(
    serve: Callable[..., None],
    tmp_path: pathlib.Path,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """Another process added an entry before, an old one is found late."""
    cache = deep_gemm(tmp_path)
    watched = monitor.watch(run_compiler, "x", monitor.Monitor((cache,), None, GRAPHS))
    publish(cache, "early")
    marker = cache.folder / "early" / cache.marker
    os.utime(marker, ns=(0, time.time_ns() - 10 * monitor._TICK_NS))
    serve()
    watched()
    assert "JIT" not in caplog_vllm.text


def test_what_another_process_builds_during_a_slow_call_is_none_of_ours(
    serve: Callable[..., None],
    tmp_path: pathlib.Path,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """Ranks and engines share the folder; in error mode it would end this one."""
    cache = deep_gemm(tmp_path)

    def call(*, compiles: bool) -> None:
        publish(cache, f"kernel{compiles}")
        run_compiler() if compiles else slow()

    watched = monitor.watch(call, "x", monitor.Monitor((cache,), None, GRAPHS))
    serve("error")
    watched(compiles=False)
    assert "JIT" not in caplog_vllm.text
    with pytest.raises(monitor.BuiltAfterReadyError, match="kernelTrue"):
        watched(compiles=True)


def test_a_quick_call_is_not_looked_at(
    serve: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    cache = deep_gemm(tmp_path)
    watcher = monitor.Monitor((cache,), None, GRAPHS)
    monkeypatch.setattr(watcher, "_compiled", lambda: True)
    watched = monitor.watch(publish, "x", watcher)
    serve()
    watched(cache, "kernel")
    assert "JIT" not in caplog_vllm.text


def test_installing_again_watches_nothing_twice() -> None:
    monitor.install(EAGER)
    before = {(module, name): value for module, name, _, value in monitor._seams()}
    monitor.install(None)
    monitor.install(GRAPHS)
    after = {(module, name): value for module, name, _, value in monitor._seams()}
    assert after == before
    (owner,) = {id(getattr(value, monitor._MARK)) for value in after.values()}
    assert owner
    assert not any(
        hasattr(value.__wrapped__, monitor._MARK) for value in after.values()
    )


def test_dynamo_traces_through_what_is_watched() -> None:
    watched = monitor.watch(torch.add, "x", monitor.Monitor((), None, GRAPHS))
    compiled = torch.compile(watched, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2), 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(33, 128), (64, 128), (33, 64)], "N=64 K=128 rows=33"),
        ([(256, 128), (16, 64, 128)], "N=64 K=128 groups=16 rows=256"),
        ([(512, 1)], "rows=512 (512, 1)"),
        ([(512, 64, 128), (8,)], "rows=512 (512, 64, 128)"),
        ([], "without tensors"),
    ],
)
def test_a_call_is_described_by_its_first_two_tensors(
    shapes: list[tuple[int, ...]], expected: str
) -> None:
    operands: list[Any] = [
        (torch.empty(shape, device="meta"), torch.empty(1)) for shape in shapes
    ]
    assert monitor._describe(["bhr,hdr->bhd", *operands, 3]) == expected


def test_the_private_names_of_the_base_are_there() -> None:
    handler = inspect.signature(jit_monitor._handle_jit_event).parameters
    assert set(handler) == {"backend", "event", "fn_name", "detail"}
    names = {name for _, name, _, _ in monitor._seams()}
    assert {*monitor._FUNCTIONS, "_fp8_gemm_nt_impl"} <= names
    assert set(monitor._HOST_ONLY) <= set(vars(deep_gemm_utils))
    # An engine has loaded the modules that its layers run on.
    for module in monitor._FLASHINFER:
        importlib.import_module(module)
    watched = {entry_point for *_, entry_point, _ in monitor._seams()}
    # A name that no watched function has is one that never counts.
    assert watched >= set(EntryPoint)
    public = {name for name in watched if not name.startswith("flashinfer")}
    assert public <= set(vars(deep_gemm_utils))
