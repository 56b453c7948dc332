"""Decides how kernels that a worker built come to be counted on a server's `/metrics`.

A worker is another process than the API server, whose registry is the one that is
read. So the worker writes a file in the format of prometheus_client's multiprocess
mode, and the API server reads it: by that mode where the launcher set it up (several
API servers), by a collector of ours where it did not.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from .node import announce, meeting_folder

BUILDS = "vllm:deep_gemm_jit_builds"
SECONDS = "vllm:deep_gemm_jit_build_seconds"
LABEL = "entry_point"
_HELP = {
    BUILDS: "DeepGEMM and FlashInfer kernels compiled after the engine was ready.",
    SECONDS: "Seconds of the calls that compiled a kernel after the engine was ready.",
}
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class BuildCounters:
    """The counters of this process, which its API server adds to those of others.

    Args:
        folder: Where the file goes.
        entry_points: Start at 0, so that a first build is an increase.

    """

    def __init__(self, folder: Path, entry_points: Iterable[str]) -> None:
        from prometheus_client.mmap_dict import MmapedDict

        # The prefix is the type of all that is in it. The rest keeps it apart from
        # the file that prometheus_client itself may write for this process.
        path = folder / f"counter_deep-gemm-{os.getpid()}.db"
        # An empty file breaks a scrape: it gets its name once it has a content.
        unnamed = path.with_suffix(".new")
        self._values = MmapedDict(str(unnamed))
        self._lock = threading.Lock()
        for entry_point in entry_points:
            self.add(entry_point, 0, 0.0)
        unnamed.replace(path)

    def add(self, entry_point: str, builds: int, seconds: float) -> None:
        """Count kernels that one call built."""
        with self._lock:
            for name, value in ((BUILDS, float(builds)), (SECONDS, seconds)):
                key = _key(name, entry_point)
                before, _ = self._values.read_value(key)
                self._values.write_value(key, before + value, 0.0)


def _key(name: str, entry_point: str) -> str:
    from prometheus_client.mmap_dict import mmap_key

    key: str = mmap_key(name, f"{name}_total", [LABEL], [entry_point], _HELP[name])
    return key


def open_counters(
    entry_points: Iterable[str], environ: Mapping[str, str] | None = None
) -> BuildCounters | None:
    """Return the counters of this process; None where no API server would see them."""
    environ = os.environ if environ is None else environ
    shared = environ.get(_MULTIPROCESS)
    folder = Path(shared) if shared else meeting_folder(environ)
    if folder is None:
        return None
    try:
        return BuildCounters(folder, entry_points)
    except OSError:
        return None


class BuildCollector:
    """Gives a registry what the processes that this one starts have counted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Any]:
        """Return the sums; nothing as long as no worker has counted."""
        from prometheus_client.multiprocess import MultiProcessCollector

        pattern = str(Path(glob.escape(str(self._folder)), "counter_*.db"))
        files = sorted(glob.glob(pattern))  # noqa: PTH207
        metrics: Iterable[Any] = MultiProcessCollector.merge(files)
        return metrics


def collect_builds(environ: MutableMapping[str, str]) -> None:
    """Have the registry of this process show them, if it is the first of its tree."""
    try:
        from prometheus_client import REGISTRY
    # vLLM brings it; a vLLM without it has no `/metrics`.
    except ModuleNotFoundError:
        return
    folder = announce(environ)
    if folder is not None:
        REGISTRY.register(BuildCollector(folder))
