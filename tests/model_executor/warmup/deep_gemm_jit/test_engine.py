"""What an engine has loaded beside its model is found, and only that of this engine."""

import copy
import gc
import json
import pathlib
import types
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.model_executor.warmup import kernel_warmup as base
from vllm.model_executor.warmup.deep_gemm_jit.plan import Registered, make_plan
from vllm.model_executor.warmup.deep_gemm_jit.spec import EntryPoint

from ...real_layers import FP8, load, make_experts, make_linear
from .specs import gemms

LIMIT = 96
WRAPPER = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"


def other_engine(config: Any) -> Any:
    """Return an engine's config like ``config``, with a record of its own."""
    other = copy.copy(config)
    other.compilation_config = copy.copy(config.compilation_config)
    other.compilation_config.static_forward_context = {}
    return other


def loaded(config: Any, device: torch.device, n: int, k: int, name: str) -> Any:
    with set_current_vllm_config(config):
        return load(make_linear(config, device, n, k, FP8, prefix=name))


def names(model: torch.nn.Module) -> list[str]:
    plan = make_plan(model, LIMIT)
    return [outcome.name for outcome in plan.select(Registered)]


def target_of(layer: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict({"proj": layer})


@pytest.mark.parametrize("reads_one_more", [False, True])
def test_layers_beside_the_model_are_planned_with_a_drafter_s_rows(
    vllm_config: Any,
    device: torch.device,
    reads_one_more: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculation = types.SimpleNamespace(uses_draft_model=lambda: reads_one_more)
    monkeypatch.setattr(vllm_config, "speculative_config", speculation)
    target = target_of(loaded(vllm_config, device, 256, 128, "layers.0.proj"))
    drafter = target_of(loaded(vllm_config, device, 128, 256, "draft.0.proj"))

    plan = make_plan(target, LIMIT)

    assert names(target) == ["proj", "draft.0.proj"]
    assert names(drafter) == ["proj", "layers.0.proj"]
    ends = {spec.n: spec.rows.last for spec in gemms(plan.specs)}
    more = vllm_config.scheduler_config.max_num_seqs if reads_one_more else 0
    assert ends == {256: LIMIT, 128: LIMIT + more}


def test_experts_of_a_drafter_are_planned(
    vllm_config: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(loaded(vllm_config, device, 256, 128, "layers.0.proj"))
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm")
    experts = make_experts(
        vllm_config, device, 4, 2, 512, 256, FP8, prefix="draft.0.experts"
    )

    plan = make_plan(target, LIMIT)

    grouped = EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS
    assert [s.entry_point for s in plan.specs].count(grouped) == 2
    del experts


def test_a_model_without_fp8_layers_names_its_engine_by_its_config(
    vllm_config: Any, device: torch.device
) -> None:
    """A bf16 target: what vLLM compiles keeps the config as ``vllm_config``."""
    target = torch.nn.Sequential(torch.nn.Linear(8, 8))
    drafter = loaded(vllm_config, device, 128, 256, "draft.0.proj")
    assert names(target) == []

    target[0].vllm_config = vllm_config

    assert names(target) == ["draft.0.proj"]
    del drafter


def test_engines_of_one_process_do_not_mix(
    vllm_config: Any, device: torch.device
) -> None:
    other = other_engine(vllm_config)
    one = target_of(loaded(vllm_config, device, 256, 128, "layers.0.proj"))
    two = target_of(loaded(other, device, 512, 128, "layers.0.proj"))
    drafter = loaded(other, device, 128, 256, "draft.0.proj")

    assert names(one) == ["proj"]
    assert names(two) == ["proj", "draft.0.proj"]
    del drafter


def test_the_record_keeps_no_layer_alive(
    vllm_config: Any, device: torch.device
) -> None:
    target = target_of(loaded(vllm_config, device, 256, 128, "layers.0.proj"))
    drafter = loaded(vllm_config, device, 128, 256, "draft.0.proj")
    assert len(names(target)) == 2

    del drafter
    gc.collect()

    assert names(target) == ["proj"]


# Layers of a drafter that a loader left out


def bypassed(model: torch.nn.Module) -> list[Registered]:
    layers = make_plan(model, LIMIT).select(Registered)
    return [layer for layer in layers if layer.bypassed is not None]


def constructed(config: Any, device: torch.device, n: int, k: int) -> torch.nn.Module:
    """Return a layer as ``--load-format ipc_cache`` leaves it."""
    return make_linear(config, device, n, k, FP8)


@pytest.mark.parametrize("disabled", [WRAPPER, ""], ids=["plain", "wrapper"])
def test_a_drafter_s_layer_that_bypassed_registration_is_found_by_its_kernel(
    vllm_config: Any,
    device: torch.device,
    disabled: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", disabled)
    target = target_of(loaded(vllm_config, device, 256, 128, "layers.0.proj"))
    drafter = constructed(vllm_config, device, 128, 256)

    plan = make_plan(target, LIMIT)
    (found,) = bypassed(target)

    assert "N=128 K=256" in found.name
    assert "process_weights_after_loading did not run" in str(found.bypassed)
    (known,) = make_plan(target_of(drafter), LIMIT).select(Registered)[:1]
    assert found.specs == known.specs
    assert set(found.specs) < set(plan.specs)
    load(drafter)
    assert bypassed(target) == []


def test_layers_of_the_model_are_found_once(
    vllm_config: Any, device: torch.device
) -> None:
    beside = loaded(vllm_config, device, 256, 128, "layers.0.proj")
    (found,) = bypassed(target_of(constructed(vllm_config, device, 512, 128)))
    assert found.name == "proj"
    del beside


def test_a_layer_that_was_dropped_is_no_layer(
    vllm_config: Any, device: torch.device
) -> None:
    """EAGLE3 replaces its first projection by a wider one."""
    target = target_of(loaded(vllm_config, device, 256, 128, "layers.0.proj"))
    gc.disable()
    constructed(vllm_config, device, 128, 256)
    # The kernel that was constructed last is kept until the next one comes.
    loaded(vllm_config, device, 256, 128, "layers.1.proj")
    gc.enable()

    assert bypassed(target) == []


def test_an_encoder_that_is_not_served_is_not_missed(
    vllm_config: Any, device: torch.device
) -> None:
    target = target_of(loaded(vllm_config, device, 256, 128, "layers.0.proj"))
    target.add_module("tower", None)
    hidden = target_of(constructed(vllm_config, device, 128, 256))
    assert len(bypassed(target)) == 1

    target.tower = StageMissingLayer("vision_tower", hidden)

    assert bypassed(target) == []


# The base's own caller


def warm_up(
    model: torch.nn.Module, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call the base's ``kernel_warmup``, whose other warmups are not run.

    G63: with ``enable_jit_warmup=False``, which ``--enforce-eager`` sets and which does
    not reach this warmup in the base either; ``skip`` is the mode without a call.
    """
    for name in vars(base).copy():
        ours = name in ("kernel_warmup", "deep_gemm_warmup")
        if "warmup" in name and callable(getattr(base, name)) and not ours:
            monkeypatch.setattr(base, name, lambda *_, **__: None)
    kernels = types.SimpleNamespace(
        enable_jit_warmup=False,
        enable_cutedsl_warmup=False,
        enable_flashinfer_autotune=False,
    )
    facts = types.SimpleNamespace(
        kernel_config=kernels,
        model_config=config.model_config,
        compilation_config=config.compilation_config,
    )
    runner = types.SimpleNamespace(is_pooling_model=True)
    worker: Any = types.SimpleNamespace(
        use_v2_model_runner=True,
        vllm_config=facts,
        model_runner=runner,
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=LIMIT),
        get_model=lambda: model,
    )
    base.kernel_warmup(worker)


@pytest.mark.parametrize("mode", ["relax", "skip", "unsupported"])
def test_target_and_drafter_are_warmed_by_the_base_s_caller(
    vllm_config: Any,
    device: torch.device,
    mode: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G09: (4096, 4096), and (2048, 4096) in the drafter alone."""
    # FlashInfer's kernel for few rows is minutes of compiling.
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", WRAPPER)
    report = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(report))
    if mode == "unsupported":
        monkeypatch.setattr(base, "is_deep_gemm_supported", lambda: False)
    else:
        monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", mode)
    target = target_of(loaded(vllm_config, device, 4096, 4096, "layers.0.proj"))
    drafter = loaded(vllm_config, device, 2048, 4096, "draft.0.proj")

    warm_up(target, vllm_config, monkeypatch)

    assert report.exists() == (mode == "relax")
    if mode == "relax":
        specs = json.loads(report.read_text())["specs"]
        assert {(spec["n"], tuple(spec["layers"])) for spec in specs} == {
            (4096, ("proj",)),
            (2048, ("draft.0.proj",)),
        }
        assert all(spec["calls"] and not spec["failed"] for spec in specs)
    del drafter
