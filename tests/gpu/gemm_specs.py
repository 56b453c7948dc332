"""Small specs of every entry point, as plans hold them."""

from __future__ import annotations

from typing import Any


def gemm_spec(entry_point: str, groups: int = 1, **fields: Any) -> dict[str, Any]:
    """A spec as JSON, of (256, 512) weights; ``fields`` are any others."""
    plain = entry_point == "fp8_gemm_nt"
    return {
        "entry_point": entry_point,
        "rows": {"first": 1, "last": 40},
        "n": 256,
        "k": 512,
        "groups": groups,
        "weight_scale": {
            "shape": [2, 4] if plain else [groups, 2, 4],
            "stride": [4, 1] if plain else [8, 4, 1],
            "dtype": "float32",
        },
        "activation_scale": "column-major-tma-aligned",
        "ue8m0_cast": True,
        "routing": None,
        **fields,
    }


def grouped_spec(prefix_sum: bool, counted: bool = False) -> dict[str, Any]:
    """Of three experts, two of which a token goes to."""
    routing = {"top_k": 2, "prefix_sum": prefix_sum, "counted": counted}
    return gemm_spec(
        "m_grouped_fp8_gemm_nt_contiguous", 3, routing=routing,
        activation_scale="row-major",
    )  # fmt: skip


HC_PRENORM = {
    "entry_point": "tf32_hc_prenorm_gemm",
    "rows": {"first": 1, "last": 8},
    "n": 24,
    "k": 1024,
    "splits": "compute_num_split",
}
LOGITS = {
    "entry_point": "fp8_fp4_mqa_logits",
    "rows": {"first": 1, "last": 8},
    "heads": 64,
    "head_dim": 128,
}
# Every entry point that is called; calls that take every kernel of them.
GEMMS: tuple[tuple[dict[str, Any], list[dict[str, int]]], ...] = (
    (gemm_spec("fp8_gemm_nt"), [{"rows": 16}, {"rows": 32}, {"rows": 40}]),
    (grouped_spec(True), [{"rows": 512, "alignment": 128}]),
    (grouped_spec(False), [{"rows": 512, "alignment": 128}]),
    (
        gemm_spec("fp8_m_grouped_gemm_nt_masked", 3, capacity=40),
        [{"rows": 40}],
    ),
    (
        gemm_spec("fp8_einsum", 2, recipe=[1, 128, 128]),
        [{"rows": 16}, {"rows": 32}, {"rows": 40}],
    ),
    (HC_PRENORM, [{"rows": 4, "splits": 2}]),
)
