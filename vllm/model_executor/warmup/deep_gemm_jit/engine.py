"""Decides what an engine has loaded beside its model, and how many rows parts get.

The base's ``kernel_warmup`` hands over the target model alone (0.33.0): not the
drafter, whose owner it does not name. vLLM itself keeps a record of an engine's
layers, ``static_forward_context`` of its compilation config: target and drafter
share one, two engines of a process have one each. Attention and experts enter
themselves there; block-FP8 linear layers are entered here when they are loaded, in one
entry that keeps none of them alive.
"""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .provider import PROVIDER_ATTRIBUTE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Whoever reads that record takes what it knows by class or by attribute.
_LAYERS = "deep_gemm_warmup.layers"

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
    """Return what the names of encoder modules begin with; () without encoders."""
    ask = getattr(model, "get_mm_mapping", None)
    return tuple(ask().tower_model) if callable(ask) else ()


def tower_rows(max_tokens: int) -> int:
    """Return the most rows that an encoder's layers are warmed for."""
    return max(max_tokens, _TOWER_ROWS)


def _record(config: "VllmConfig") -> dict[str, Any]:
    return config.compilation_config.static_forward_context
