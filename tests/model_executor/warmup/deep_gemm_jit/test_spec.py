"""A spec is a value: it survives JSON, compares by content and refuses nonsense."""

import dataclasses
import json
from typing import Any

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EntryPoint,
    ExpertRouting,
    GemmSpec,
    RowRange,
    ScaleLayout,
    Spec,
    SplitRule,
    TensorLayout,
    spec_from_json,
)

from .specs import (
    einsum_spec,
    fused_moe_spec,
    grouped_spec,
    hc_prenorm_spec,
    linear_spec,
    logits_spec,
    masked_spec,
    metadata_spec,
    paged_logits_spec,
)

LINEAR = linear_spec(576, 7168)
GROUPED = grouped_spec(576, 7168)
EINSUM = einsum_spec(2, 1024, 4096, 8192)
MASKED = masked_spec(4096, 7168, 9, 2048)
FUSED = fused_moe_spec(hidden=7168, width=2048, experts=32)
HYPER = hc_prenorm_spec(16384, 8192, SplitRule.BUCKETED)
ANOTHER_VALUE: dict[str, Any] = {
    "entry_point": EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS,
    "n": 640,
    "k": 4096,
    "groups": 2,
    "rows": RowRange(1, 8192),
    "weight_scale": TensorLayout((5, 56), (1, 8), "float32"),
    "activation_scale": ScaleLayout.ROW_MAJOR,
    "ue8m0_cast": False,
    "routing": ExpertRouting(2, False),
}


INDEXER = [logits_spec(), paged_logits_spec(), metadata_spec()]


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (INDEXER[0], "64 heads of 128"),
        (INDEXER[1], "64 heads of 128, next_n 1, pages of 64"),
        (INDEXER[2], "next_n 1, pages of 64"),
    ],
    ids=str,
)
def test_a_message_of_an_indexer_names_what_decides(spec: Spec, shape: str) -> None:
    assert str(spec) == f"{spec.entry_point} {shape}, rows {spec.rows}"


@pytest.mark.parametrize(
    "spec",
    [
        logits_spec(heads=0),
        paged_logits_spec(next_n=0),
        paged_logits_spec(page=TensorLayout((0,), (1,), "uint8")),
        metadata_spec(page_states=0),
        metadata_spec(rows=RowRange(1, 0)),
        fused_moe_spec(hidden=7168, width=2048, experts=0),
    ],
    ids=str,
)
def test_what_cannot_be_built_says_so(spec: Spec) -> None:
    assert spec.problem() is not None


@pytest.mark.parametrize(
    "spec",
    [LINEAR, GROUPED, EINSUM, MASKED, FUSED, HYPER, *INDEXER],
    ids=lambda spec: spec.entry_point,
)
def test_a_spec_survives_json(spec: Spec) -> None:
    back = spec_from_json(json.loads(json.dumps(spec.to_json())))
    assert (type(back), back) == (type(spec), spec)
    assert hash(back) == hash(spec)
    assert spec.problem() is None


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(GemmSpec)])
def test_every_field_tells_two_specs_apart(field: str) -> None:
    other = dataclasses.replace(LINEAR, **{field: ANOTHER_VALUE[field]})
    assert other != LINEAR
    assert len({other, LINEAR}) == 2


def test_a_message_names_entry_point_shape_and_rows() -> None:
    assert str(LINEAR) == "fp8_gemm_nt N=576 K=7168, rows 32..8192"
    assert "16 groups" in str(GROUPED)


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (EINSUM, {"recipe": (1, 1, 128)}),
        (MASKED, {"capacity": 4096}),
        (HYPER, {"splits": SplitRule.EXACT}),
        (HYPER, {"k": 4096}),
    ],
)
def test_what_only_some_specs_have_tells_them_apart(
    spec: Any, change: dict[str, Any]
) -> None:
    assert dataclasses.replace(spec, **change) != spec


def test_no_expert_is_expected_to_have_more_rows_than_memory() -> None:
    problem = dataclasses.replace(MASKED, rows=RowRange(16, 2064)).problem()
    assert problem is not None
    assert "more rows than the 2048" in problem
    assert dataclasses.replace(HYPER, k=0).problem() is not None


def test_a_row_range_starts_at_one_and_can_be_empty() -> None:
    with pytest.raises(ValueError, match="row 1 or later"):
        RowRange(0, 5)
    assert not RowRange(32, 16)


def test_json_of_another_kind_is_refused() -> None:
    value = LINEAR.to_json()
    with pytest.raises(ValueError, match="not_an_entry_point"):
        GemmSpec.from_json({**value, "entry_point": "not_an_entry_point"})
    with pytest.raises(TypeError, match="flavour"):
        GemmSpec.from_json({**value, "flavour": 1})
