"""Decides what an engine has loaded beside its model, and how many rows parts get.

The base's ``kernel_warmup`` hands over the target model alone (0.33.0): not the
drafter, whose owner it does not name. vLLM itself keeps a record of an engine's
layers, ``static_forward_context`` of its compilation config: target and drafter
share one, two engines of a process have one each. Attention and experts enter
themselves there; block-FP8 linear layers are entered here when they are loaded, and
their kernels when they are constructed, in entries that keep none of them alive.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .adapters.loaded import is_a
from .provider import PROVIDER_ATTRIBUTE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Whoever reads that record takes what it knows by class or by attribute.
_LAYERS = "deep_gemm_warmup.layers"
_KERNELS = "deep_gemm_warmup.kernels"

_ABSENT = ("vllm.model_executor.models.utils", "StageMissingLayer")

# An image has several patches for each of its tokens, so that an encoder's rows are
# more than a step's, and how many is its processor's secret. DeepGEMM 2.8.1 takes its
# last new kernel at 33793 rows for N=128, earlier for a larger N.
_TOWER_ROWS = 1 << 16


def remember(layer: torch.nn.Module) -> None:
    """Enter a layer, once its weights are loaded, in the record of its engine."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None:
        layers = _record(config).setdefault(_LAYERS, weakref.WeakKeyDictionary())
        layers[layer] = None


def expect(kernel: Any, config: "VllmConfig") -> None:
    """Enter a kernel that is constructed: its ``is_loaded`` becomes true, or not."""
    kernels = _record(config).setdefault(_KERNELS, weakref.WeakKeyDictionary())
    kernels[kernel] = None


def unloaded(config: "VllmConfig", but: Sequence[Any]) -> list[Any]:
    """Return the kernels of an engine whose layers were never heard of.

    Args:
        config: Of the engine.
        but: Kernels whose layers are known, or what dispatches to them.

    """

    known = {id(kernel) for kernel in but}

    def left() -> list[Any]:
        kernels = list(_record(config).get(_KERNELS, ()))
        return [
            kernel
            for kernel in kernels
            if not kernel.is_loaded
            and known.isdisjoint((id(kernel), id(kernel.dispatcher)))
        ]

    if left():
        # A layer that was dropped refers to itself (its weight's loader is a method
        # of it), so that its kernel is not gone yet.
        gc.collect()
    return left()


def absent(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that another stands in for: they are not to be loaded.

    Such are the encoders of a model that is served for text alone.
    """
    hidden = vars(module).get("module") if is_a(module, *_ABSENT) else None
    if isinstance(hidden, torch.nn.Module):
        yield from hidden.modules()


def config_of(module: torch.nn.Module) -> "VllmConfig | None":
    """Return the config of the engine that ``module`` says it is of, or None.

    A compiled model keeps it, and so does a block-FP8 kernel. A drafter's may be
    one of its own; the record and the scheduler's part are the engine's all the same.
    """
    from vllm.config import VllmConfig

    for keeper in (module, getattr(module, PROVIDER_ATTRIBUTE, None)):
        config = getattr(keeper, "vllm_config", None)
        if isinstance(config, VllmConfig):
            return config
    return None


def loaded(config: "VllmConfig") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield name and module of whatever the engine's record holds."""
    record = _record(config)
    for layer in list(record.get(_LAYERS, ())):
        yield getattr(layer, "prefix", "") or type(layer).__name__, layer
    for name, entry in list(record.items()):
        if isinstance(entry, torch.nn.Module):
            yield name, entry


def drafter_rows(config: "VllmConfig", max_tokens: int) -> int:
    """Return the most rows of a drafter's step.

    A draft model of its own reads one token more of each request than the target
    (V2's StandaloneARSpeculator, 0.33.0); the others read what the target reads.
    """
    speculation = config.speculative_config
    if speculation is None or not speculation.uses_draft_model():
        return max_tokens
    return max_tokens + config.scheduler_config.max_num_seqs


def towers(model: torch.nn.Module) -> tuple[str, ...]:
    """Return what the names of encoder modules begin with; () without encoders.

    A model can say it by ``get_mm_mapping``; most are constructed within
    ``_mark_tower_model``, which leaves the names of the towers with the model (of
    several such marks, the last one's).
    """
    ask = getattr(model, "get_mm_mapping", None)
    mapped = tuple(ask().tower_model) if callable(ask) else ()
    marked = getattr(model, "_tower_model_names", ())
    return (*mapped, *(f"{name}." for name in marked))


def tower_rows(max_tokens: int) -> int:
    """Return the most rows that an encoder's layers are warmed for."""
    return max(max_tokens, _TOWER_ROWS)


def _record(config: "VllmConfig") -> dict[str, Any]:
    return config.compilation_config.static_forward_context
