"""Decides how the base's own `deep_gemm_warmup.py` is had (as `dpkg-divert` does).

Only that file: its Blackwell MegaMoE warmup is not ours to rewrite. A diverted
`deep_gemm.py` would register its torch op twice, and a diverted
`BlockScaledMMLinearKernel.py` would bring classes that are not ours.
"""

import importlib
from types import ModuleType

from .overlay import DIVERTED_NAME


def base_deep_gemm_warmup() -> ModuleType:
    """Import the base's file as a sibling module of the same package.

    The finder answers for the name, so relative imports, reload, pickling and
    `inspect.getsource` work, and two threads get one module.

    Raises:
        ModuleNotFoundError: the finder is not active in this process.

    """
    return importlib.import_module(DIVERTED_NAME)
