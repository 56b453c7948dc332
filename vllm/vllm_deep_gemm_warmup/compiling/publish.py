"""Decides how a compiled kernel comes into the cache: whole, by a rename, marker last.

The layout is that of DeepGEMM 2.8.1: `<root>/cache/<entry>/` with `kernel.cu`,
`kernel.cubin`, `meta.json` and an empty `.committed`, built in a folder of its own
below `<root>/tmp` and renamed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from .. import cubins
from ..kernel_caches import KernelCache
from .kernel import Kernel, Places

SOURCE, CUBIN, META = "kernel.cu", "kernel.cubin", "meta.json"


class Unpublishable(Exception):
    """What the compiler left is not a kernel; the message says why."""


def is_whole(cache: KernelCache, entry: str) -> bool:
    """Whether the library finds the entry."""
    return (cache.folder / entry / cache.marker).is_file()


def begin(cache: KernelCache, kernel: Kernel) -> Path:
    """Make a folder with the kernel's source, in which its compiler can run.

    Raises:
        OSError: the cache cannot be written.

    """
    # Two processes with one clock, one process number and one seed get two names.
    folder = cache.root / "tmp" / f"{os.getpid()}-{secrets.token_hex(12)}"
    folder.mkdir(parents=True)
    (folder / SOURCE).write_text(kernel.source)
    return folder


def finish(cache: KernelCache, kernel: Kernel, places: Places) -> None:
    """Make the folder an entry of the cache.

    Raises:
        Unpublishable: there is no whole cubin in it.
        OSError: the cache cannot be written.

    """
    folder = places.folder
    if not cubins.is_whole(folder / CUBIN):
        raise Unpublishable(f"the compiler left no whole {CUBIN}")
    (folder / META).write_text(kernel.meta(places))
    (folder / cache.marker).touch()
    for name in (SOURCE, CUBIN, META, cache.marker):
        _sync(folder / name)
    _sync(folder)
    cache.folder.mkdir(parents=True, exist_ok=True)
    target = cache.folder / kernel.entry
    for _ in range(3):
        try:
            folder.rename(target)
        except OSError:
            # Someone was faster, or something damaged lies in the way.
            if is_whole(cache, kernel.entry) or not os.path.lexists(target):
                break
            with contextlib.suppress(FileNotFoundError):
                target.rename(folder.with_name(f"{folder.name}.damaged"))
        else:
            return
    if not is_whole(cache, kernel.entry):
        raise OSError(f"{target} cannot be replaced")


def discard(folder: Path) -> None:
    """Remove a folder of ``begin``, if it is still there, and what lay in the way."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.with_name(f"{folder.name}.damaged"), ignore_errors=True)


def _sync(path: Path) -> None:
    """Have it on the disk before the rename is: a power cut leaves no empty entry."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
