"""Decides whether a module is of a class of the base, importing none."""

import sys

import torch


def is_a(module: torch.nn.Module, defined_in: str, name: str) -> bool:
    """Whether ``module`` is a ``name`` of the module ``defined_in``, if loaded."""
    loaded = sys.modules.get(defined_in)
    return loaded is not None and isinstance(module, getattr(loaded, name))
