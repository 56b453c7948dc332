"""Decides what a unit of warmup is: one function, one shape, the rows to cover."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Self


class EntryPoint(enum.StrEnum):
    """Functions that a spec can name: DeepGEMM's, and FlashInfer's one.

    FlashInfer carries a DeepGEMM of its own, with a compiler and a cache folder
    of its own, which it runs for few rows.
    """

    FP8_GEMM_NT = "fp8_gemm_nt"
    M_GROUPED_FP8_GEMM_NT_CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous"
    FLASHINFER_FP8_BLOCKSCALE_GEMM = "flashinfer_fp8_blockscale_gemm"


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
class Spec:
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
    def shape(self) -> str:
        """The fixed part in a few words, such as ``N=576 K=7168``."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """Return why nothing can be built for this, or None."""
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
        scale, routing = value["weight_scale"], value["routing"]
        return super().from_json(
            {
                **value,
                "weight_scale": TensorLayout(
                    tuple(scale["shape"]), tuple(scale["stride"]), scale["dtype"]
                ),
                "activation_scale": ScaleLayout(value["activation_scale"]),
                "routing": None if routing is None else ExpertRouting(**routing),
            }
        )


_SPEC_OF: Mapping[EntryPoint, type[Spec]] = {
    EntryPoint.FP8_GEMM_NT: GemmSpec,
    EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS: GemmSpec,
    EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: GemmSpec,
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
