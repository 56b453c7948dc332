"""On the CPU: operands and references agree with GEMMs that are computed in blocks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from . import call_gemms
from .gemm_specs import GEMMS, LOGITS, gemm_spec, grouped_spec

LIMIT = 1e-2
Pair = tuple[torch.Tensor, torch.Tensor]


class Blocks:
    """DeepGEMM's functions on the CPU: a block of 128 columns after the other.

    Args:
        blocks: of K that are summed up; fewer than all are wrong.

    """

    def __init__(self, blocks: int = 1000) -> None:
        self._blocks = blocks
        self.alignment = 128

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def set_mk_alignment_for_contiguous_layout(self, value: int) -> None:
        self.alignment = value

    def fp8_gemm_nt(
        self, a: Pair, b: Pair, d: torch.Tensor, *, disable_ue8m0_cast: bool
    ) -> None:
        total = torch.zeros(d.shape)
        for block in range(min(a[1].shape[-1], self._blocks)):
            columns = slice(block * 128, block * 128 + 128)
            product = a[0][:, columns].float() @ b[0][:, columns].float().T
            rows = b[1][:, block].repeat_interleave(128)[: d.shape[1]]
            total += product * a[1][:, block, None] * rows
        d.copy_(total)

    def m_grouped_fp8_gemm_nt_contiguous(
        self,
        a: Pair,
        b: Pair,
        d: torch.Tensor,
        layout: torch.Tensor,
        *,
        disable_ue8m0_cast: bool,
        use_psum_layout: bool = False,
    ) -> None:
        start, experts = 0, layout.tolist()
        if use_psum_layout:
            experts = [-1] * len(d)
            for group, end in enumerate(layout.tolist()):
                start += -start % self.alignment
                experts[start:end] = [group] * (end - start)
                start = end
        for group in set(experts) - {-1}:
            chosen = torch.tensor([expert == group for expert in experts])
            part = torch.empty(int(chosen.sum()), d.shape[1])
            left = a[0][chosen], a[1][chosen]
            self.fp8_gemm_nt(
                left, (b[0][group], b[1][group]), part, disable_ue8m0_cast=True
            )
            d[chosen] = part.bfloat16()

    def m_grouped_fp8_gemm_nt_masked(
        self,
        a: Pair,
        b: Pair,
        d: torch.Tensor,
        counts: torch.Tensor,
        expected: int,
        *,
        disable_ue8m0_cast: bool,
    ) -> None:
        for group, count in enumerate(counts.tolist()):
            left = a[0][group, :count], a[1][group, :count]
            right = b[0][group], b[1][group]
            self.fp8_gemm_nt(left, right, d[group, :count], disable_ue8m0_cast=True)

    def fp8_einsum(
        self, text: str, a: Pair, b: Pair, d: torch.Tensor, *, recipe: Sequence[int]
    ) -> None:
        assert (text, tuple(recipe)) == ("bhr,hdr->bhd", (1, 128, 128))
        for group in range(d.shape[1]):
            left = a[0][:, group], a[1][:, group]
            right = b[0][group], b[1][group]
            self.fp8_gemm_nt(left, right, d[:, group], disable_ue8m0_cast=True)

    def tf32_hc_prenorm_gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        squares: torch.Tensor,
        splits: int,
    ) -> None:
        columns = a.shape[1] // splits
        for part in range(min(splits, self._blocks)):
            span = slice(part * columns, (part + 1) * columns)
            d[part] = a[:, span].float() @ b[:, span].T
            squares[part] = a[:, span].float().square().sum(-1)


CASES = [
    pytest.param(spec, shape, id=f"{number}-{spec['entry_point']}-{shape['rows']}")
    for number, (spec, shapes) in enumerate(GEMMS)
    for shape in shapes
]


def make(
    spec: Mapping[str, Any], shape: Mapping[str, int], seed: int | None = 0
) -> call_gemms.Call:
    source = call_gemms.Source("cpu", seed)
    weights = call_gemms.make_weights(spec, source) if "weight_scale" in spec else None
    return call_gemms.CALLS[spec["entry_point"]](spec, shape, weights, source)


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_a_right_kernel_is_right_and_a_wrong_one_wrong(
    spec: Mapping[str, Any], shape: Mapping[str, int]
) -> None:
    call = make(spec, shape)
    call.run(Blocks())
    assert call.error() < LIMIT
    wrong = make(spec, shape)
    assert math.isnan(wrong.error())
    wrong.run(Blocks(1))
    assert not wrong.error() < LIMIT


def test_experts_that_are_mixed_up_are_wrong() -> None:
    spec, shape = grouped_spec(True), {"rows": 512, "alignment": 128}
    call = make(spec, shape)

    class MixedUp(Blocks):
        def fp8_gemm_nt(self, a: Pair, b: Pair, d: torch.Tensor, **rest: Any) -> None:
            super().fp8_gemm_nt(a, (b[0].flip(0), b[1].flip(0)), d, **rest)

    call.run(MixedUp())
    assert call.error() > LIMIT


def test_what_is_no_number_is_no_small_error() -> None:
    def pieces() -> Iterator[Pair]:
        yield torch.ones(2), torch.ones(2).double()
        yield torch.full((2,), math.nan), torch.ones(2).double()
        yield torch.ones(2), torch.ones(2).double()

    assert math.isnan(call_gemms.Call(lambda library: None, pieces).error())


@pytest.mark.parametrize(
    ("layout", "rows", "stride"),
    [
        ("row-major", 5, (4, 1)),
        ("column-major", 5, (1, 5)),
        ("column-major-tma-aligned", 5, (1, 8)),
        ("column-major-tma-aligned", 8, (1, 8)),
    ],
)
def test_scales_lie_as_the_spec_says(
    layout: str, rows: int, stride: tuple[int, int]
) -> None:
    scale = torch.rand(rows, 4)
    laid = call_gemms.lay_out(scale, layout)
    assert laid.stride() == stride
    assert torch.equal(laid, scale)


def test_weights_lie_as_the_layer_holds_them() -> None:
    held = {"shape": [3, 2, 4], "stride": [8, 1, 2], "dtype": "float32"}
    spec = gemm_spec("fp8_einsum", 3, weight_scale=held)
    weights = call_gemms.make_weights(spec, call_gemms.Source("cpu", 0))
    values, scale = weights.b
    assert values.shape == (3, 256, 512)
    assert scale.stride() == (8, 1, 2)
    assert torch.equal(scale, weights.scale)


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_blank_operands_are_laid_out_alike_and_no_expert_has_rows(
    spec: Mapping[str, Any], shape: Mapping[str, int]
) -> None:
    seen: list[Any] = []

    class Seen(Blocks):
        def __getattribute__(self, name: str) -> Any:
            if name in call_gemms.CALLS or name.endswith("_masked"):
                return lambda *given, **options: seen.append(given)
            return super().__getattribute__(name)

    for seed in (0, None):
        make(spec, shape, seed).run(Seen())

    def facts(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.shape, value.stride(), value.dtype
        return [facts(v) for v in value] if isinstance(value, tuple) else value

    random, blank = seen
    assert facts(random) == facts(blank)
    if "grouped" in spec["entry_point"]:
        assert not blank[3].any()


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (gemm_spec("fp8_gemm_nt"), [1, 8, 15, 22, 29, 36, 40]),
        (gemm_spec("fp8_m_grouped_gemm_nt_masked", 3), [16, 32, 40]),
        # 2 to 80 rows, and as many blocks begun as experts can have: at most three.
        (grouped_spec(True), [256, 512]),
        (grouped_spec(True, counted=True), [128]),
        (GEMMS[-1][0], []),
    ],
)
def test_a_sweep_is_what_serving_can_send(
    spec: Mapping[str, Any], rows: Sequence[int]
) -> None:
    found = [shape["rows"] for shape in call_gemms.sweep(spec, 7, 128)]
    assert found == list(rows)


def test_what_is_not_called_has_a_reason() -> None:
    packed = gemm_spec("fp8_gemm_nt", activation_scale="packed-ue8m0")
    assert call_gemms.why_not(packed) == "scales of A that are packed-ue8m0"
    assert call_gemms.why_not(LOGITS) == "no reference for it is here"
    assert all(call_gemms.why_not(spec) is None for spec, _ in GEMMS)


def test_a_folder_that_is_no_library_says_what_its_import_raises(
    tmp_path: Path,
) -> None:
    (tmp_path / "__init__.py").write_text("from . import missing")
    with pytest.raises(ImportError, match="missing"):
        call_gemms.load_library(tmp_path)
    assert "deep_gemm" not in sys.modules
