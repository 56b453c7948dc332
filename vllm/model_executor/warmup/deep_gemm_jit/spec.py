"""Decides what a unit of warmup is: one function, one shape, the rows to cover."""

import abc
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Self

# Serving rounds ``expected_m`` up to a multiple of it (``estimate_expected_m`` of the
# base's ``batched_deep_gemm_moe.py``).
EXPECTED_ROWS_STEP = 16


class EntryPoint(enum.StrEnum):
    """Functions that a spec can name: DeepGEMM's, and two of FlashInfer's.

    FlashInfer carries a DeepGEMM of its own, with a compiler and a cache folder
    of its own, which it runs for few rows and for its experts.
    """

    FP8_GEMM_NT = "fp8_gemm_nt"
    M_GROUPED_FP8_GEMM_NT_CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous"
    FP8_M_GROUPED_GEMM_NT_MASKED = "fp8_m_grouped_gemm_nt_masked"
    FP8_EINSUM = "fp8_einsum"
    TF32_HC_PRENORM_GEMM = "tf32_hc_prenorm_gemm"
    FLASHINFER_FP8_BLOCKSCALE_GEMM = "flashinfer_fp8_blockscale_gemm"
    FLASHINFER_CUTLASS_FUSED_MOE = "flashinfer_cutlass_fused_moe"
    FP8_FP4_MQA_LOGITS = "fp8_fp4_mqa_logits"
    FP8_FP4_PAGED_MQA_LOGITS = "fp8_fp4_paged_mqa_logits"
    GET_PAGED_MQA_LOGITS_METADATA = "get_paged_mqa_logits_metadata"


class ScaleLayout(enum.StrEnum):
    """Strides of an activation scale of shape (M, K / 128).

    The layout decides whether DeepGEMM first runs ``transpose_fp32``, a kernel
    of its own with its own compile key.
    """

    ROW_MAJOR = "row-major"
    COLUMN_MAJOR = "column-major"
    COLUMN_MAJOR_TMA_ALIGNED = "column-major-tma-aligned"
    # Blackwell: four UE8M0 exponents in one int32, shape (M, ceil(K / 512)).
    PACKED_UE8M0 = "packed-ue8m0"
    # FlashInfer takes bfloat16 and quantizes by itself.
    NONE = "none"


