"""Decides whether a module is of a class of the base, importing none."""

import sys
from typing import Any


def is_a(thing: Any, defined_in: str, name: str) -> bool:
    """Whether ``thing`` is a ``name`` of the module ``defined_in``, if loaded."""
    loaded = sys.modules.get(defined_in)
    return loaded is not None and isinstance(thing, getattr(loaded, name))
