"""Decides how a compiled kernel is named where the proof counts it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_deep_gemm_warmup import kernel_caches

_TEMPLATE = re.compile(r"&\s*(?:\w+::)*(\w+)\s*<([^;]*?)>\s*\)?\s*;", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One compiled kernel: its folder, its function and its template arguments."""

    folder: str
    kernel: str
    arguments: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int] | None:
        """(N, K) of a GEMM: the arguments after the layout and M, which is 0."""
        if "gemm" not in self.kernel or len(self.arguments) < 4:
            return None
        n, k = self.arguments[2:4]
        return (int(n), int(k)) if n.isdigit() and k.isdigit() else None

    def __str__(self) -> str:
        if not self.arguments:
            return self.folder
        shape = f" N={self.shape[0]} K={self.shape[1]}" if self.shape else ""
        return f"{self.kernel}{shape} <{', '.join(self.arguments)}>"


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
    """Return the entries of the ``DG_JIT_CACHE_DIR`` folder ``cache_dir``."""
    cache = kernel_caches.deep_gemm(cache_dir)
    return frozenset(_entry(cache.folder / name) for name in cache.entries())


def snapshot(deep_gemm: Path, flashinfer: Path) -> Snapshot:
    """Return what both cache folders hold now; a missing folder holds nothing."""
    return Snapshot(
        deep_gemm_entries(deep_gemm), kernel_caches.flashinfer(flashinfer).entries()
    )


def compilers(cache_dir: Path) -> tuple[str, ...]:
    """Return path and version of the compilers that the entries record.

    Links are followed: pip's compiler is reached through a folder of them.
    """
    found: dict[str, None] = {}
    cache = kernel_caches.deep_gemm(cache_dir)
    for name in sorted(cache.entries()):
        meta = cache.folder / name / "meta.json"
        if not meta.is_file():
            continue
        recorded = json.loads(meta.read_text()).get("compiler_info", {})
        if "path" not in recorded:
            continue
        version = re.search(r"V\d[\d.]*", recorded.get("version", ""))
        path = Path(recorded["path"]).resolve()
        found[f"{path} {version[0] if version else ''}".strip()] = None
    return tuple(found)
