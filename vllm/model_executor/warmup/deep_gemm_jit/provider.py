"""Decides what a kernel must offer so that the warmup can build what it runs."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from .spec import EntryPoint, Spec

PROVIDER_ATTRIBUTE = "deep_gemm_warmup_provider"

# What a layer holds of the operands: of a GEMM the weight (N, K) or (groups, N, K),
# float8_e4m3fn, and its block scale.
Weights = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A layer that the warmup leaves out, and why."""

    reason: str


@runtime_checkable
class WarmupProvider(Protocol):
    """What stands at ``layer.deep_gemm_warmup_provider`` after loading.

    The kernel that will run a layer stamps itself there once the weights are in
    their final form; the last load is the truth. A provider may raise: its
    layer becomes one row of the report and the other layers go on.
    """

    def get_deep_gemm_warmup_weights(self, layer: torch.nn.Module) -> Weights | None:
        """Return what ``layer`` holds, as serving hands it over; None: nothing."""
        ...

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Sequence[Spec] | Rejected:
        """Return what serving will run for ``layer`` with up to ``max_tokens``.

        Must not touch the device, import a model or call DeepGEMM.
        """
        ...


@runtime_checkable
class NamesEntryPoints(Protocol):
    """What a provider also is that knows what it stands for, whatever it answers.

    A layer of it that is left out or cannot be planned is told apart in the report
    from an entry point that a model does not reach.
    """

    def get_deep_gemm_warmup_entry_points(
        self, layer: torch.nn.Module
    ) -> Sequence[EntryPoint]:
        """Return the functions that serving runs, or would run, for ``layer``."""
        ...
