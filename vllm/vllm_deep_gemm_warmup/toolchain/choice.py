"""Decides whether CUDA_HOME is pointed at a toolkit of pip's, and at which."""

from __future__ import annotations

from pathlib import Path

from .check import describe
from .facts import Facts
from .links import cuda_home_links
from .lookup import operator_choice
from .verdict import Toolchain, Unusable


def choose(facts: Facts) -> tuple[Path | None, Toolchain | Unusable]:
    """The pip toolkit to point CUDA_HOME at, if any, and what then is used.

    An operator's own choice always wins, good or bad: CUDA_HOME, CUDA_PATH,
    DG_JIT_NVCC_COMPILER or an nvcc on PATH. Then the first pip toolkit that
    nothing speaks against; then DeepGEMM's own fallback.
    """
    if operator_choice(facts) is not None:
        return None, describe(facts)
    unusable: Unusable | None = None
    for root in facts.pip_roots:
        answer = describe(facts.with_home(root), linked=True)
        if isinstance(answer, Toolchain):
            return root, answer
        unusable = unusable or answer
    fallback = describe(facts)
    if isinstance(fallback, Unusable) and unusable is not None:
        return None, unusable
    return None, fallback


def variables(facts: Facts) -> dict[str, str]:
    """Variables to set so that DeepGEMM and FlashInfer find a compiler.

    Empty when the operator chose one, or when there is nothing better to say
    than what DeepGEMM falls back to. Creates the folder of links if need be.
    """
    if operator_choice(facts) is not None:
        return {}
    root, _ = choose(facts)
    if root is None:
        return {}
    return {"CUDA_HOME": str(cuda_home_links(root, facts))}
