"""Decides which compiler DeepGEMM takes: its own order, followed step by step.

DeepGEMM 2.8.1 asks `CUDA_HOME`, `CUDA_PATH`, `which nvcc`, then `/usr/local/cuda`;
`DG_JIT_NVCC_COMPILER` replaces the program but not the need for an existing home.
It fixes its choice when the first kernel is constructed.
"""

from __future__ import annotations

import os
from pathlib import Path

from .facts import COMPILER_VARIABLE, HOME_VARIABLES, Facts, is_program
from .verdict import PINS, Unusable, other_toolkit


def operator_choice(facts: Facts) -> str | None:
    """The name of what the operator chose the compiler with, or None."""
    for name in (*HOME_VARIABLES, COMPILER_VARIABLE):
        if facts.get(name):
            return name
    return "PATH" if facts.which("nvcc") else None


def locate(facts: Facts) -> tuple[Path, Path, str] | Unusable:
    """(home, nvcc, origin) by DeepGEMM's own order."""
    home, origin = _home(facts)
    override = facts.get(COMPILER_VARIABLE)
    if not _is_there(home):
        if origin in HOME_VARIABLES:
            also = f" ({COMPILER_VARIABLE} alone is not enough)" if override else ""
            return Unusable(
                f"{origin}={home}",
                f"no such folder{also}",
                f"point {origin} at a CUDA toolkit, or unset it",
            )
        return Unusable(
            "no nvcc",
            "there is no CUDA toolkit: CUDA_HOME and CUDA_PATH are unset, no nvcc "
            f"on PATH, no {home}",
            f"pip install {PINS}, or set CUDA_HOME",
        )
    nvcc = Path(override) if override else home / "bin" / "nvcc"
    origin = COMPILER_VARIABLE if override else origin
    if not is_program(nvcc):
        return Unusable(
            f"{nvcc} from {origin}", "no executable program there", other_toolkit()
        )
    return home, nvcc, origin


def _home(facts: Facts) -> tuple[Path, str]:
    for name in HOME_VARIABLES:
        value = facts.get(name)
        if value:
            return Path(value), name
    on_path = facts.which("nvcc")
    if on_path:
        return on_path.parent.parent, "PATH"
    return facts.fallback, str(facts.fallback)


def _is_there(path: Path) -> bool:
    """Whether this user can see the path; `Path.exists` raises where it cannot."""
    return os.access(path, os.F_OK)
