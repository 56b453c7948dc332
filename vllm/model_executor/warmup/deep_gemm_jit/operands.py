"""Decides which tensors stand in for serving's when DeepGEMM is called."""

import dataclasses

import torch

from .provider import Weights
from .spec import GemmSpec, ScaleLayout

BLOCK = 128
# TMA descriptors want row strides that are multiples of 16 bytes and 16-byte
# aligned addresses (CUDA driver API, cuTensorMapEncodeTiled).
TMA_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Operands:
    """Device memory for calls of one spec with up to ``max_rows`` rows.

    What DeepGEMM builds depends on shapes, dtypes and strides, not on contents.
    In the overlapping form the rows of A and of D lie ``TMA_BYTES`` apart, over
    each other, so that memory does not grow with N or K times the rows.

    Attributes:
        spec: Whose operands these are.
        max_rows: Most rows of one call.
        weight: B, float8_e4m3fn (N, K) or (groups, N, K).
        weight_scale: Its block scale.
        activation: Flat storage of A, float8_e4m3fn or, where FlashInfer
            quantizes, bfloat16.
        activation_scale: Flat storage of A's scale, zero: packing UE8M0 scales
            checks their sign and mantissa bits.
        output: Flat bfloat16 storage of D.
        grouped_layout: For a grouped GEMM, int32 zeros: with prefix sums no expert
            has rows, without them the first one has all.
        overlapping: Which form this is.

    """

    spec: GemmSpec
    max_rows: int
    weight: torch.Tensor
    weight_scale: torch.Tensor
    activation: torch.Tensor
    activation_scale: torch.Tensor
    output: torch.Tensor
    grouped_layout: torch.Tensor | None
    overlapping: bool

    @property
    def b(self) -> tuple[torch.Tensor, torch.Tensor]:
        """B and its block scale."""
        return self.weight, self.weight_scale

    def a(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (rows, K) and its scale (rows, K / 128) as serving lays it out."""
        k = self.spec.k
        stride = _row_stride(k, self.activation, self.overlapping)
        shape, strides = _scale_layout(self.spec, rows)
        return (
            self.activation.as_strided((rows, k), (stride, 1)),
            self.activation_scale.as_strided(shape, strides),
        )

    def d(self, rows: int) -> torch.Tensor:
        """Return D (rows, N)."""
        n = self.spec.n
        stride = _row_stride(n, self.output, self.overlapping)
        return self.output.as_strided((rows, n), (stride, 1))


def allocate(
    spec: GemmSpec,
    max_rows: int,
    weights: Weights | None,
    device: torch.device,
    *,
    overlapping: bool,
) -> Operands:
    """Allocate operands on ``device``.

    Args:
        spec: What will be called.
        max_rows: Most rows of A in one call.
        weights: The layer's weight and block scale; where they are None, freed or
            on another device, tensors of the same layout take their place.
        device: The CUDA device in use.
        overlapping: See ``Operands``.

    """
    weight, weight_scale = choose_weights(
        spec, weights, device, overlapping=overlapping
    )
    quantized = spec.activation_scale is not ScaleLayout.NONE
    activation = torch.empty(
        0,
        dtype=torch.float8_e4m3fn if quantized else torch.bfloat16,
        device=device,
    )
    output = torch.empty(0, dtype=torch.bfloat16, device=device)
    sizes = [
        (max_rows - 1) * _row_stride(width, tensor, overlapping) + width
        for tensor, width in ((activation, spec.k), (output, spec.n))
    ]
    routing = spec.routing
    return Operands(
        spec=spec,
        max_rows=max_rows,
        weight=weight,
        weight_scale=weight_scale,
        activation=activation.new_empty(sizes[0]),
        activation_scale=torch.zeros(
            _scale_elements(spec, max_rows),
            dtype=_scale_dtype(spec.activation_scale),
            device=device,
        ),
        output=output.new_empty(sizes[1]),
        grouped_layout=None
        if routing is None
        else torch.zeros(
            spec.groups if routing.prefix_sum else max_rows,
            dtype=torch.int32,
            device=device,
        ),
        overlapping=overlapping,
    )


def dense_bytes(spec: GemmSpec) -> int:
    """Return the bytes, at most, of a row of A and D that overlap no other."""
    return 2 * (spec.k + spec.n)


def _row_stride(width: int, tensor: torch.Tensor, overlapping: bool) -> int:
    return TMA_BYTES // tensor.element_size() if overlapping else width


def _scale_dtype(layout: ScaleLayout) -> torch.dtype:
    return torch.int32 if layout is ScaleLayout.PACKED_UE8M0 else torch.float32


def _scale_layout(spec: GemmSpec, rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return shape and strides of A's scale."""
    columns = spec.k // BLOCK
    aligned = -(-rows // 4) * 4
    match spec.activation_scale:
        case ScaleLayout.ROW_MAJOR:
            return (rows, columns), (columns, 1)
        case ScaleLayout.COLUMN_MAJOR:
            return (rows, columns), (1, rows)
        case ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED:
            return (rows, columns), (1, aligned)
        case ScaleLayout.PACKED_UE8M0:
            return (rows, -(-columns // 4)), (1, aligned)
        case ScaleLayout.NONE:
            return (0, 0), (1, 1)


def _scale_elements(spec: GemmSpec, max_rows: int) -> int:
    return (max_rows + 3) * (spec.k // BLOCK)


def choose_weights(
    spec: GemmSpec,
    weights: Weights | None,
    device: torch.device,
    *,
    overlapping: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's weight and block scale, or tensors of the same layout.

    Args:
        spec: What will be called.
        weights: Of a layer that has this spec.
        device: The CUDA device in use.
        overlapping: Of what takes their place the rows may overlap, and of the
            weights of a group only the first is read.

    """
    if _are_usable(weights, device):
        assert weights is not None
        weight, weight_scale = weights
        return weight, weight_scale
    return _substitute_weights(spec, device, overlapping)


def dense_substitute_bytes(
    spec: GemmSpec, weights: Weights | None, device: torch.device
) -> int:
    """Return the bytes of what ``choose_weights`` makes where rows may not overlap."""
    return 0 if _are_usable(weights, device) else spec.groups * spec.n * spec.k


def _are_usable(weights: Weights | None, device: torch.device) -> bool:
    return weights is not None and all(is_usable(tensor, device) for tensor in weights)


def is_usable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether the data of ``tensor`` is on ``device``, and neither freed nor moved."""
    return tensor.device == device and tensor.untyped_storage().size() > 0


def _substitute_weights(
    spec: GemmSpec, device: torch.device, overlapping: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and a zero block scale of the spec's layout."""
    scale = torch.empty_strided(
        spec.weight_scale.shape,
        spec.weight_scale.stride,
        dtype=getattr(torch, spec.weight_scale.dtype),
        device=device,
    )
    shape = spec.groups, spec.n, spec.k
    plain = len(spec.weight_scale.shape) == 2
    if not overlapping:
        weight = torch.empty(
            shape[1:] if plain else shape, dtype=torch.float8_e4m3fn, device=device
        )
    elif plain:
        flat = torch.empty(
            (spec.n - 1) * TMA_BYTES + spec.k,
            dtype=torch.float8_e4m3fn,
            device=device,
        )
        weight = flat.as_strided((spec.n, spec.k), (TMA_BYTES, 1))
    else:
        weight = torch.as_tensor(_Stretched(shape, device), device=device).view(
            torch.float8_e4m3fn
        )
    return weight, scale.zero_()


class _Stretched:
    """Memory for the first weight of a group under the shape of the whole group.

    DeepGEMM wants the weights of a group N * K apart (its layout.hpp, 2.8.1), and the
    warmup's calls give rows to the first expert only, or to none: the others are not
    read. PyTorch takes the shape from here and does not ask how much memory there is.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self._first = torch.empty(shape[1:], dtype=torch.uint8, device=device)
        self.__cuda_array_interface__ = {
            **self._first.__cuda_array_interface__,
            "shape": shape,
        }
