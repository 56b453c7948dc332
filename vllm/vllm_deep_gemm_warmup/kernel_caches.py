"""Decides what a compiled kernel is on disk: an entry of DeepGEMM's or FlashInfer's."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KernelCache:
    """A library's compiled kernels, `<root>/cache/<entry>/`.

    Attributes:
        root: the folder that the library is told of.
        marker: file that an entry has once its kernel can be loaded.

    """

    root: Path
    marker: str

    @property
    def folder(self) -> Path:
        """Where the entries lie."""
        return self.root / "cache"

    def entries(self, known: Collection[str] = frozenset()) -> frozenset[str]:
        """Names of the whole entries but those in `known`, which cost no look.

        A folder that is missing, or that this user cannot look into, has none: no
        kernel can be loaded from it either.
        """
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError:
            return frozenset()
        # os.path asks for no right that may be missing; Path.is_file raises then.
        return frozenset(
            name
            for name in names
            if name not in known and os.path.isfile(self.folder / name / self.marker)  # noqa: PTH113
        )


def deep_gemm(root: Path) -> KernelCache:
    """Of the folder in `DG_JIT_CACHE_DIR`.

    DeepGEMM 2.8.1 builds an entry, `<kernel>.<hash>`, elsewhere and renames it
    into the folder.
    """
    return KernelCache(root, ".committed")


def flashinfer(root: Path) -> KernelCache:
    """Of the folder in `TRTLLM_DG_CACHE_DIR`: FlashInfer's own DeepGEMM.

    FlashInfer 0.7.2 (its compiler.cuh) makes an entry's folder, compiles, and
    renames the kernel into it: a compile that failed leaves a folder.
    """
    return KernelCache(root, "nvcc_kernel.cubin")


def read_kernel_caches(
    environ: Mapping[str, str] | None = None,
) -> tuple[KernelCache, ...]:
    """The caches that the kernels of this process go to.

    vLLM names DeepGEMM's folder when it imports the library: not to be asked
    before that. FlashInfer takes one in the home directory unless told.
    """
    environ = os.environ if environ is None else environ
    found = []
    if given := environ.get("DG_JIT_CACHE_DIR"):
        found.append(deep_gemm(Path(given)))
    if given := environ.get("TRTLLM_DG_CACHE_DIR"):
        found.append(flashinfer(Path(given)))
    elif home := environ.get("HOME"):
        found.append(flashinfer(Path(home, ".tensorrt_llm")))
    return tuple(found)
