"""What a warmup takes and touches: little memory, no forward, no other rank."""

import gc
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.distributed import kv_transfer
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.offloader.prefetch import _CpuParamOffloader
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.plan import Registered, make_plan
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    ExpertRouting,
    GemmSpec,
    RowRange,
    ScaleLayout,
)
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

from ...real_layers import FP8, load, make_linear, resident_bytes
from .specs import gemms, grouped_spec

MIB = 1 << 20
LIMIT = 96
# Qwen3-Coder-480B on eight ranks: 20 experts each.
SHAPES = {
    "w13": (5120, 6144, ScaleLayout.ROW_MAJOR),
    "w2": (6144, 2560, ScaleLayout.COLUMN_MAJOR),
}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select DeepGEMM for every row count."""
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    )


@pytest.fixture
def one_gib_free(device: torch.device) -> Iterator[None]:
    """Let PyTorch take one GiB more than the experts' weights, which take one."""
    # What tests before this one left.
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    resident = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction((resident + 2048 * MIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("one_gib_free")
@pytest.mark.parametrize("tokens", [8192, 32768])
@pytest.mark.parametrize("refused", [False, True], ids=["overlapping", "dense"])
@pytest.mark.parametrize("which", SHAPES)
def test_experts_of_160_on_eight_ranks_take_little_memory(
    which: str,
    refused: bool,
    tokens: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G30, G31: stock's output alone is 3.03 GiB for w2 at 32768 tokens."""
    monkeypatch.setenv("STANDIN_GPU_REFUSE_OVERLAP", str(int(refused)))
    n, k, layout = SHAPES[which]
    spec: GemmSpec = grouped_spec(
        n,
        k,
        20,
        rows=RowRange(1, tokens),
        activation_scale=layout,
        routing=ExpertRouting(8, prefix_sum=True),
    )
    weight = torch.empty((20, n, k), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.ones(spec.weight_scale.shape, device=device)
    resident = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)

    backend = Backend(device, read_target(device), ())
    calls, left = backend.run(
        spec, (weight, scale), every_row=False, listener=lambda *_: None
    )
    backend.finish()

    assert torch.cuda.max_memory_allocated(device) - resident <= 256 * MIB
    assert resident_bytes(device) == resident
    failures = [call.failure for call in calls if call.failure]
    if refused:
        assert all("MiB, more than a warmup may take" in text for text in failures)
    else:
        assert not failures
        assert not left


def layer_of(config: Any, device: torch.device, n: int, k: int) -> torch.nn.Module:
    return load(make_linear(config, device, n, k, FP8))


def closing_line(caplog: pytest.LogCaptureFixture) -> str:
    """Return the last line of a warmup that said nothing else."""
    (line,) = {text for text in caplog.messages if "DeepGEMM" in text}
    return line


def test_an_offloaded_layer_is_warmed_from_its_spec(
    vllm_config: Any,
    device: torch.device,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """vLLM's own offloader has moved the weight to the host."""
    caplog_vllm.set_level(logging.INFO, "vllm")
    layer = layer_of(vllm_config, device, 896, 384)
    at_home = make_plan(layer, LIMIT).specs
    _CpuParamOffloader(layer, "weight")
    assert layer.weight.device.type == "cpu"
    assert make_plan(layer, LIMIT).specs == at_home

    deep_gemm_warmup(layer, LIMIT)

    line = closing_line(caplog_vllm)
    assert re.match(r"DeepGEMM warmup complete, [1-9]\d* kernels built, ", line)


def test_a_warmup_meets_no_forward_no_other_rank_and_no_connector(
    vllm_config: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    """G28; G29: the closing line clears it of what fails later."""

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("touched")

    caplog_vllm.set_level(logging.INFO, "vllm")
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    layer = layer_of(vllm_config, device, 960, 384)
    monkeypatch.setattr(type(layer), "forward", touched)
    for name in ("barrier", "all_reduce", "broadcast", "all_gather", "send", "recv"):
        monkeypatch.setattr(torch.distributed, name, touched)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", touched)
    before = resident_bytes(device)

    deep_gemm_warmup(torch.nn.ModuleList([layer]), LIMIT)

    line = closing_line(caplog_vllm)
    assert line.startswith("DeepGEMM warmup complete, ")
    assert line.endswith(" s (1 layers, 1 shapes)")
    assert resident_bytes(device) == before


def test_the_walk_imports_no_model(vllm_config: Any, device: torch.device) -> None:
    """G10: what nobody has loaded, no module can be of."""
    layer = layer_of(vllm_config, device, 256, 128)
    before = set(sys.modules)

    make_plan(torch.nn.ModuleList([layer, torch.nn.Linear(8, 8)]), LIMIT)

    assert not [name for name in set(sys.modules) - before if ".models." in name]


def test_an_encoder_has_more_rows_than_a_step(
    vllm_config: Any, device: torch.device
) -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.visual = torch.nn.ModuleList([layer_of(vllm_config, device, 256, 128)])
            self.visual_proj = layer_of(vllm_config, device, 512, 128)

        def get_mm_mapping(self) -> MultiModelKeys:
            return MultiModelKeys.from_string_field(
                language_model="visual_proj", tower_model="visual."
            )

    plan = make_plan(Model(), LIMIT)

    assert len(plan.select(Registered)) == 2
    ends = {spec.n: spec.rows.last for spec in gemms(plan.specs)}
    assert ends == {256: 65536, 512: LIMIT}


def test_an_encoder_that_vllm_marks_as_one_has_more_rows_than_a_step(
    vllm_config: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kimi-VL, Step3-VL and others that have no ``get_mm_mapping``."""
    monkeypatch.setattr(
        vllm_config.model_config, "multimodal_config", MultiModalConfig()
    )

    class Model(torch.nn.Module, SupportsMultiModal):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with self._mark_tower_model(vllm_config, "image"):
                self.vision = torch.nn.ModuleList(
                    [layer_of(vllm_config, device, 256, 128)]
                )
            self.vision_free = layer_of(vllm_config, device, 512, 128)

    plan = make_plan(Model(), LIMIT)

    ends = {spec.n: spec.rows.last for spec in gemms(plan.specs)}
    assert ends == {256: 65536, 512: LIMIT}
