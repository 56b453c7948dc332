"""Overlapped batches get kernels of their own, for the SMs that are left to them."""

import json
import os
import pathlib
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit import sm_counts
from vllm.model_executor.warmup.deep_gemm_jit.sm_counts import Share, shares
from vllm.model_executor.warmup.deep_gemm_jit.spec import Target
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup
from vllm.utils.deep_gemm import get_num_sms, set_num_sms
from vllm_deep_gemm_warmup import kernel_caches

from ...real_layers import FP8, load, make_linear

H100 = Target(9, 0, 132)
LIMIT = 300


@pytest.fixture
def overlapping(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine's config with dual-batch overlap."""
    monkeypatch.setattr(vllm_config.parallel_config, "enable_dbo", True)
    return vllm_config


def test_a_step_that_is_not_split_has_one_share(vllm_config: Any) -> None:
    assert shares(H100, LIMIT, None) == (Share(H100, LIMIT),)
    assert shares(H100, LIMIT, vllm_config) == (Share(H100, LIMIT),)


@pytest.mark.parametrize(("limit", "most"), [(300, 150), (301, 151)])
def test_overlap_leaves_fewer_sms_to_half_of_the_tokens(
    overlapping: Any, limit: int, most: int
) -> None:
    whole, part = shares(H100, limit, overlapping)
    assert whole == Share(H100, limit)
    assert part == Share(Target(9, 0, 112), most)


def test_the_operator_s_sms_for_communication_count(
    overlapping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DBO_COMM_SMS", "32")
    assert shares(H100, LIMIT, overlapping)[1].target.sm_count == 100
    monkeypatch.setenv("VLLM_DBO_COMM_SMS", "0")
    assert shares(H100, LIMIT, overlapping) == (Share(H100, LIMIT),)


def test_the_sm_count_is_given_back_whatever_happens() -> None:
    before = get_num_sms()
    with pytest.raises(RuntimeError), sm_counts.in_use(Target(9, 0, 112)):
        assert get_num_sms() == 112
        raise RuntimeError
    assert get_num_sms() == before


def entries() -> frozenset[str]:
    root = pathlib.Path(os.environ["DG_JIT_CACHE_DIR"])
    return kernel_caches.deep_gemm(root).entries()


def test_no_step_builds_anything_with_overlap(
    overlapping: Any,
    device: torch.device,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every row count, as a layer sends it, with all SMs and with those left."""
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
    )
    report = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_REPORT", str(report))
    layer = load(make_linear(overlapping, device, 1536, 384, FP8))
    before = entries()

    deep_gemm_warmup(torch.nn.ModuleList([layer]), LIMIT)

    specs = json.loads(report.read_text())["specs"]
    assert {(spec["target"], spec["rows"]["last"]) for spec in specs} == {
        ("sm90-132sm", LIMIT),
        ("sm90-112sm", LIMIT // 2),
    }
    assert any(spec["built"] for spec in specs if spec["target"] == "sm90-112sm")
    warmed = entries()
    assert len(warmed - before) == sum(len(spec["built"]) for spec in specs)
    for sms, most in ((132, LIMIT), (112, LIMIT // 2)):
        set_num_sms(sms)
        for rows in range(1, most + 1):
            layer(torch.ones(rows, 384, dtype=torch.bfloat16, device=device))
    set_num_sms(132)
    assert entries() == warmed
