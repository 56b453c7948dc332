"""Decides what an entry point must know: its calls, their operands, how one is made."""

import abc
import dataclasses
from typing import ClassVar, Generic, TypeVar

import torch

from ..provider import Weights
from ..spec import Spec, Target


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one call passes: rows of A."""

    rows: int


SpecT = TypeVar("SpecT", bound=Spec)
ShapeT = TypeVar("ShapeT", bound=Shape)
OperandsT = TypeVar("OperandsT")


class Strategy(abc.ABC, Generic[SpecT, ShapeT, OperandsT]):
    """How the kernels of one entry point are made to be built.

    Whatever a method raises becomes a row of the report.

    Attributes:
        takes_strided_rows: The function takes rows at any stride, so that those of
            the operands may overlap.
        reads_every_weight: What stands in for a layer's weights is dense even where
            rows overlap.
        in_deep_gemm_cache: Its kernels are entries of DeepGEMM's cache, so that they
            can be found and built by other processes.

    """

    takes_strided_rows: ClassVar[bool] = True
    reads_every_weight: ClassVar[bool] = False
    in_deep_gemm_cache: ClassVar[bool] = True

    @abc.abstractmethod
    def shapes(self, spec: SpecT, target: Target, *, every_row: bool) -> list[ShapeT]:
        """Return the calls that together take every kernel of ``spec``.

        Args:
            spec: What to cover.
            target: What the kernels are built for.
            every_row: Sample nothing.

        """

    @abc.abstractmethod
    def allocate(
        self,
        spec: SpecT,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> OperandsT:
        """Return what ``call`` needs for up to ``max_rows`` rows.

        Args:
            spec: What will be called.
            max_rows: Most rows of one call.
            weights: Of a layer that has this spec.
            device: The CUDA device in use.
            overlapping: Rows lie over each other, so that memory does not grow
                with them.

        """

    @abc.abstractmethod
    def dense_bytes(self, spec: SpecT) -> int:
        """Return the bytes, at most, that a row takes where rows do not overlap."""

    @abc.abstractmethod
    def call(self, operands: OperandsT, shape: ShapeT) -> None:
        """Make one call that takes the kernels that serving's would."""
