"""Decides what answers for a compiler on a host that has none: a recorded answer.

DeepGEMM 2.8.1 asks `nvcc --version` for its key even where every kernel is in the
cache. A program that gives the answer of the compiler that built them lies beside
them; it compiles nothing.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .facts import COMPILER_VARIABLE, HOME_VARIABLES, Facts, is_program

FOLDER = "recorded-nvcc"
_VERSION, _PROGRAM = "version", "nvcc"
_SCRIPT = """\
#!/bin/sh
# Stands in for nvcc where there is none: answers --version, compiles nothing.
case "$1" in --version) exec cat "${0%/*}/version" ;; esac
echo "there is no nvcc on this host, and this kernel is not in the cache" >&2
exit 1
"""


def record(root: Path, answer: str) -> None:
    """Put the program that gives this answer beside the kernels in `root`.

    Args:
        root: a cache folder.
        answer: what `nvcc --version` said, whole.

    Raises:
        OSError: the folder cannot be written.

    """
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    for name, text, mode in (
        (_VERSION, answer, 0o644),
        (_PROGRAM, _SCRIPT, 0o755),
    ):
        temporary = folder / f".{name}.{os.getpid()}.{secrets.token_hex(8)}"
        temporary.write_text(text, errors="surrogateescape")
        temporary.chmod(mode)
        temporary.replace(folder / name)


def recorded_answer(root: Path) -> str | None:
    """What the program of a cache folder answers, or None where there is none."""
    try:
        return (root / FOLDER / _VERSION).read_text(errors="surrogateescape")
    except OSError:
        return None


def recorded_variables(facts: Facts, root: Path) -> dict[str, str]:
    """Variables by which DeepGEMM takes the program; none where there is an nvcc.

    FlashInfer looks for `$CUDA_HOME/bin/nvcc`, must not take it for a compiler, and
    finds none.
    """
    program = root / FOLDER / _PROGRAM
    if any(map(is_program, _compilers(facts))) or not is_program(program):
        return {}
    result = {COMPILER_VARIABLE: str(program)}
    homes = [Path(home) for name in HOME_VARIABLES if (home := facts.get(name))]
    if not (homes or [facts.fallback])[0].is_dir():
        result["CUDA_HOME"] = str(program.parent)
    return result


def is_recorded(nvcc: Path) -> bool:
    """Whether this is such a program and no compiler."""
    return nvcc.parent.name == FOLDER and (nvcc.parent / _VERSION).is_file()


def _compilers(facts: Facts) -> Iterator[Path]:
    """Wherever a compiler may be, whether DeepGEMM would look there or not."""
    for name in HOME_VARIABLES:
        if home := facts.get(name):
            yield Path(home, "bin", "nvcc")
    for path in (facts.get(COMPILER_VARIABLE), facts.which("nvcc")):
        if path:
            yield Path(path)
    for root in (*facts.pip_roots, facts.fallback):
        yield root / "bin" / "nvcc"
