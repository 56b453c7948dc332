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
    SplitRule,
    TensorLayout,
)
from vllm_deep_gemm_warmup import standin

from .specs import (
    einsum_spec,
    grouped_spec,
    hc_prenorm_spec,
    linear_spec,
    logits_spec,
    masked_spec,
    metadata_spec,
    paged_logits_spec,
)

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
    # G11: configurations that a Python model of the wave boundaries missed.
    "G11": (1536, 4096),
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


# (groups, N, K) of wo_a on a rank.
EINSUMS = {
    "G04": (2, 128, 256),
    "DeepSeek-V4-Pro wo_a": (16, 1024, 4096),
    "DeepSeek-V4-Flash wo_a": (8, 1024, 4096),
    "DeepSeek-V4-Flash TP2 wo_a": (4, 1024, 4096),
    "DeepSeek-V4-Flash TP4 wo_a": (2, 1024, 4096),
    "DeepSeek-V4-Flash TP8 wo_a": (1, 1024, 4096),
}
# (N, K, local experts, rows of an expert): DeepEP low-latency, 256 tokens a rank.
BATCHED_EXPERTS = {
    "DeepSeek-V3 EP32 w13": (4096, 7168, 8, 8192),
    "DeepSeek-V3 EP32 w2": (7168, 2048, 8, 8192),
    "DeepSeek-V3 EP32 with 32 redundant w13": (4096, 7168, 9, 8192),
    "DeepSeek-V3 EP32 with 32 redundant w2": (7168, 2048, 9, 8192),
    "Qwen3-235B EP8 w13": (3072, 4096, 16, 2048),
    "Qwen3-235B EP8 w2": (4096, 1536, 16, 2048),
    "one expert": (2048, 768, 1, 256),
    "few rows": (4096, 7168, 32, 8),
}
# (K, how it is split): DeepSeek-V4-Flash, -Pro, their first layers, the delayed path.
HYPER_CONNECTIONS = [
    (k, splits) for k in (4096, 7168, 16384, 28672) for splits in SplitRule
]


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


def expert_cases(
    sms: int, limit: int, *, counted: bool = False, prefix_sum: bool = True
) -> list[Case]:
    """Return a case for each weight of experts, and for up to ``limit`` tokens.

    Without prefix sums, as SwiGLU-Step's experts: an id for each row.
    """
    routing = ExpertRouting(top_k=8, prefix_sum=prefix_sum, counted=counted)
    rows = RowRange(1, limit)
    return [
        Case(
            f"{name}, {routing}",
            grouped_spec(
                n, k, groups, rows=rows, activation_scale=layout, routing=routing
            ),
            sms,
        )
        for name, (n, k, groups, layout) in EXPERTS.items()
    ]


def einsum_cases(names: Iterable[str], sms: int, limit: int) -> list[Case]:
    return [Case(name, einsum_spec(*EINSUMS[name], limit), sms) for name in names]


def batched_expert_cases(names: Iterable[str], sms: int) -> list[Case]:
    return [Case(name, masked_spec(*BATCHED_EXPERTS[name]), sms) for name in names]


def hyper_connection_cases(limit: int) -> list[Case]:
    """The device's own SM count splits K: ``set_num_sms`` does not change it."""
    return [
        Case(f"{splits} of K={k}", hc_prenorm_spec(k, limit, splits), None)
        for k, splits in HYPER_CONNECTIONS
    ]


def context_cases() -> list[Case]:
    """MLA's context chunks: rows beyond a step's, up to the largest workspace."""
    kernel = (513, PLAIN[1])
    return [
        linear_case("DeepSeek-V3 TP8 kv_b", kernel, 65536, sms) for sms in SM_COUNTS
    ]


def encoder_cases(sms: int) -> list[Case]:
    """An encoder's rows, up to the most that it is warmed for, by either kernel."""
    return [
        Case(
            f"encoder N={n} from {first}",
            linear_spec(n, 1024, rows=RowRange(first, 65536), activation_scale=layout),
            sms,
        )
        for n in (128, 512, 576, 1152, 2048)
        for first, layout in (PLAIN, WRAPPER)
    ]


# Index heads, states of a page, and bytes from page to page, of which DeepSeek-V4
# packs others in between.
INDEXERS = {
    "DeepSeek-V3.2": (64, 64, 64 * 132),
    "GLM-5": (32, 64, 64 * 132),
    "DeepSeek-V4": (64, 64, 8640),
    "GLM-5-Next, small pages": (32, 32, 32 * 132),
}


def indexer_cases(name: str, prompt: int, requests: int) -> list[Case]:
    """An indexer's scores and metadata for every depth that SM90 has a kernel for.

    The SM count is the device's: vLLM takes that, and not DeepGEMM's setting, for
    the schedule of a decode.
    """
    heads, states, stride = INDEXERS[name]
    page = TensorLayout((states, 132), (132, 1), "uint8")
    specs: list[Spec] = [logits_spec(heads=heads, rows=RowRange(1, prompt))]
    for next_n in (1, 2, 4):
        # Where a depth has no kernel, its tokens are passed as requests.
        rows = RowRange(1, requests * (4 if next_n == 1 else 1))
        paged = paged_logits_spec(
            heads=heads, rows=rows, next_n=next_n, page=page, page_stride=stride
        )
        specs += [paged, metadata_spec(rows=rows, next_n=next_n, page_states=states)]
    return [Case(f"{name} {spec}", spec, None) for spec in specs]


