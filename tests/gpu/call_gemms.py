"""Run as a program on a device: make the GEMM calls of a plan, and say what came out.

    call_gemms.py REQUEST ANSWER

Both are files. REQUEST is JSON: `library`, DeepGEMM's folder; `sm_count`; `gemms`, each
with its `spec` and the `shapes` of a plan; `check`, whether operands are random and
results compared; `stride`, between the rows of a sweep, 0 for none. ANSWER gets a line
of JSON for what happened, while it happens, so that a crash leaves what was before it.

It needs torch with CUDA and that folder, and imports nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

BLOCK = 128
# TMA wants columns of float32 padded to so many rows.
ALIGNED_ROWS = 4
LARGEST_FP8 = 448.0
# Rows of an expert in memory, for a masked GEMM: its kernels do not depend on them.
MASKED_ROWS = 128
# Serving rounds `expected_m` up to a multiple of it.
EXPECTED_STEP = 16
# The largest row total of experts that the warmup calls.
MOST_ROWS = 1024 * 128

Shape = Mapping[str, int]
Spec = Mapping[str, Any]
Pieces = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Source:
    """Where operands come from.

    Args:
        device: where they lie.
        seed: of random numbers; None: memory as it is, and no expert has rows.

    """

    def __init__(self, device: str, seed: int | None) -> None:
        self.device = device
        self._random = None
        if seed is not None:
            self._random = torch.Generator(device).manual_seed(seed)

    @property
    def blank(self) -> bool:
        """Whether contents are not to be read."""
        return self._random is None

    def normal(self, *shape: int) -> torch.Tensor:
        """Return float32 (shape)."""
        if self._random is None:
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, generator=self._random, device=self.device)

    def integers(self, low: int, high: int, count: int) -> torch.Tensor:
        """Return int64 (count) from `low` to `high`, both included, on the host."""
        if self._random is None:
            return torch.full((count,), low)
        chosen = torch.randint(
            low, high + 1, (count,), generator=self._random, device=self.device
        )
        return chosen.cpu()

    def rows(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A, float8_e4m3fn (..., K), and its scale, float32 (..., K / 128)."""
        columns = shape[-1] // BLOCK
        if self.blank:
            return self._fp8(*shape), torch.zeros(
                *shape[:-1], columns, device=self.device
            )
        blocks = self.normal(*shape).unflatten(-1, (columns, BLOCK))
        scale = blocks.abs().amax(-1).clamp(1e-6) / LARGEST_FP8
        values = (blocks / scale.unsqueeze(-1)).flatten(-2)
        return values.to(torch.float8_e4m3fn), scale

    def weight(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return B, float8_e4m3fn (N, K), and its scale of 128 x 128 blocks."""
        if self.blank:
            return self._fp8(n, k), torch.zeros(
                -(-n // BLOCK), k // BLOCK, device=self.device
            )
        values = self.normal(n, k)
        padded = torch.nn.functional.pad(values, (0, 0, 0, -n % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)).clamp(1e-6) / LARGEST_FP8
        return (values / spread(scale, n)).to(torch.float8_e4m3fn), scale

    def output(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return memory for a result: what is not written is NaN, and no number."""
        held = torch.empty(shape, dtype=dtype, device=self.device)
        return held if self.blank else held.fill_(math.nan)

    def _fp8(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)


def spread(scale: torch.Tensor, n: int) -> torch.Tensor:
    """Return the scale of 128 x 128 blocks for every element of (N, K)."""
    return scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)


