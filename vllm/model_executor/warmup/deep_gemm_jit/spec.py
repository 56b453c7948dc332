"""Decides what a unit of warmup is: one GEMM shape with the rows to cover."""

import dataclasses
import enum
from typing import Any


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

    """

    top_k: int
    prefix_sum: bool


@dataclasses.dataclass(frozen=True, order=True)
class GemmSpec:
    """One GEMM shape and the rows to cover: D[M, N] = A[M, K] @ B[N, K].T.

    A and B are float8_e4m3fn, D is bfloat16. Everything that enters DeepGEMM's
    compile key and is known before a row count is here, so that equal specs
    take equal kernels.

    Attributes:
        entry_point: The DeepGEMM function that serving calls.
        n: Rows of the weight.
        k: Columns of the weight.
        groups: Local experts; 1 for a plain GEMM.
        rows: For a plain GEMM the row counts M; for a grouped one the numbers
            of tokens before routing.
        weight_scale: The block scale exactly as the layer holds it after
            loading.
        activation_scale: How serving lays out the scale of A.
        ue8m0_cast: Value of DeepGEMM's ``not disable_ue8m0_cast``.
        routing: Set for a grouped GEMM.

    """

    entry_point: EntryPoint
    n: int
    k: int
    groups: int
    rows: RowRange
    weight_scale: TensorLayout
    activation_scale: ScaleLayout
    ue8m0_cast: bool
    routing: ExpertRouting | None = None

    def __str__(self) -> str:
        experts = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{self.entry_point} N={self.n} K={self.k}{experts}, rows {self.rows}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values that ``from_json`` turns into an equal spec."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "GemmSpec":
        """Inverse of ``to_json``; takes lists where JSON made them of tuples.

        Raises:
            KeyError, TypeError, ValueError: A field is missing or is no spec's.

        """
        scale, routing = value["weight_scale"], value["routing"]
        return cls(
            **{
                **value,
                "entry_point": EntryPoint(value["entry_point"]),
                "rows": RowRange(**value["rows"]),
                "weight_scale": TensorLayout(
                    tuple(scale["shape"]), tuple(scale["stride"]), scale["dtype"]
                ),
                "activation_scale": ScaleLayout(value["activation_scale"]),
                "routing": None if routing is None else ExpertRouting(**routing),
            }
        )


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