# One of each kind, for the default run: kernel, SM count, limit, experts, indexer.
FEW = [
    *(linear_case(name, WRAPPER, 8192, 132) for name in DEFAULT),
    *(linear_case(name, PLAIN, 1000, 78) for name in DEFAULT),
    *expert_cases(78, 1000)[:2],
    *indexer_cases("GLM-5", 130, 70),
    *einsum_cases(["G04", "DeepSeek-V4-Flash TP4 wo_a"], 132, 1000),
    *batched_expert_cases(["Qwen3-235B EP8 w13", "one expert"], 132),
    *hyper_connection_cases(1000)[:2],
    *expert_cases(132, 1000, counted=True)[:1],
    *expert_cases(132, 1000, prefix_sum=False)[1:2],
]
ALL = [
    *cases(SHAPES),
    *expert_cases(132, 8192),
    *expert_cases(78, 1000),
    # The tokens of eight ranks.
    *expert_cases(132, 8 * 8192, counted=True),
    *expert_cases(78, 1000, counted=True),
    *context_cases(),
    linear_case("G11", PLAIN, 8192, 132),
]
# Run by hand, since so many tokens take long.
MORE = [
    *expert_cases(78, 8192),
    *expert_cases(132, 8192, prefix_sum=False),
    *expert_cases(78, 8192, prefix_sum=False),
]
OTHER_FUNCTIONS = [
    # G05: irregular prompts up to 10349.
    *einsum_cases(EINSUMS, 132, 10349),
    *einsum_cases(EINSUMS, 78, 10349),
    *batched_expert_cases(BATCHED_EXPERTS, 132),
    *batched_expert_cases(BATCHED_EXPERTS, 78),
    *hyper_connection_cases(8192),
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


@pytest.mark.parametrize(
    ("wanted", "sweep_first"),
    [
        # The other order by default: test_whole.py.
        pytest.param(FEW, False, id="few-missing"),
        pytest.param(FEW, True, id="few-unneeded", marks=pytest.mark.slow),
        pytest.param(ALL, False, id="all-missing", marks=pytest.mark.slow),
        pytest.param(ALL, True, id="all-unneeded", marks=pytest.mark.long),
        pytest.param(MORE, False, id="more-missing", marks=pytest.mark.long),
        pytest.param(MORE, True, id="more-unneeded", marks=pytest.mark.long),
        pytest.param(
            OTHER_FUNCTIONS, False, id="others-missing", marks=pytest.mark.slow
        ),
        pytest.param(
            OTHER_FUNCTIONS, True, id="others-unneeded", marks=pytest.mark.slow
        ),
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


@pytest.mark.slow
@pytest.mark.parametrize("sweep_first", [False, True], ids=["missing", "unneeded"])
@pytest.mark.parametrize("sms", [132, 78])
def test_an_indexer_s_calls_take_the_kernels_of_all_rows_and_batches(
    sms: int,
    sweep_first: bool,
    fake_nvcc_environment: dict[str, str],
    tmp_path: pathlib.Path,
) -> None:
    environ = standin.environment(str(sms), base_env=fake_nvcc_environment)
    wanted = [
        *indexer_cases("DeepSeek-V3.2", 8192, 1024),
        *(case for name in INDEXERS for case in indexer_cases(name, 1000, 100)),
    ]
    results = sweep(wanted, sweep_first=sweep_first, environ=environ, cache=tmp_path)
    assert len(results) == len(wanted)
    for result in results:
        assert result["target"] == f"sm90-{sms}sm"
        assert result["failures"] == [], result["name"]
        assert result["first"], result
        assert result["second"] == [], result


@pytest.mark.parametrize("sweep_first", [False, True], ids=["missing", "unneeded"])
@pytest.mark.slow
def test_hyper_connections_split_by_another_device_s_sm_count(
    sweep_first: bool, fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G04's reporter has 78 SMs."""
    h20 = standin.environment("h20", base_env=fake_nvcc_environment)
    wanted = hyper_connection_cases(8192)
    results = sweep(wanted, sweep_first=sweep_first, environ=h20, cache=tmp_path)
    assert {result["target"] for result in results} == {"sm90-78sm"}
    for result in results:
        assert result["failures"] == result["second"] == [], result["name"]
        assert result["first"], result


@pytest.mark.long
@pytest.mark.parametrize("sweep_first", [False, True], ids=["missing", "unneeded"])
@pytest.mark.parametrize("sms", [132, 78])
def test_the_rows_of_an_encoder_end_where_no_kernel_is_new(
    sms: int,
    sweep_first: bool,
    fake_nvcc_environment: dict[str, str],
    tmp_path: pathlib.Path,
) -> None:
    """``engine.py`` names 33793 rows, and warms up to 65536."""
    wanted = encoder_cases(sms)
    results = sweep(
        wanted,
        sweep_first=sweep_first,
        environ=fake_nvcc_environment,
        cache=tmp_path,
    )
    for case, result in zip(wanted, results, strict=True):
        assert result["failures"] == result["second"] == [], case.name
        assert result["first"], case.name
    if sweep_first:
        last = {
            case.name: r["last_new"] for case, r in zip(wanted, results, strict=True)
        }
        assert max(last.values()) <= 33793, last
        assert last["encoder N=128 from 1"] == {132: 33793, 78: 9985}[sms]


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
