"""What a warmup takes and touches: little memory, no forward, no other rank."""

import json
import logging
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
    compute_aligned_M_and_alignment,
)
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.offloader.prefetch import _CpuParamOffloader
from vllm.model_executor.warmup.deep_gemm_jit.plan import Registered, make_plan
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    ExpertRouting,
    RowRange,
    ScaleLayout,
)
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm_deep_gemm_warmup import standin

from ...real_layers import FP8, load, make_experts, make_linear, resident_bytes
from .conftest import Fresh
from .specs import gemms, grouped_spec

MIB, GIB = 1 << 20, 1 << 30
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


def padded_rows(tokens: int) -> int:
    """Return the rows that the base gives to w13 and w2 for so many tokens."""
    total, _ = compute_aligned_M_and_alignment(
        M=tokens,
        num_topk=8,
        local_num_experts=20,
        alignment=128,
        expert_tokens_meta=None,
    )
    return int(total)


@pytest.mark.slow
def test_experts_of_160_on_eight_ranks_are_built_with_one_gib_free(
    fresh: Fresh,
) -> None:
    """G30, G31: stock's output alone is 3.03 GiB for w2 at 32768 tokens."""
    padded = {8192: 68096, 16384: 133632, 32768: 264704}
    assert {tokens: padded_rows(tokens) for tokens in padded} == padded
    outputs = [rows * SHAPES["w2"][0] * 2 / GIB for rows in padded.values()]
    assert [f"{output:.2f}" for output in outputs] == ["0.78", "1.53", "3.03"]
    specs = {
        tokens: [
            grouped_spec(
                n,
                k,
                20,
                rows=RowRange(1, tokens),
                activation_scale=layout,
                routing=ExpertRouting(8, prefix_sum=True),
            )
            for n, k, layout in SHAPES.values()
        ]
        for tokens in padded
    }
    refused = {"STANDIN_GPU_REFUSE_OVERLAP": "1"}

    plenty, *tight = fresh(
        [
            (specs[32768], None, {}),
            *((each, GIB, {}) for each in specs.values()),
            *((each, GIB, refused) for each in specs.values()),
        ]
    )

    kernels = [set(result["built"]) for result in plenty["specs"]]
    assert all(kernels)
    for tokens, case in zip([*padded, *padded], tight, strict=True):
        assert GIB - 4 * MIB <= case["free"] <= GIB
        assert case["peak"] <= 256 * MIB
        assert case["kept"] == 0
        # All of them, on a driver that refuses overlapping rows as well.
        assert [set(result["built"]) for result in case["specs"]] == kernels
        for result in case["specs"]:
            most = min(padded[tokens], 1024 * 128)
            assert result["left"] or max(result["rows"]) >= most
    for case in tight[: len(padded)]:
        assert not any(result["failures"] or result["left"] for result in case["specs"])
    for case in tight[len(padded) :]:
        failures = [text for result in case["specs"] for text in result["failures"]]
        assert failures
        assert all("MiB, more than a warmup may take" in text for text in failures)


def layer_of(config: Any, device: torch.device, n: int, k: int) -> torch.nn.Module:
    return load(make_linear(config, device, n, k, FP8))


def closing_line(caplog: pytest.LogCaptureFixture) -> str:
    """Return the last line of a warmup that warned of nothing; a busy one says more."""
    said = {r.getMessage(): r.levelno for r in caplog.records}
    ours = {text: level for text, level in said.items() if "DeepGEMM" in text}
    assert set(ours.values()) == {logging.INFO}, ours
    (line,) = {text for text in ours if text.startswith("DeepGEMM warmup complete")}
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


@pytest.mark.slow
def test_a_warmup_meets_no_forward_no_other_rank_no_cache_and_no_connector(
    fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G28, of a linear layer, experts and attention; G31: no bytes are left."""
    program = pathlib.Path(__file__).with_name("untouched.py")
    environ = standin.environment("h100", 2, base_env=fake_nvcc_environment)
    environ |= {
        "DG_JIT_CACHE_DIR": str(tmp_path / "cache"),
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
        "VLLM_DEEP_GEMM_WARMUP_STRICT": "1",
        "VLLM_DEEP_GEMM_WARMUP_WORKERS": "2",
    }
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["warned"] == []
        assert rank["left"] == 0
    *_, closing = ranks[0]["said"]
    assert re.match(r"DeepGEMM warmup complete, [1-9]\d* kernels built, ", closing)
    # kv_b_proj, as a layer and for the attention that runs it, both weights of the
    # experts, and the projection.
    assert closing.endswith("(5 layers, 4 shapes)"), closing


def test_a_whole_warmup_takes_little_memory_and_keeps_none(
    vllm_config: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a vocabulary, whose scores of 65536 rows would be 18.5 GiB, and experts."""
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_STRICT", "1")
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm")
    sizes = (16, 2, 1024, 512)
    model = torch.nn.ModuleDict(
        {
            "lm_head": layer_of(vllm_config, device, 151936, 4096),
            "experts": make_experts(
                vllm_config, device, *sizes, FP8, prefix="bounds.experts"
            ),
        }
    )
    held = resident_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)

    deep_gemm_warmup(model, 65536)

    assert torch.cuda.max_memory_allocated(device) - held <= 256 * MIB
    assert resident_bytes(device) == held
    vllm_config.compilation_config.static_forward_context.clear()


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
