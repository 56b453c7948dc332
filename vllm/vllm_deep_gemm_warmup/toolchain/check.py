"""Decides whether the compiler that DeepGEMM takes can compile its kernels."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from .answer import Answer, FileState, ask, state_of
from .facts import HOST_FLAG_VARIABLES, Facts, breaks_shell, read_facts
from .lookup import locate
from .recorded import is_recorded
from .verdict import (
    OLDEST_NVCC,
    PINS,
    Toolchain,
    Unusable,
    Version,
    dotted,
    other_toolkit,
)


def describe_current() -> Toolchain | Unusable:
    """What DeepGEMM will use in this process, given the environment as it is.

    Cheap after the first call: nvcc is asked once for each state of its file.
    """
    return describe(read_facts(search_path=()))


def describe(facts: Facts, *, linked: bool = False) -> Toolchain | Unusable:
    """What DeepGEMM will use for these facts. Does not consider pip's toolkits.

    Speaks against only what is known to fail: no home, no executable nvcc, an nvcc
    whose `--version` fails or cannot be read (the library stops there as well),
    an older release than 12.9, headers of another release, no host compiler, a path
    that the library's shell would split (unless it will be called by a link).
    """
    located = locate(facts)
    if isinstance(located, Unusable):
        return located
    home, nvcc, origin = located
    probed = f"{nvcc} from {origin}"
    if not linked and breaks_shell(nvcc):
        return Unusable(
            probed,
            "DeepGEMM gives the path to a shell without quotes, and it has a space or "
            "another character that means something there",
            "name it by a link without such characters",
        )
    answer = _release(ask(nvcc, facts.patience))
    if isinstance(answer, str):
        return Unusable(probed, answer, other_toolkit())
    if answer is not None and answer < OLDEST_NVCC:
        return Unusable(
            probed,
            f"nvcc {dotted(answer)} is too old, DeepGEMM needs "
            f"{dotted(OLDEST_NVCC)} or newer",
            other_toolkit(),
        )
    if is_recorded(nvcc):
        return Toolchain(home, nvcc, origin, answer, None, recorded=True)
    headers = _header_version(nvcc)
    if answer and headers and answer != headers:
        return Unusable(
            probed,
            f"nvcc {dotted(answer)} does not fit the CUDA {dotted(headers)} "
            "headers beside it, no kernel would compile",
            f"pip install {PINS}",
        )
    missing = _missing_host_compiler(facts)
    if missing:
        return Unusable(
            probed,
            f"nvcc needs a C++ compiler and there is no {missing} on PATH",
            "apt-get install g++, or set NVCC_CCBIN",
        )
    return Toolchain(home, nvcc, origin, answer, headers, host=facts.which("g++"))


def _header_version(nvcc: Path) -> Version | None:
    """Release of the CUDA headers nvcc will include, or None if not seen.

    nvcc includes from the toolkit it lies in, wherever it was called from. A
    wrapper script lies in none, and nothing is known about its headers.
    """
    folder = nvcc.resolve().parent.parent
    places = (folder / "include", *sorted(folder.glob("targets/*/include")))
    for place in places:
        header = place / "cuda_runtime_api.h"
        try:
            return _release_in(header, state_of(header))
        except OSError:
            continue
    return None


@functools.lru_cache(maxsize=64)
def _release_in(header: Path, state: FileState) -> Version | None:
    """Cached by path and file state: it has some 700 kB, and each layer asks."""
    text = header.read_text(errors="replace")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    number = int(match[1]) if match else 0
    return (number // 1000, number % 1000 // 10) if match else None


def _missing_host_compiler(facts: Facts) -> str | None:
    """Name of the host compiler nvcc will not find, or None.

    nvcc runs `gcc`, which needs the C++ front end that comes with `g++`.
    """
    flags = " ".join(facts.get(name) or "" for name in HOST_FLAG_VARIABLES)
    if facts.get("NVCC_CCBIN") or "-ccbin" in flags or "--compiler-bindir" in flags:
        return None
    return next((name for name in ("g++", "gcc") if not facts.which(name)), None)


def _release(answer: Answer) -> Version | str | None:
    """nvcc's release, or what is wrong with it, or None when it is too slow."""
    if answer.text is None:
        return None
    if answer.code != 0:
        return f"`nvcc --version` failed with exit code {answer.code}"
    match = re.search(r"release (\d+)\.(\d+)", answer.text)
    if match is None:
        return "`nvcc --version` names no release"
    return int(match[1]), int(match[2])
