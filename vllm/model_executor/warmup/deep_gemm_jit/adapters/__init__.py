"""Decides who speaks for modules that do not say themselves what they run.

Each adapter fills the provider's contract for code of the base that does not
register itself yet, and goes when that code does.
"""

from collections.abc import Callable, Sequence

import torch

from ..provider import WarmupProvider
from . import batched_experts, experts, flashinfer_experts, indexer, mhc, mla

# One function a file: the providers that speak for a module, none if it is not one
# of theirs. They import no model: a class that nobody has loaded cannot be in it.
_ADAPTERS: Sequence[Callable[[torch.nn.Module], list[WarmupProvider]]] = (
    experts.adapt,
    indexer.adapt,
    batched_experts.adapt,
    mhc.adapt,
    flashinfer_experts.adapt,
    mla.adapt,
)


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return the providers that speak for ``module``; none if no adapter fits."""
    return [provider for ask in _ADAPTERS for provider in ask(module)]


def adapt_constructed(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return the providers that know what ``module`` runs before it is loaded."""
    return experts.adapt_constructed(module)
