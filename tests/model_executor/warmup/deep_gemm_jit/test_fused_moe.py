"""FlashInfer's experts are called with the fewest tokens of each class of kernels.

Its module takes hours to build: here its choice of kernels, of its own header, runs,
and test_partial_fused_moe.py makes the calls.
"""

import functools
import importlib.util
import pathlib
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.backend import Backend, read_target
from vllm.model_executor.warmup.deep_gemm_jit.entry_points import STRATEGIES, Shape
from vllm.model_executor.warmup.deep_gemm_jit.entry_points.fused_moe import (
    fewest_tokens,
)
from vllm.model_executor.warmup.deep_gemm_jit.plan import make_plan
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    FusedMoeSpec,
    RowRange,
    Target,
)
from vllm_deep_gemm_warmup.kernel_caches import read_kernel_caches

from ...real_layers import FP8, make_experts
from .specs import fused_moe_spec

H100 = Target(9, 0, 132)
STRATEGY = STRATEGIES[EntryPoint.FLASHINFER_CUTLASS_FUSED_MOE]
# N, K, experts, SMs, most tokens: a line for each number of tokens.
Choose = Callable[[int, int, int, int, int], list[str]]


def _folder_of(package: str) -> pathlib.Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return pathlib.Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def choose(tmp_path_factory: pytest.TempPathFactory) -> Choose:
    data = _folder_of("flashinfer") / "data"
    own = data / "csrc" / "nv_internal"
    program = tmp_path_factory.mktemp("choice") / "choice"
    source = pathlib.Path(__file__).with_name("flashinfer_choice.cpp")
    includes = [
        own / "tensorrt_llm",
        own,
        data / "cutlass" / "include",
        _folder_of("nvidia.cu13") / "include",
    ]
    flags = ["-std=c++17", "-O1", "-w", "-fpermissive"]
    flags += [f"-I{folder}" for folder in includes]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    kernels = own / "tensorrt_llm/kernels/cutlass_kernels/fp8_blockscale_gemm"
    text = (kernels / "fp8_blockscale_gemm_kernel.cuh").read_text()
    ((of_h20, below_there, below),) = re.findall(
        r"m_per_expert_threshold =\s+num_device_sms == (\d+) \? (\d+) : (\d+);", text
    )

    def choose(n: int, k: int, experts: int, sms: int, last: int) -> list[str]:
        swapped_below = below_there if sms == int(of_h20) else below
        numbers = map(str, (n, k, experts, sms, last))
        return subprocess.check_output(
            [program, *numbers, swapped_below], text=True
        ).splitlines()

    return choose


MODELS = [
    pytest.param(7168, 2048),
    pytest.param(2048, 768),
    *(
        pytest.param(*sizes, marks=pytest.mark.slow)
        for sizes in [(4096, 1536), (4096, 14336), (6144, 16384), (5120, 64)]
    ),
]


@pytest.mark.parametrize("sms", [132, 114, 78])
@pytest.mark.parametrize("experts", [1, 2, 3, 4, 8, 9, 16, 20, 32, 64, 128, 256])
@pytest.mark.parametrize(("hidden", "width"), MODELS)
def test_each_class_of_tokens_is_called_once_with_its_fewest(
    hidden: int, width: int, experts: int, sms: int, choose: Choose
) -> None:
    """Against FlashInfer's own choice for every number of tokens."""
    limit = 20000
    pairs = list(
        zip(
            choose(2 * width, hidden, experts, sms, limit),
            choose(hidden, width, experts, sms, limit),
            strict=True,
        )
    )
    assert len(pairs) == limit
    first = {pair: tokens for tokens, pair in reversed(list(enumerate(pairs, 1)))}
    for last in (limit, 100, 40):
        spec = fused_moe_spec(hidden, width, experts, rows=RowRange(1, last))
        wanted = sorted(tokens for tokens in first.values() if tokens <= last)
        assert fewest_tokens(spec, sms) == wanted


def test_every_row_ends_where_no_kernel_is_new() -> None:
    spec = fused_moe_spec(7168, 2048, 32)
    sampled, every = (
        [shape.rows for shape in STRATEGY.shapes(spec, H100, every_row=every_row)]
        for every_row in (False, True)
    )
    assert sampled == fewest_tokens(spec, 132)
    assert every == list(range(1, sampled[-1] + 1))


