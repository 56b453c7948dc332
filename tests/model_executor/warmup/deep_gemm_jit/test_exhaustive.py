"""The sampled rows take exactly the kernels that all rows take.

Asked of DeepGEMM itself: the warmup's calls and a sweep of every M, in both
orders. What the second of them builds is missing from the first.
"""

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from vllm_deep_gemm_warmup import standin

SWEEP = pathlib.Path(__file__).with_name("sweep.py")
# Neither all multiples of 64 nor all others.
LIMITS = [1000, 8192]
SM_COUNTS = [132, 114, 78]
WRAPPER = {"first": 32, "layout": "column-major"}
PLAIN = {"first": 1, "layout": "column-major-tma-aligned"}

# (N, K) by model and layer; sources: the models' public config.json files.
SHAPES = {
    "Qwen3-0.6B qkv": (4096, 1024),
    "Qwen3-0.6B o": (1024, 2048),
    "Qwen3-0.6B gate_up": (6144, 1024),
    "Qwen3-0.6B down": (1024, 3072),
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B o": (4096, 4096),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
    "Llama-3.1-8B gate_up": (28672, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Llama-3.1-70B TP8 gate_up": (7168, 8192),
    "Llama-3.1-70B TP8 down": (8192, 3584),
    "DeepSeek-V3 fused_qkv_a": (2112, 7168),
    "DeepSeek-V3 kv_a": (576, 7168),
    "DeepSeek-V3 TP8 q_b": (3072, 1536),
    "DeepSeek-V3 TP8 kv_b": (4096, 512),
    "DeepSeek-V3 TP8 o": (7168, 2048),
    "DeepSeek-V3 TP8 shared gate_up": (512, 7168),
    "DeepSeek-V3 TP8 shared down": (7168, 256),
    "DeepSeek-V3 TP8 dense gate_up": (4608, 7168),
    "DeepSeek-V3 TP8 dense down": (7168, 2304),
    "Qwen3-Next shared down TP4": (2048, 128),
}
DEFAULT = ["Qwen3-0.6B qkv", "DeepSeek-V3 kv_a", "Qwen3-Next shared down TP4"]


# The experts' weights; ep_scatter and the activation lay out their scales.
EXPERTS = {
    "Qwen3-30B-A3B w13": (1536, 2048, 128, "row-major"),
    "Qwen3-30B-A3B w2": (2048, 768, 128, "column-major"),
    "DeepSeek-V3 TP8 w13": (512, 7168, 256, "row-major"),
    "DeepSeek-V3 TP8 w2": (7168, 256, 256, "column-major"),
}


def expert_cases() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "n": n,
            "k": k,
            "groups": groups,
            "top_k": 8,
            "first": 1,
            "layout": layout,
            "sms": sms,
            "limit": limit,
        }
        for name, (n, k, groups, layout) in EXPERTS.items()
        for sms, limit in ((132, 8192), (78, 1000))
    ]


def cases(names: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "n": n, "k": k, "sms": sms, "limit": limit, **kernel}
        for name in names
        for n, k in (SHAPES[name],)
        for sms in SM_COUNTS
        for kernel in (WRAPPER, PLAIN)
        for limit in LIMITS
    ]


def context_cases() -> list[dict[str, Any]]:
    """MLA's context chunks: rows beyond a step's, up to the largest workspace."""
    n, k = SHAPES["DeepSeek-V3 TP8 kv_b"]
    kernel = {**PLAIN, "first": 513}
    return [
        {"name": "context", "n": n, "k": k, "sms": sms, "limit": 65536, **kernel}
        for sms in SM_COUNTS
    ]


# One of each kind, for the default run: kernel, SM count, limit, experts.
FEW = [
    case
    for case in cases(DEFAULT)
    if (case["first"], case["sms"], case["limit"]) in {(32, 132, 8192), (1, 78, 1000)}
] + [case for case in expert_cases()[:4] if case["limit"] == 1000]
ALL = cases(SHAPES) + expert_cases() + context_cases()


def sweep(
    cases: list[dict[str, Any]],
    *,
    sweep_first: bool,
    environ: dict[str, str],
    cache: pathlib.Path,
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            str(SWEEP),
            json.dumps({"cases": cases, "sweep_first": sweep_first}),
        ],
        # Its own cache: what another run has built would not be new.
        env={**environ, "DG_JIT_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("sweep_first", [False, True], ids=["missing", "unneeded"])
@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(FEW, id="few"),
        pytest.param(ALL, id="all", marks=pytest.mark.slow),
    ],
)
def test_sampled_rows_and_all_rows_take_the_same_kernels(
    wanted: list[dict[str, Any]],
    sweep_first: bool,
    fake_nvcc_environment: dict[str, str],
    tmp_path: pathlib.Path,
) -> None:
    results = sweep(
        wanted, sweep_first=sweep_first, environ=fake_nvcc_environment, cache=tmp_path
    )
    assert len(results) == len(wanted)
    for result in results:
        assert result["failures"] == [], result["name"]
        assert result["first"], result
        assert result["second"] == [], result


def test_the_sm_count_is_the_device_s_own(
    fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G25: a slice of 60 SMs; no kernel for 132 is built."""
    slice_of_60 = standin.environment("60", base_env=fake_nvcc_environment)
    case = {
        "name": "slice",
        "n": 4096,
        "k": 4096,
        "sms": None,
        "limit": 2048,
        **WRAPPER,
    }
    (result,) = sweep([case], sweep_first=False, environ=slice_of_60, cache=tmp_path)
    assert result["target"] == "sm90-60sm"
    assert result["failures"] == []
    assert result["second"] == []
    sources = [path.read_text() for path in tmp_path.glob("0/cache/*gemm*/kernel.cu")]
    assert sources
    assert all(re.search(r"\b60\b", text) for text in sources)
    assert not any(re.search(r"\b132\b", text) for text in sources)