@dataclasses.dataclass(frozen=True, order=True)
class RowRange:
    """Row counts M that serving can send to a kernel, both ends included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError(f"row range ({self}): it starts at row 1 or later")

    def __bool__(self) -> bool:
        return self.first <= self.last

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"


@dataclasses.dataclass(frozen=True, order=True)
class TensorLayout:
    """Shape, strides (in elements) and dtype name of a tensor, without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise ValueError(
                f"tensor layout (shape {self.shape}, stride {self.stride}): "
                "shape and stride differ in length"
            )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TensorLayout":
        """Return the layout that ``dataclasses.asdict`` made ``value`` of."""
        return cls(tuple(value["shape"]), tuple(value["stride"]), value["dtype"])

    @classmethod
    def of(cls, tensor: Any) -> "TensorLayout":
        """Return the layout of a torch tensor (this module imports no torch)."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
        )


@dataclasses.dataclass(frozen=True, order=True)
class ExpertRouting:
    """How routed tokens become rows of a grouped contiguous GEMM.

    Attributes:
        top_k: Experts that each token is sent to.
        prefix_sum: The rows of each expert are given as int32[groups] ends
            (DeepGEMM's psum layout) and not as one int32 expert id a row.
        counted: The host knows how many tokens each expert got, so that any number
            of full blocks can be the row total.

    """

    top_k: int
    prefix_sum: bool
    counted: bool = False


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Spec(abc.ABC):
    """What one entry point is called with, and for which rows.

    Everything that enters a compile key and is known before a row count is in the
    fields of a subclass, so that equal specs take equal kernels.

    Attributes:
        entry_point: The function that serving calls.
        rows: What serving varies from call to call; the subclass says what it
            counts.

    """

    entry_point: EntryPoint
    rows: RowRange

    @property
    @abc.abstractmethod
    def shape(self) -> str:
        """The fixed part in a few words, such as ``N=576 K=7168``."""

    def problem(self) -> str | None:
        """Return why nothing can be built for this, or None."""
        if _SPEC_OF.get(self.entry_point) is not type(self):
            return f"an entry point that takes no {type(self).__name__} ({self})"
        return None if self.rows else f"a call without rows ({self})"

    def __str__(self) -> str:
        return f"{self.entry_point} {self.shape}, rows {self.rows}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values that ``spec_from_json`` turns into an equal spec."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``; takes lists where JSON made them of tuples.

        Raises:
            KeyError, TypeError, ValueError: A field is missing or is no spec's.

        """
        return cls(
            **{
                **value,
                "entry_point": EntryPoint(value["entry_point"]),
                "rows": RowRange(**value["rows"]),
            }
        )


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class GemmSpec(Spec):
    """One GEMM shape and the rows to cover: D[M, N] = A[M, K] @ B[N, K].T.

    A and B are float8_e4m3fn, D is bfloat16. ``rows`` are the row counts M of a
    plain GEMM, and of a grouped one the numbers of tokens before routing.

    Attributes:
        n: Rows of the weight.
        k: Columns of the weight.
        groups: Local experts; 1 for a plain GEMM.
        weight_scale: The block scale exactly as the layer holds it after
            loading.
        activation_scale: How serving lays out the scale of A.
        ue8m0_cast: Value of DeepGEMM's ``not disable_ue8m0_cast``.
        routing: Set for a grouped GEMM.

    """

    n: int
    k: int
    groups: int
    weight_scale: TensorLayout
    activation_scale: ScaleLayout
    ue8m0_cast: bool
    routing: ExpertRouting | None = None

    @property
    def shape(self) -> str:
        experts = f", {self.groups} groups" if self.groups > 1 else ""
        return f"N={self.n} K={self.k}{experts}"

    def problem(self) -> str | None:
        if min(self.n, self.k, self.groups) < 1:
            return f"a GEMM without rows or columns ({self})"
        return super().problem()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        routing = value["routing"]
        return super().from_json(
            {
                **value,
                "weight_scale": TensorLayout.from_json(value["weight_scale"]),
                "activation_scale": ScaleLayout(value["activation_scale"]),
                "routing": None if routing is None else ExpertRouting(**routing),
            }
        )


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class MqaLogitsSpec(Spec):
    """Scores of a prompt's index queries against the keys of its context.

    Q is float8_e4m3fn (M, heads, head_dim) with its scale folded into the float32
    weights (M, heads); K is float8_e4m3fn (keys, head_dim) with float32 scales.
    ``rows`` are the query rows M.

    Attributes:
        heads: Index heads of a query, with those that serving pads.
        head_dim: Columns of Q and K.

    """

    heads: int
    head_dim: int

    @property
    def shape(self) -> str:
        return f"{self.heads} heads of {self.head_dim}"

    def problem(self) -> str | None:
        if min(self.heads, self.head_dim) < 1:
            return f"scores without heads or columns ({self})"
        return super().problem()


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class PagedMqaLogitsSpec(MqaLogitsSpec):
    """The same scores at a decode, against the pages of the index cache.

    Q is (batch, next_n, heads, head_dim). ``rows`` are batch sizes.

    Attributes:
        next_n: Query rows of one request.
        page: The index cache of one block, uint8 (states, head_dim + 4).
        page_stride: Bytes from one block to the next.

    """

    next_n: int
    page: TensorLayout
    page_stride: int

    @property
    def shape(self) -> str:
        return f"{super().shape}, next_n {self.next_n}, pages of {self.page.shape[0]}"

    def problem(self) -> str | None:
        if self.next_n < 1 or len(self.page.shape) != 2 or min(self.page.shape) < 1:
            return f"a decode without rows or pages ({self.page}, {self.next_n} rows)"
        return super().problem()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        page = TensorLayout.from_json(value["page"])
        return super().from_json({**value, "page": page})


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class PagedMqaMetadataSpec(Spec):
    """How the work of paged scores is spread over SMs.

    ``rows`` are batch sizes: the context lengths are int32 (batch, next_n).

    Attributes:
        next_n: Query rows of one request.
        page_states: Keys of one block.

    """

    next_n: int
    page_states: int

    @property
    def shape(self) -> str:
        return f"next_n {self.next_n}, pages of {self.page_states}"

    def problem(self) -> str | None:
        if min(self.next_n, self.page_states) < 1:
            return f"a decode without rows or pages ({self})"
        return super().problem()


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class EinsumSpec(GemmSpec):
    """``bhr,hdr->bhd``: ``groups`` GEMMs of (N, K) in one call, b rows each.

    Attributes:
        recipe: Rows and columns that share one scale, as serving passes them:
            rows of A, rows of the weight, columns of both.

    """

    recipe: tuple[int, int, int]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        first, second, third = value["recipe"]
        return super().from_json({**value, "recipe": (first, second, third)})


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class MaskedSpec(GemmSpec):
    """A grouped GEMM of which every expert has the same number of rows in memory.

    ``rows`` are values of ``expected_m``, the rows that serving expects an expert to
    have. They decide on the kernel; serving sends every multiple of
    ``EXPECTED_ROWS_STEP`` among them, and their last.

    Attributes:
        capacity: Rows of A and D in memory for each expert.

    """

    capacity: int

    def problem(self) -> str | None:
        if self.rows.last > self.capacity:
            return f"more rows than the {self.capacity} of an expert ({self})"
        return super().problem()


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class FusedMoeSpec(Spec):
    """Both GEMMs of a layer of experts, which FlashInfer's one operator runs.

    Activations are bfloat16 (tokens, hidden), w13 is float8_e4m3fn (experts, w13_rows,
    hidden) and w2 (experts, hidden, width). ``rows`` are numbers of tokens before
    routing: they decide on the kernels, and how many experts a token has does not.

    Attributes:
        hidden: Columns of the activations.
        width: Columns that w2 takes.
        w13_rows: Columns that w13 gives: twice ``width`` where there is a gate.
        experts: Local experts.
        w13_scale: Block scale of w13, as the layer holds it.
        w2_scale: Block scale of w2.
        activation: Name of a ``MoEActivation`` of the base.
        tp: Rank and size of the tensor-parallel group, as serving passes them.
        ep: Rank and size of the expert-parallel group.

    """

    hidden: int
    width: int
    w13_rows: int
    experts: int
    w13_scale: TensorLayout
    w2_scale: TensorLayout
    activation: str
    tp: tuple[int, int]
    ep: tuple[int, int]

    @property
    def shape(self) -> str:
        return f"hidden={self.hidden} width={self.width}, {self.experts} experts"

    def problem(self) -> str | None:
        if min(self.hidden, self.width, self.w13_rows, self.experts) < 1:
            return f"experts without rows or columns ({self})"
        return super().problem()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        tp_rank, tp_size = value["tp"]
        ep_rank, ep_size = value["ep"]
        return super().from_json(
            {
                **value,
                "w13_scale": TensorLayout.from_json(value["w13_scale"]),
                "w2_scale": TensorLayout.from_json(value["w2_scale"]),
                "tp": (tp_rank, tp_size),
                "ep": (ep_rank, ep_size),
            }
        )


class SplitRule(enum.StrEnum):
    """The function of the base that splits K for a number of rows.

    Both are in ``vllm.model_executor.kernels.mhc``.
    """

    EXACT = "compute_num_split"
    BUCKETED = "compute_mhc_pre_num_splits"


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class HcPrenormSpec(Spec):
    """Projection of the hyper-connections: D[M, N] = A[M, K] @ B[N, K].T.

    A is bfloat16, B and D are float32. ``rows`` are the row counts M.

    Attributes:
        n: Rows of B.
        k: Columns of B.
        splits: How K is split for M rows; part of the compile key.

    """

    n: int
    k: int
    splits: SplitRule

    @property
    def shape(self) -> str:
        return f"N={self.n} K={self.k}"

    def problem(self) -> str | None:
        if min(self.n, self.k) < 1:
            return f"a GEMM without rows or columns ({self})"
        return super().problem()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return super().from_json({**value, "splits": SplitRule(value["splits"])})


_SPEC_OF: Mapping[EntryPoint, type[Spec]] = {
    EntryPoint.FP8_GEMM_NT: GemmSpec,
    EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS: GemmSpec,
    EntryPoint.FP8_M_GROUPED_GEMM_NT_MASKED: MaskedSpec,
    EntryPoint.FP8_EINSUM: EinsumSpec,
    EntryPoint.TF32_HC_PRENORM_GEMM: HcPrenormSpec,
    EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: GemmSpec,
    EntryPoint.FLASHINFER_CUTLASS_FUSED_MOE: FusedMoeSpec,
    EntryPoint.FP8_FP4_MQA_LOGITS: MqaLogitsSpec,
    EntryPoint.FP8_FP4_PAGED_MQA_LOGITS: PagedMqaLogitsSpec,
    EntryPoint.GET_PAGED_MQA_LOGITS_METADATA: PagedMqaMetadataSpec,
}


def spec_from_json(value: Mapping[str, Any]) -> Spec:
    """Return the spec that ``value`` was made of by ``to_json``.

    Raises:
        KeyError, TypeError, ValueError: A field is missing or is no spec's.

    """
    return _SPEC_OF[EntryPoint(value["entry_point"])].from_json(value)


@dataclasses.dataclass(frozen=True)
class Target:
    """What the kernels are built for, as read from the device in use.

    Attributes:
        major: Compute capability, major.
        minor: Compute capability, minor.
        sm_count: SMs that DeepGEMM may use; part of every GEMM's compile key.

    """

    major: int
    minor: int
    sm_count: int

    def __str__(self) -> str:
        return f"sm{self.major}{self.minor}-{self.sm_count}sm"
