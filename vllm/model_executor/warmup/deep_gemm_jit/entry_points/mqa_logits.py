"""Decides how the scores of a sparse-attention indexer are called."""

import abc
import dataclasses
from typing import TypeVar

import torch
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm.utils.platform_utils import num_compute_units

from ..provider import Weights
from ..spec import MqaLogitsSpec, PagedMqaLogitsSpec, PagedMqaMetadataSpec, Target
from .strategy import OperandsT, Shape, Strategy

# DeepGEMM allocates the scores, float32 (rows, keys), by itself: the more rows a call
# has, the fewer keys it gets.
_SCORE_BYTES = 64 << 20
_MOST_KEYS = 65536
# It wants queries without gaps, so that rows of them cannot lie over each other.
_QUERY_BYTES = 96 << 20
_FLOAT_BYTES = 4
# DeepGEMM 2.8.1 compiles the metadata kernel for a batch rounded up to a warp.
# test_exhaustive.py keeps checking it against the sweep of every batch.
_BATCH_BUCKET = 32

_ScoresSpecT = TypeVar("_ScoresSpecT", bound=MqaLogitsSpec)


@dataclasses.dataclass(frozen=True)
class ScoresShape(Shape):
    """Rows of Q, or requests, and the keys that they are scored against."""

    keys: int


@dataclasses.dataclass(frozen=True)
class PromptOperands:
    """Device memory for the scores of a prompt; see ``MqaLogitsSpec``.

    Attributes:
        q: float8_e4m3fn (rows, heads, head_dim).
        weights: float32 (rows, heads).
        k: float8_e4m3fn (keys, head_dim).
        k_scale: uint8 (keys, 4), as serving's workspace holds it.
        bounds: int32 (rows,), zero: no row has a key, so that nothing is computed.

    """

    q: torch.Tensor
    weights: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    bounds: torch.Tensor


@dataclasses.dataclass(frozen=True)
class DecodeOperands:
    """Device memory for the scores of a decode; see ``PagedMqaLogitsSpec``.

    Attributes:
        q: float8_e4m3fn (batch, next_n, heads, head_dim).
        weights: float32 (batch * next_n, heads).
        cache: uint8 (1, states, 1, width), a block in place of the index cache.
        lengths: int32 (batch, next_n), zero: no request has a key.
        schedule: int32 (slots + 1, 2), zero: no SM has work.

    """

    q: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor
    lengths: torch.Tensor
    schedule: torch.Tensor


@dataclasses.dataclass(frozen=True)
class MetadataOperands:
    """What the metadata of a decode is made of.

    Attributes:
        lengths: int32 (batch, next_n), zero.
        page_states: Keys of one block.
        sm_count: SMs of the device.

    """

    lengths: torch.Tensor
    page_states: int
    sm_count: int


class Scores(Strategy[_ScoresSpecT, ScoresShape, OperandsT]):
    """Scores, whose kernel changes neither with rows nor with keys."""

    takes_strided_rows = False

    def shapes(
        self, spec: _ScoresSpecT, target: Target, *, every_row: bool
    ) -> list[ScoresShape]:
        """Return one call, or for every row count one of few keys and one of many.

        Row counts whose queries alone would take hundreds of MiB are left out.
        """
        first = spec.rows.first
        if not every_row:
            return [ScoresShape(first, self._most_keys(spec, first))]
        room = _QUERY_BYTES // (self._queries(spec) * spec.heads * spec.head_dim)
        last = max(first, min(spec.rows.last, room))
        return [
            ScoresShape(rows, keys)
            for rows in range(first, last + 1)
            for most in (self._most_keys(spec, rows),)
            for keys in sorted({min(rows, most), most})
        ]

    def dense_bytes(self, spec: _ScoresSpecT) -> int:
        # The query, its weights, and two int32 at most beside them.
        query = spec.heads * (spec.head_dim + _FLOAT_BYTES) + 2 * _FLOAT_BYTES
        return self._queries(spec) * query

    @abc.abstractmethod
    def _queries(self, spec: _ScoresSpecT) -> int:
        """Return the rows of Q that one row of ``spec.rows`` stands for."""

    def _most_keys(self, spec: _ScoresSpecT, rows: int) -> int:
        room = _SCORE_BYTES // (_FLOAT_BYTES * rows * self._queries(spec))
        return max(1, min(_MOST_KEYS, room))


