"""The sampled rows take exactly the kernels that all rows take.

Asked of DeepGEMM itself: the warmup's calls and a sweep of every M, in both
orders. What the second of them builds is missing from the first.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    ExpertRouting,
    RowRange,
    ScaleLayout,
    Spec,
)
from vllm_deep_gemm_warmup import standin

from .specs import grouped_spec, linear_spec

SWEEP = pathlib.Path(__file__).with_name("sweep.py")
# Neither all multiples of 64 nor all others.
LIMITS = [1000, 8192]
SM_COUNTS = [132, 114, 78]
# Under either kernel: the first row, and the layout of A's scale.
WRAPPER = (32, ScaleLayout.COLUMN_MAJOR)
PLAIN = (1, ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED)


@dataclasses.dataclass(frozen=True)
class Case:
    """A spec to sweep with that many SMs; None: the device's own."""

    name: str
    spec: Spec
    sms: int | None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "spec": self.spec.to_json(), "sms": self.sms}


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
    "Qwen3-30B-A3B w13": (1536, 2048, 128, ScaleLayout.ROW_MAJOR),
    "Qwen3-30B-A3B w2": (2048, 768, 128, ScaleLayout.COLUMN_MAJOR),
    "DeepSeek-V3 TP8 w13": (512, 7168, 256, ScaleLayout.ROW_MAJOR),
    "DeepSeek-V3 TP8 w2": (7168, 256, 256, ScaleLayout.COLUMN_MAJOR),
    "Qwen3-Coder-480B EP8 w13": (5120, 6144, 20, ScaleLayout.ROW_MAJOR),
    "Qwen3-Coder-480B EP8 w2": (6144, 2560, 20, ScaleLayout.COLUMN_MAJOR),
}


def linear_case(
    name: str, kernel: tuple[int, ScaleLayout], limit: int, sms: int | None
) -> Case:
    first, layout = kernel
    rows = RowRange(first, limit)
    spec = linear_spec(*SHAPES[name], rows=rows, activation_scale=layout)
    return Case(f"{name} from {first} to {limit}", spec, sms)


def cases(names: Iterable[str]) -> list[Case]:
    return [
        linear_case(name, kernel, limit, sms)
        for name in names
        for sms in SM_COUNTS
        for kernel in (WRAPPER, PLAIN)
        for limit in LIMITS
    ]


def expert_cases(sms: int, limit: int, *, counted: bool = False) -> list[Case]:
    """Return a case for each weight of experts, and for up to ``limit`` tokens."""
    routing = ExpertRouting(top_k=8, prefix_sum=True, counted=counted)
    rows = RowRange(1, limit)
    return [
        Case(
            f"{name} counted" if counted else name,
            grouped_spec(
                n, k, groups, rows=rows, activation_scale=layout, routing=routing
            ),
            sms,
        )
        for name, (n, k, groups, layout) in EXPERTS.items()
    ]


def context_cases() -> list[Case]:
    """MLA's context chunks: rows beyond a step's, up to the largest workspace."""
    kernel = (513, PLAIN[1])
    return [
        linear_case("DeepSeek-V3 TP8 kv_b", kernel, 65536, sms) for sms in SM_COUNTS
    ]


# One of each kind, for the default run: kernel, SM count, limit, experts.
FEW = [
    *(linear_case(name, WRAPPER, 8192, 132) for name in DEFAULT),
    *(linear_case(name, PLAIN, 1000, 78) for name in DEFAULT),
    *expert_cases(78, 1000)[:2],
    *expert_cases(132, 1000, counted=True)[:1],
]
ALL = [
    *cases(SHAPES),
    *expert_cases(132, 8192),
    *expert_cases(78, 1000),
    # The tokens of eight ranks.
    *expert_cases(132, 8 * 8192, counted=True),
    *expert_cases(78, 1000, counted=True),
    *context_cases(),
]


def sweep(
    cases: list[Case],
    *,
    sweep_first: bool,
    environ: dict[str, str],
    cache: pathlib.Path,
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            str(SWEEP),
            json.dumps(
                {
                    "cases": [case.to_json() for case in cases],
                    "sweep_first": sweep_first,
                }
            ),
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
    wanted: list[Case],
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
    case = linear_case("Qwen3-8B o", WRAPPER, 2048, None)
    (result,) = sweep([case], sweep_first=False, environ=slice_of_60, cache=tmp_path)
    assert result["target"] == "sm90-60sm"
    assert result["failures"] == []
    assert result["second"] == []
    sources = [path.read_text() for path in tmp_path.glob("0/cache/*gemm*/kernel.cu")]
    assert sources
    assert all(re.search(r"\b60\b", text) for text in sources)
    assert not any(re.search(r"\b132\b", text) for text in sources)
