"""Decides which kernels of a cache are new."""

import time

from vllm_deep_gemm_warmup.kernel_caches import KernelCache

# File systems stamp a folder with a clock that ticks every few milliseconds: an
# entry can appear without a new stamp just after the folder was read.
_STAMP_TICK_NS = 50_000_000


class CacheWatch:
    """Tells which entries appeared since the last look.

    Entries of other processes that share the folder are among them.
    """

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        self._stamp = 0
        self._known = cache.entries()

    def new_entries(self) -> tuple[str, ...]:
        """Return the names of the entries that are new, sorted.

        Looks only where the folder has changed: this is asked after every call.
        """
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return ()
        new = self._cache.entries(self._known)
        self._known |= new
        settled = time.time_ns() - stamp > _STAMP_TICK_NS
        self._stamp = stamp if settled else 0
        return tuple(sorted(new))

    def _read_stamp(self) -> int:
        try:
            return self._cache.folder.stat().st_mtime_ns
        # Missing, or not to be looked into; then it has no entries that count.
        except OSError:
            return 0
