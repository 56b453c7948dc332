"""Decoder layers with hyper-connections: the base's classes, only their projections.

Constructing a whole one takes a model of experts on ranks; the proof serves one
(``tests/models/deepseek-v4-flash-base``).
"""

import importlib
from typing import Any

import torch


def hyper_connected(
    module: str,
    name: str,
    device: torch.device,
    hidden: int,
    *,
    first: bool = False,
) -> Any:
    """Return a layer of class ``name`` with four residual streams of ``hidden``."""
    cls = getattr(importlib.import_module(module), name)
    layer: Any = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    for projection in ("hc_attn_fn", "hc_ffn_fn"):
        weight = torch.empty(24, 4 * hidden, device=device)
        setattr(layer, projection, torch.nn.Parameter(weight, requires_grad=False))
    layer.hc_attn_fn_broadcast = (
        torch.empty(24, hidden, device=device) if first else None
    )
    layer.use_sequence_parallel = False
    return layer
