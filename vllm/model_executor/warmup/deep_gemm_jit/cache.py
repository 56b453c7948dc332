"""Decides what in DeepGEMM's cache folder counts as a kernel, and as a new one."""

import os
import pathlib
import time
from collections.abc import Mapping

# File systems stamp a folder with a clock that ticks every few milliseconds: an
# entry can appear without a new stamp just after the folder was read.
_STAMP_TICK_NS = 50_000_000


def cache_folders(environ: Mapping[str, str] = os.environ) -> list[pathlib.Path]:
    """Return the folders that kernels appear in, one entry each.

    DeepGEMM 2.8.1 puts them into ``$DG_JIT_CACHE_DIR/cache``; vLLM sets the
    variable before it imports the library. FlashInfer's DeepGEMM does the same
    with ``$TRTLLM_DG_CACHE_DIR`` or a folder in the home directory (its
    compiler.cuh, 0.7.2).
    """
    roots = []
    if given := environ.get("DG_JIT_CACHE_DIR"):
        roots.append(pathlib.Path(given))
    if given := environ.get("TRTLLM_DG_CACHE_DIR"):
        roots.append(pathlib.Path(given))
    elif home := environ.get("HOME"):
        roots.append(pathlib.Path(home) / ".tensorrt_llm")
    return [root / "cache" for root in roots]


def entries(folder: pathlib.Path) -> frozenset[str]:
    """Return the names, ``<kernel>.<hash>``, of the entries in ``folder``.

    An entry is built elsewhere and renamed into the folder when it is whole.
    """
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return frozenset()


class CacheWatch:
    """Tells which entries appeared since the last look.

    Entries of other processes that share the folder are among them.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._stamp = 0
        self._known = entries(folder)

    def new_entries(self) -> tuple[str, ...]:
        """Return the names of the entries that are new, sorted."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return ()
        now = entries(self._folder)
        new, self._known = now - self._known, now
        settled = time.time_ns() - stamp > _STAMP_TICK_NS
        self._stamp = stamp if settled else 0
        return tuple(sorted(new))

    def _read_stamp(self) -> int:
        try:
            return self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return 0