class MqaLogits(Scores[MqaLogitsSpec, PromptOperands]):
    """DeepGEMM's ``fp8_fp4_mqa_logits``, for the rows of a prompt."""

    def allocate(
        self,
        spec: MqaLogitsSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> PromptOperands:
        keys = self._most_keys(spec, spec.rows.first)
        query = (max_rows, spec.heads, spec.head_dim)
        with device:
            return PromptOperands(
                q=torch.empty(query, dtype=torch.float8_e4m3fn),
                weights=torch.empty(query[:2], dtype=torch.float32),
                k=torch.empty((keys, spec.head_dim), dtype=torch.float8_e4m3fn),
                k_scale=torch.empty((keys, _FLOAT_BYTES), dtype=torch.uint8),
                bounds=torch.zeros(max_rows, dtype=torch.int32),
            )

    def call(self, operands: PromptOperands, shape: ScoresShape) -> None:
        scale = operands.k_scale[: shape.keys].view(torch.float32).squeeze(-1)
        bounds = operands.bounds[: shape.rows]
        deep_gemm_utils.fp8_fp4_mqa_logits(
            (operands.q[: shape.rows], None),
            (operands.k[: shape.keys], scale),
            operands.weights[: shape.rows],
            bounds,
            bounds,
            shape.keys,
        )

    def _queries(self, spec: MqaLogitsSpec) -> int:
        return 1


class PagedMqaLogits(Scores[PagedMqaLogitsSpec, DecodeOperands]):
    """DeepGEMM's ``fp8_fp4_paged_mqa_logits``, for the requests of a decode.

    ``vllm.utils.deep_gemm._paged_mqa_logits_schedule_slots`` says how long the
    schedule is; DeepGEMM refuses another length, and the sweep fails.
    """

    def allocate(
        self,
        spec: PagedMqaLogitsSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> DecodeOperands:
        query = (max_rows, spec.next_n, spec.heads, spec.head_dim)
        slots = deep_gemm_utils._paged_mqa_logits_schedule_slots(
            num_compute_units(device.index), spec.next_n
        )
        with device:
            page = torch.empty_strided(
                (1, *spec.page.shape),
                (spec.page_stride, *spec.page.stride),
                dtype=torch.uint8,
            )
            return DecodeOperands(
                q=torch.empty(query, dtype=torch.float8_e4m3fn),
                weights=torch.empty(
                    (max_rows * spec.next_n, spec.heads), dtype=torch.float32
                ),
                cache=page.unsqueeze(-2),
                lengths=torch.zeros(query[:2], dtype=torch.int32),
                schedule=torch.zeros((slots + 1, 2), dtype=torch.int32),
            )

    def call(self, operands: DecodeOperands, shape: ScoresShape) -> None:
        q = operands.q[: shape.rows]
        blocks = -(-shape.keys // operands.cache.shape[1])
        deep_gemm_utils.fp8_fp4_paged_mqa_logits(
            (q, None),
            operands.cache,
            operands.weights[: shape.rows * q.shape[1]],
            operands.lengths[: shape.rows],
            operands.lengths.new_zeros((shape.rows, blocks)),
            operands.schedule,
            max_model_len=shape.keys,
        )

    def _queries(self, spec: PagedMqaLogitsSpec) -> int:
        return spec.next_n


class PagedMqaMetadata(Strategy[PagedMqaMetadataSpec, Shape, MetadataOperands]):
    """DeepGEMM's ``get_paged_mqa_logits_metadata``: a kernel for 32 batch sizes."""

    takes_strided_rows = False

    def shapes(
        self, spec: PagedMqaMetadataSpec, target: Target, *, every_row: bool
    ) -> list[Shape]:
        first, last = spec.rows.first, spec.rows.last
        if every_row:
            return [Shape(rows) for rows in range(first, last + 1)]
        # The last batch of each bucket; of the one that ``last`` is in, ``last``.
        ends = range(-(-first // _BATCH_BUCKET) * _BATCH_BUCKET, last, _BATCH_BUCKET)
        return [Shape(rows) for rows in (*ends, last)]

    def allocate(
        self,
        spec: PagedMqaMetadataSpec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> MetadataOperands:
        return MetadataOperands(
            lengths=torch.zeros(
                (max_rows, spec.next_n), dtype=torch.int32, device=device
            ),
            page_states=spec.page_states,
            sm_count=num_compute_units(device.index),
        )

    def dense_bytes(self, spec: PagedMqaMetadataSpec) -> int:
        return spec.next_n * _FLOAT_BYTES

    def call(self, operands: MetadataOperands, shape: Shape) -> None:
        deep_gemm_utils.get_paged_mqa_logits_metadata(
            operands.lengths[: shape.rows], operands.page_states, operands.sm_count
        )