def test_a_range_that_starts_later_starts_there() -> None:
    spec = fused_moe_spec(7168, 2048, 32, rows=RowRange(20, 40))
    assert fewest_tokens(spec, 132) == [20, 25, 32]


@pytest.fixture
def layer(
    vllm_config: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "flashinfer_cutlass")
    return make_experts(
        vllm_config, device, 4, 2, 512, 256, FP8, prefix="layers.0.experts"
    )


def test_no_module_is_built_for_it(
    layer: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take hours, and the engine's profile run has built it."""
    from flashinfer.fused_moe import core

    def build(*_: Any) -> None:
        pytest.fail("a build was started")

    monkeypatch.setattr(core, "get_cutlass_fused_moe_module", functools.cache(build))
    plan = make_plan(torch.nn.ModuleList([layer]), 96)
    (spec,) = plan.specs
    backend = Backend(device, read_target(device), read_kernel_caches())
    calls, left = backend.run(
        spec, plan.weights[spec], every_row=False, listener=lambda *_: None
    )
    (call,) = calls
    assert "FlashInfer's module of fused experts is not loaded" in str(call.failure)
    assert left == []


@pytest.fixture
def loaded_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the profile run had loaded the module; nothing of it is called."""
    from flashinfer.fused_moe import core

    loader = functools.cache(lambda backend: None)
    loader("90")
    monkeypatch.setattr(core, "get_cutlass_fused_moe_module", loader)


def test_weights_that_were_freed_are_not_replaced(
    loaded_module: None, device: torch.device
) -> None:
    spec = fused_moe_spec(512, 256, 4)
    freed = (torch.empty(0, device=device),) * 4
    for weights in (None, freed):
        with pytest.raises(ValueError, match="freed or moved"):
            STRATEGY.allocate(spec, 1, weights, device, overlapping=False)


def test_the_operator_gets_what_serving_gives_it(
    layer: Any,
    loaded_module: None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its module is not here, so both calls are caught in front of it."""
    from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe
    from vllm.utils import flashinfer

    caught: list[dict[str, Any]] = []
    # Serving took the name when it was imported, we take it at the call.
    for module in (flashinfer_cutlass_moe, flashinfer):
        monkeypatch.setattr(
            module, "flashinfer_cutlass_fused_moe", lambda **given: caught.append(given)
        )
    tokens, top_k = 7, 2
    experts = layer._quant_method.moe_kernel.impl.fused_experts
    # One of several ranks: a rank that is left out shows.
    for name, value in {"tp": (1, 2), "ep": (3, 8)}.items():
        for part, number in zip(("rank", "size"), value, strict=True):
            monkeypatch.setattr(experts, f"{name}_{part}", number)
    routed = layer.routed_experts
    hidden = torch.zeros(tokens, 512, dtype=torch.bfloat16, device=device)
    experts.apply(
        output=torch.empty_like(hidden),
        hidden_states=hidden,
        w1=routed.w13_weight,
        w2=routed.w2_weight,
        topk_weights=torch.zeros(tokens, top_k, device=device),
        topk_ids=torch.zeros(tokens, top_k, dtype=torch.int64, device=device),
        activation=routed.activation,
        global_num_experts=4,
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    plan = make_plan(torch.nn.ModuleList([layer]), 96)
    (spec,) = plan.specs
    assert isinstance(spec, FusedMoeSpec)
    operands = STRATEGY.allocate(
        spec, tokens, plan.weights[spec], device, overlapping=False
    )
    STRATEGY.call(operands, Shape(tokens))
    serving, ours = caught
    # test_partial_fused_moe.py: serving finds the kernels, and less memory is taken.
    assert ours.pop("use_fused_finalize") is False
    for name in serving.keys() | ours.keys():
        assert _described(ours.get(name)) == _described(serving.get(name)), name


def _described(value: Any) -> Any:
    """What of an argument can decide: of a tensor all but its data and its columns."""
    if isinstance(value, list):
        return [_described(each) for each in value]
    if isinstance(value, torch.Tensor):
        where = value.data_ptr() if value.dtype == torch.float8_e4m3fn else None
        return value.dtype, value.ndim, len(value), value.is_contiguous(), where
    return value or None
