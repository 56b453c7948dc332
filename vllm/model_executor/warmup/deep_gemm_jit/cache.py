"""Decides what in DeepGEMM's cache folder counts as a kernel."""

import os
import pathlib
from collections.abc import Mapping

_VARIABLE = "DG_JIT_CACHE_DIR"
_COMMITTED = ".committed"


def cache_folder(environ: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """Return the folder that DeepGEMM 2.8.1 puts entries into, if one is set.

    vLLM sets the variable before it imports the library.
    """
    root = environ.get(_VARIABLE)
    return pathlib.Path(root) / "cache" if root else None


def entries(folder: pathlib.Path | None) -> frozenset[str]:
    """Return the names, ``<kernel>.<hash>``, of the committed entries."""
    if folder is None:
        return frozenset()
    try:
        with os.scandir(folder) as found:
            return frozenset(
                entry.name
                for entry in found
                if pathlib.Path(entry.path, _COMMITTED).exists()
            )
    except FileNotFoundError:
        return frozenset()
