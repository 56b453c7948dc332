"""Decides what a compiled kernel is on disk: an entry of DeepGEMM's or FlashInfer's."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import cubins

# In DeepGEMM's folder, beside its entries: what this package keeps of them.
FOLDER = "deep_gemm_warmup"


class EntryState(enum.Enum):
    """What a library makes of an entry.

    WHOLE: it loads the kernel. UNMARKED: the kernel is whole and the marker is
    gone; DeepGEMM 2.8.1 then compiles at each start, and its rename into the
    folder that is there fails, so that it never heals. DAMAGED: it fails at each
    start, or compiles at each. OPEN: nothing is there yet, and it builds.
    FOREIGN: no entry of this library.
    """

    WHOLE = "whole"
    UNMARKED = "unmarked"
    DAMAGED = "damaged"
    OPEN = "open"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class KernelCache:
    """A library's compiled kernels, `<root>/cache/<entry>/`.

    Attributes:
        root: the folder that the library is told of.
        marker: file that an entry has once its kernel can be loaded.
        cubin: file that is the kernel.
        pattern: what the name of an entry looks like.
        builds_in_place: an entry without a kernel may be one that is being built.

    """

    root: Path
    marker: str
    cubin: str
    pattern: str
    builds_in_place: bool = False

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

    def judge(self, name: str) -> EntryState:
        """What the library makes of `<root>/cache/<name>`; reads, writes nothing."""
        if re.fullmatch(self.pattern, name) is None:
            return EntryState.FOREIGN
        return self.judge_folder(self.folder / name)

    def judge_folder(self, entry: Path) -> EntryState:
        """What the library would make of an entry at this path."""
        if not os.path.isdir(entry):  # noqa: PTH112
            return EntryState.DAMAGED
        marked = os.path.lexists(entry / self.marker)
        if cubins.is_whole(entry / self.cubin):
            return EntryState.WHOLE if marked else EntryState.UNMARKED
        if self.builds_in_place:
            return EntryState.DAMAGED if marked else EntryState.OPEN
        empty = not marked and not any(entry.iterdir())
        return EntryState.OPEN if empty else EntryState.DAMAGED

    def judge_all(self) -> Iterator[tuple[str, EntryState]]:
        """Judge everything in the folder; a folder that is missing has nothing.

        What vanishes meanwhile, or may not be looked into, is left out.
        """
        try:
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError:
            return
        for name in names:
            try:
                yield name, self.judge(name)
            except OSError:
                continue


def deep_gemm(root: Path) -> KernelCache:
    """Of the folder in `DG_JIT_CACHE_DIR`.

    DeepGEMM 2.8.1 builds an entry, `<kernel>.<hash>`, elsewhere and renames it
    into the folder. On a hit it reads the kernel alone and touches the marker.
    """
    return KernelCache(
        root, ".committed", "kernel.cubin", r"[A-Za-z_]\w*\.[0-9a-f]{32}"
    )


def vllm_root(environ: Mapping[str, str]) -> Path:
    """The folder that vLLM 0.33.0 puts every cache into (its `envs.py`)."""
    home = environ.get("XDG_CACHE_HOME", "~/.cache")
    # Not Path.expanduser, which raises where there is no home.
    return Path(
        os.path.expanduser(environ.get("VLLM_CACHE_ROOT", f"{home}/vllm"))  # noqa: PTH111
    )


def deep_gemm_root(environ: Mapping[str, str] | None = None) -> Path:
    """The folder that vLLM 0.33.0 tells DeepGEMM of (`vllm/utils/deep_gemm.py`)."""
    environ = os.environ if environ is None else environ
    given = environ.get("DG_JIT_CACHE_DIR")
    return Path(given) if given else vllm_root(environ) / "deep_gemm"


def deep_gemm_is_named(environ: Mapping[str, str] | None = None) -> bool:
    """Whether DeepGEMM is told of a folder: by the operator, or already by vLLM."""
    environ = os.environ if environ is None else environ
    return bool(environ.get("DG_JIT_CACHE_DIR"))


def flashinfer(root: Path) -> KernelCache:
    """Of the folder in `TRTLLM_DG_CACHE_DIR`: FlashInfer's own DeepGEMM.

    FlashInfer 0.7.2 (its compiler.cuh) makes an entry's folder, which is named after
    numbers and a type, compiles, and renames the kernel into it: a compile that failed
    leaves a folder.
    """
    kernel = "nvcc_kernel.cubin"
    return KernelCache(root, kernel, kernel, r"gemm(_swapAB)?(_\d+){4,}_[A-Z]\w*", True)


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
    if root := _flashinfer_root(environ):
        found.append(flashinfer(root))
    return tuple(found)


def flashinfer_locks(environ: Mapping[str, str] | None = None) -> Path | None:
    """The file of locks for who compiles FlashInfer's kernels; None: no cache."""
    root = _flashinfer_root(os.environ if environ is None else environ)
    return root / FOLDER / "locks" if root else None


def _flashinfer_root(environ: Mapping[str, str]) -> Path | None:
    if given := environ.get("TRTLLM_DG_CACHE_DIR"):
        return Path(given)
    home = environ.get("HOME")
    return Path(home, ".tensorrt_llm") if home else None