def exact_rows(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return A in float64."""
    return values.double() * scale.double().repeat_interleave(BLOCK, -1)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a spec.

    Attributes:
        values: float8_e4m3fn (groups, N, K).
        scale: float32 (groups, N / 128, K / 128), row by row.
        b: both, as the layer holds them.

    """

    values: torch.Tensor
    scale: torch.Tensor
    b: tuple[torch.Tensor, torch.Tensor]

    def exact(self, group: int) -> torch.Tensor:
        """Return the weight of a group in float64."""
        wide = spread(self.scale[group], self.values.shape[1])
        return self.values[group].double() * wide.double()


def make_weights(spec: Spec, source: Source) -> Weights:
    """Return weights in the layout that the spec says."""
    made = [source.weight(spec["n"], spec["k"]) for _ in range(spec["groups"])]
    values, scale = (torch.stack(list(part)) for part in zip(*made, strict=True))
    layout = spec["weight_scale"]
    held = torch.empty_strided(
        layout["shape"], layout["stride"], dtype=torch.float32, device=source.device
    )
    held.copy_(scale.reshape(layout["shape"]))
    plain = len(layout["shape"]) == 2
    return Weights(values, scale, (values[0] if plain else values, held))


def lay_out(scale: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the scale of A (rows, columns) in one of `ScaleLayout`'s layouts."""
    if layout == "row-major":
        return scale.contiguous()
    rows, columns = scale.shape
    stride = rows
    if layout == "column-major-tma-aligned":
        stride += -rows % ALIGNED_ROWS
    held = scale.new_zeros(columns, stride).mT[:rows]
    return held.copy_(scale)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        run: makes it, with the library.
        pieces: what came out and what is right, in float64, a part at a time.

    """

    run: Callable[[Any], None]
    pieces: Callable[[], Pieces]

    def error(self) -> float:
        """Largest relative error of a part, in the Frobenius norm; may be NaN."""
        errors = [
            ((got.double() - exact).norm() / exact.norm()).item()
            for got, exact in self.pieces()
        ]
        return max(errors, key=lambda error: (math.isnan(error), error))


def plain(spec: Spec, shape: Shape, weights: Weights, source: Source) -> Call:
    """D = A @ B.T of `fp8_gemm_nt`."""
    a, a_scale = source.rows(shape["rows"], spec["k"])
    scale = lay_out(a_scale, spec["activation_scale"])
    d = source.output(shape["rows"], spec["n"])

    def run(library: Any) -> None:
        library.fp8_gemm_nt((a, scale), weights.b, d, **_cast(spec))

    def pieces() -> Pieces:
        yield d, exact_rows(a, a_scale) @ weights.exact(0).T

    return Call(run, pieces)


def grouped(spec: Spec, shape: Shape, weights: Weights, source: Source) -> Call:
    """The tokens of experts, each expert's from a row that `alignment` divides."""
    total, alignment = shape["rows"], shape["alignment"]
    a, a_scale = source.rows(total, spec["k"])
    scale = lay_out(a_scale, spec["activation_scale"])
    d = source.output(total, spec["n"])
    prefix_sum = spec["routing"]["prefix_sum"]
    spans = _spans(spec["groups"], total, alignment, source)
    if prefix_sum:
        layout = torch.tensor([end for _, end in spans], dtype=torch.int32)
    else:
        layout = torch.full((total,), 0 if source.blank else -1, dtype=torch.int32)
        for group, (start, end) in enumerate(spans):
            layout[start:end] = group
    held = layout.to(source.device)
    options = _cast(spec) | ({"use_psum_layout": True} if prefix_sum else {})

    def run(library: Any) -> None:
        before = library.get_mk_alignment_for_contiguous_layout()
        library.set_mk_alignment_for_contiguous_layout(alignment)
        try:
            library.m_grouped_fp8_gemm_nt_contiguous(
                (a, scale), weights.b, d, held, **options
            )
        finally:
            library.set_mk_alignment_for_contiguous_layout(before)

    def pieces() -> Pieces:
        for group, (start, end) in enumerate(spans):
            if end > start:
                left = exact_rows(a[start:end], a_scale[start:end])
                yield d[start:end], left @ weights.exact(group).T

    return Call(run, pieces)


def _spans(
    groups: int, total: int, alignment: int, source: Source
) -> list[tuple[int, int]]:
    """First row of each expert and the row after its last one; blank: none has any."""
    if source.blank:
        return [(0, 0)] * groups
    owners = source.integers(0, groups - 1, total // alignment)
    blocks = torch.bincount(owners, minlength=groups).tolist()
    unused = source.integers(0, alignment - 1, groups).tolist()
    spans, start = [], 0
    for count, rest in zip(blocks, unused, strict=True):
        end = start + count * alignment
        spans.append((start, end - rest if count else start))
        start = end
    return spans


def masked(spec: Spec, shape: Shape, weights: Weights, source: Source) -> Call:
    """As many rows of each expert as the GPU is told; the host expects `rows`."""
    groups, capacity = spec["groups"], spec["capacity"]
    rows = min(capacity, MASKED_ROWS + capacity % ALIGNED_ROWS)
    a, a_scale = source.rows(groups, rows, spec["k"])
    scale = a_scale.mT.contiguous().mT
    d = source.output(groups, rows, spec["n"])
    counts = [0] * groups
    if not source.blank:
        counts = source.integers(1, rows, groups).tolist()
    held = torch.tensor(counts, dtype=torch.int32, device=source.device)

    def run(library: Any) -> None:
        library.m_grouped_fp8_gemm_nt_masked(
            (a, scale), weights.b, d, held, shape["rows"], **_cast(spec)
        )

    def pieces() -> Pieces:
        for group, count in enumerate(counts):
            left = exact_rows(a[group, :count], a_scale[group, :count])
            yield d[group, :count], left @ weights.exact(group).T

    return Call(run, pieces)


def einsum(spec: Spec, shape: Shape, weights: Weights, source: Source) -> Call:
    """`bhr,hdr->bhd`: the rows of one GEMM lie behind those of the one before."""
    groups, rows = spec["groups"], shape["rows"]
    a, a_scale = source.rows(groups, rows, spec["k"])
    aligned = rows + -rows % ALIGNED_ROWS
    held = a_scale.new_zeros(groups, a_scale.shape[-1], aligned)
    scale = held.permute(2, 0, 1)[:rows].copy_(a_scale.transpose(0, 1))
    d = source.output(rows, groups, spec["n"])

    def run(library: Any) -> None:
        library.fp8_einsum(
            "bhr,hdr->bhd", (a.transpose(0, 1), scale), weights.b, d,
            recipe=tuple(spec["recipe"]),
        )  # fmt: skip

    def pieces() -> Pieces:
        for group in range(groups):
            left = exact_rows(a[group], a_scale[group])
            yield d[:, group], left @ weights.exact(group).T

    return Call(run, pieces)


def hc_prenorm(spec: Spec, shape: Shape, weights: None, source: Source) -> Call:
    """Of bfloat16 A and float32 B: A @ B.T and the square sums of A, K in parts."""
    a = source.normal(shape["rows"], spec["k"]).bfloat16()
    b = source.normal(spec["n"], spec["k"])
    parts = shape["splits"], shape["rows"]
    d = source.output(*parts, spec["n"], dtype=torch.float32)
    squares = source.output(*parts, dtype=torch.float32)

    def run(library: Any) -> None:
        library.tf32_hc_prenorm_gemm(a, b, d, squares, shape["splits"])

    def pieces() -> Pieces:
        yield d.double().sum(0), a.double() @ b.double().T
        yield squares.double().sum(0), a.double().square().sum(-1)

    return Call(run, pieces)


CALLS: Mapping[str, Callable[[Spec, Shape, Any, Source], Call]] = {
    "fp8_gemm_nt": plain,
    "m_grouped_fp8_gemm_nt_contiguous": grouped,
    "fp8_m_grouped_gemm_nt_masked": masked,
    "fp8_einsum": einsum,
    "tf32_hc_prenorm_gemm": hc_prenorm,
}
_LAYOUTS = ("row-major", "column-major", "column-major-tma-aligned")


def why_not(spec: Spec) -> str | None:
    """Return why this program makes no call of a spec, or None."""
    if spec["entry_point"] not in CALLS:
        return "no reference for it is here"
    if spec["entry_point"] == "tf32_hc_prenorm_gemm":
        return None
    if spec["activation_scale"] not in _LAYOUTS:
        return f"scales of A that are {spec['activation_scale']}"
    if spec["weight_scale"]["dtype"] != "float32":
        return f"scales of B that are {spec['weight_scale']['dtype']}"
    return None


def sweep(spec: Spec, stride: int, alignment: int) -> Iterator[Shape]:
    """Yield the calls that serving can make, but for a stride.

    Of experts whose tokens are not counted these are the row totals of every number
    of tokens, as vLLM 0.33.0 pads them. How `tf32_hc_prenorm_gemm` splits K is for
    vLLM to say: the plan's calls are all there is.
    """
    first, last = spec["rows"]["first"], spec["rows"]["last"]
    rows = sorted({*range(first, last + 1, stride), last})
    match spec["entry_point"]:
        case "fp8_gemm_nt" | "fp8_einsum":
            yield from ({"rows": count} for count in rows)
        case "fp8_m_grouped_gemm_nt_masked":
            up = {
                min(-(-count // EXPECTED_STEP) * EXPECTED_STEP, last) for count in rows
            }
            yield from ({"rows": count} for count in sorted(up))
        case "m_grouped_fp8_gemm_nt_contiguous":
            for total in _totals(spec, rows, stride, alignment):
                if total <= MOST_ROWS:
                    yield {"rows": total, "alignment": alignment}


def _totals(spec: Spec, tokens: list[int], stride: int, alignment: int) -> list[int]:
    top_k, groups = spec["routing"]["top_k"], spec["groups"]
    if spec["routing"]["counted"]:
        most = tokens[-1] * min(top_k, groups) + groups * (alignment - 1)
        return list(range(alignment, most + 1, alignment * stride))
    routed = [count * top_k for count in tokens]
    padded = [count + min(count, groups) * (alignment - 1) for count in routed]
    return sorted({-(-count // alignment) * alignment for count in padded})


def _cast(spec: Spec) -> dict[str, bool]:
    return {"disable_ue8m0_cast": not spec["ue8m0_cast"]}


def load_library(folder: Path) -> Any:
    """Import DeepGEMM from a folder, whatever package it lies in.

    Raises whatever an import can, if it does not load in this torch.
    """
    spec = importlib.util.spec_from_file_location(
        "deep_gemm", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deep_gemm"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # As an import statement does: the next one shall not find half of it.
        del sys.modules["deep_gemm"]
        raise
    return module


def make_calls(
    library: Any, request: Mapping[str, Any], tell: Callable[..., None]
) -> None:
    """Make every call of a request; a call that fails is told, and the rest goes on."""
    source = Source("cuda", 0 if request["check"] else None)
    blank = Source("cuda", None)
    for number, gemm in enumerate(request["gemms"]):
        spec = gemm["spec"]
        if (reason := why_not(spec)) is not None:
            tell(gemm=number, not_called=reason)
            continue
        make = CALLS[spec["entry_point"]]
        has_weights = "weight_scale" in spec
        weights = make_weights(spec, source) if has_weights else None
        for shape in gemm["shapes"]:
            call = make(spec, shape, weights, source)
            torch.cuda.synchronize()
            start = time.perf_counter()
            failure = _run(call, library)
            seconds = time.perf_counter() - start
            told = {"gemm": number, "shape": shape, "seconds": seconds}
            if failure is not None:
                told["failure"] = failure
            elif request["check"]:
                told["error"] = call.error()
            tell(**told)
        if request["stride"]:
            alignment = library.get_mk_alignment_for_contiguous_layout()
            for shape in sweep(spec, request["stride"], alignment):
                failure = _run(make(spec, shape, weights, blank), library)
                told = {"gemm": number, "shape": shape, "swept": True}
                tell(**told | ({} if failure is None else {"failure": failure}))


def _run(call: Call, library: Any) -> str | None:
    """Make a call and wait for it; why it failed."""
    try:
        call.run(library)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return " ".join(str(error).splitlines()[:2])
    return None


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    with Path(sys.argv[2]).open("w", buffering=1) as answer:

        def tell(**event: Any) -> None:
            answer.write(json.dumps(event) + "\n")

        tell(torch=torch.__version__, cuda=torch.version.cuda)
        try:
            library = load_library(Path(request["library"]))
            library.set_num_sms(request["sm_count"])
        # Border of a process: whatever an import raises is the answer.
        except Exception as error:
            tell(not_loaded=f"{type(error).__name__}: {error}")
            return
        tell(library=library.__version__)
        make_calls(library, request, tell)
        tell(done=True)


if __name__ == "__main__":
    main()
