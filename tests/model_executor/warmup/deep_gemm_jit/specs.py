"""Specs for tests: they name what matters to them, the rest is a real layer's."""

from collections.abc import Iterable
from typing import Any

from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EinsumSpec,
    EntryPoint,
    ExpertRouting,
    FusedMoeSpec,
    GemmSpec,
    HcPrenormSpec,
    MaskedSpec,
    MqaLogitsSpec,
    PagedMqaLogitsSpec,
    PagedMqaMetadataSpec,
    RowRange,
    ScaleLayout,
    Spec,
    SplitRule,
    TensorLayout,
)


def linear_spec(n: int = 576, k: int = 7168, **fields: Any) -> GemmSpec:
    """A plain GEMM's spec under the dynamic wrapper; ``fields`` are any others."""
    rows, columns = -(-n // 128), k // 128
    given: dict[str, Any] = {
        "entry_point": EntryPoint.FP8_GEMM_NT,
        "groups": 1,
        "rows": RowRange(32, 8192),
        "weight_scale": TensorLayout((rows, columns), (columns, 1), "float32"),
        "activation_scale": ScaleLayout.COLUMN_MAJOR,
        "ue8m0_cast": True,
    }
    return GemmSpec(n=n, k=k, **given | fields)


def grouped_spec(
    n: int = 576, k: int = 7168, groups: int = 16, **fields: Any
) -> GemmSpec:
    """A grouped contiguous GEMM's spec; ``fields`` are any others."""
    rows, columns = -(-n // 128), k // 128
    given: dict[str, Any] = {
        "entry_point": EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS,
        "groups": groups,
        "weight_scale": TensorLayout(
            (groups, rows, columns), (rows * columns, columns, 1), "float32"
        ),
        "routing": ExpertRouting(top_k=8, prefix_sum=True),
    }
    return linear_spec(n, k, **given | fields)


def logits_spec(**fields: Any) -> MqaLogitsSpec:
    """A prompt's scores by DeepSeek-V3.2's indexer; ``fields`` are any others."""
    given: dict[str, Any] = {
        "entry_point": EntryPoint.FP8_FP4_MQA_LOGITS,
        "heads": 64,
        "head_dim": 128,
        "rows": RowRange(1, 8192),
    }
    return MqaLogitsSpec(**given | fields)


def paged_logits_spec(**fields: Any) -> PagedMqaLogitsSpec:
    """A decode's scores by DeepSeek-V3.2's indexer; ``fields`` are any others."""
    given: dict[str, Any] = {
        "entry_point": EntryPoint.FP8_FP4_PAGED_MQA_LOGITS,
        "heads": 64,
        "head_dim": 128,
        "rows": RowRange(1, 1024),
        "next_n": 1,
        "page": TensorLayout((64, 132), (132, 1), "uint8"),
        "page_stride": 64 * 132,
    }
    return PagedMqaLogitsSpec(**given | fields)


def metadata_spec(**fields: Any) -> PagedMqaMetadataSpec:
    """The metadata of a decode; ``fields`` are any others."""
    given: dict[str, Any] = {
        "entry_point": EntryPoint.GET_PAGED_MQA_LOGITS_METADATA,
        "rows": RowRange(1, 1024),
        "next_n": 1,
        "page_states": 64,
    }
    return PagedMqaMetadataSpec(**given | fields)


def einsum_spec(groups: int, n: int, k: int, limit: int) -> EinsumSpec:
    """``fp8_einsum`` as DeepSeek-V4's ``wo_a`` on Hopper."""
    rows, columns = -(-n // 128), k // 128
    return EinsumSpec(
        entry_point=EntryPoint.FP8_EINSUM,
        n=n,
        k=k,
        groups=groups,
        rows=RowRange(1, limit),
        weight_scale=TensorLayout(
            (groups, rows, columns), (rows * columns, columns, 1), "float32"
        ),
        activation_scale=ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED,
        ue8m0_cast=True,
        recipe=(1, 128, 128),
    )


def masked_spec(n: int, k: int, groups: int, capacity: int) -> MaskedSpec:
    """A grouped masked GEMM, every ``expected_m`` that its memory has rows for."""
    rows, columns = -(-n // 128), k // 128
    return MaskedSpec(
        entry_point=EntryPoint.FP8_M_GROUPED_GEMM_NT_MASKED,
        n=n,
        k=k,
        groups=groups,
        rows=RowRange(min(16, capacity), capacity),
        weight_scale=TensorLayout(
            (groups, rows, columns), (rows * columns, columns, 1), "float32"
        ),
        activation_scale=ScaleLayout.COLUMN_MAJOR,
        ue8m0_cast=True,
        capacity=capacity,
    )


def fused_moe_spec(
    hidden: int, width: int, experts: int, **fields: Any
) -> FusedMoeSpec:
    """Gated experts on FlashInfer, one rank of eight; ``fields`` are any others."""
    columns, blocks = hidden // 128, width // 128
    given: dict[str, Any] = {
        "entry_point": EntryPoint.FLASHINFER_CUTLASS_FUSED_MOE,
        "w13_rows": 2 * width,
        "rows": RowRange(1, 8192),
        "w13_scale": TensorLayout(
            (experts, 2 * blocks, columns),
            (2 * blocks * columns, columns, 1),
            "float32",
        ),
        "w2_scale": TensorLayout(
            (experts, columns, blocks), (columns * blocks, blocks, 1), "float32"
        ),
        "activation": "SILU",
        "tp": (0, 1),
        "ep": (3, 8),
    }
    return FusedMoeSpec(hidden=hidden, width=width, experts=experts, **given | fields)


def hc_prenorm_spec(k: int, limit: int, splits: SplitRule) -> HcPrenormSpec:
    """The GEMM of four residual streams, whose projection has 24 rows."""
    return HcPrenormSpec(
        entry_point=EntryPoint.TF32_HC_PRENORM_GEMM,
        n=24,
        k=k,
        rows=RowRange(1, limit),
        splits=splits,
    )


def gemms(specs: Iterable[Spec]) -> list[GemmSpec]:
    """``specs``, all of which have to be GEMMs."""
    found = list(specs)
    gemms = [spec for spec in found if isinstance(spec, GemmSpec)]
    assert gemms == found
    return gemms
