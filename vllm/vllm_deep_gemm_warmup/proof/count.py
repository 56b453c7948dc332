"""Counts compiled kernels: DeepGEMM's cache entries and FlashInfer's own."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_TEMPLATE = re.compile(r"&\s*(?:\w+::)*(\w+)\s*<([^;]*?)>\s*\)?\s*;", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One compiled kernel: its folder, its function and its template arguments."""

    folder: str
    kernel: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        if not self.arguments:
            return self.folder
        return f"{self.kernel}<{', '.join(self.arguments)}>"


@dataclass(frozen=True)
class Snapshot:
    """Kernels present at one moment."""

    deep_gemm: frozenset[Entry]
    flashinfer: frozenset[str]


def _entry(folder: Path) -> Entry:
    kernel = folder.name.partition(".")[0]
    source = folder / "kernel.cu"
    found = _TEMPLATE.search(source.read_text()) if source.is_file() else None
    if found is None:
        return Entry(folder.name, kernel, ())
    arguments = tuple(" ".join(part.split()) for part in found[2].split(","))
    return Entry(folder.name, found[1], arguments)


def deep_gemm_entries(cache_dir: Path) -> frozenset[Entry]:
    """Return the committed entries of the ``DG_JIT_CACHE_DIR`` folder ``cache_dir``."""
    return frozenset(
        _entry(marker.parent) for marker in cache_dir.glob("cache/*/.committed")
    )


def flashinfer_entries(cache_dir: Path) -> frozenset[str]:
    """Return the kernels in the ``TRTLLM_DG_CACHE_DIR`` folder ``cache_dir``."""
    return frozenset(
        cubin.parent.name for cubin in cache_dir.glob("cache/*/nvcc_kernel.cubin")
    )


def snapshot(deep_gemm: Path, flashinfer: Path) -> Snapshot:
    """Return what both cache folders hold now; a missing folder holds nothing."""
    return Snapshot(deep_gemm_entries(deep_gemm), flashinfer_entries(flashinfer))


def compilers(cache_dir: Path) -> tuple[str, ...]:
    """Return the compilers that ``meta.json`` of each entry records."""
    found: dict[str, None] = {}
    for meta in sorted(cache_dir.glob("cache/*/meta.json")):
        for value in _strings(json.loads(meta.read_text())):
            path = re.match(r"(\S*nvcc)\b", value)
            if path and "/" in path[1]:
                found[path[1]] = None
    return tuple(found)


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []
