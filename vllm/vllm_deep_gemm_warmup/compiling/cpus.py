"""Decides how many compilers run at once: one for each CPU that is really there."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OURS = Path("/proc/self/cgroup")


def available_cpus(cgroups: Path = _CGROUPS, ours: Path = _OURS) -> int:
    """CPUs that this process may use: its affinity and its container's quota.

    A container's quota is not in the affinity: without it a pod of 4 CPUs on a
    machine of 128 starts 128 compilers, which take turns and all their memory.
    """
    count = len(os.sched_getaffinity(0))
    quotas = [*_quotas_v2(cgroups, ours), *_quotas_v1(cgroups, ours)]
    return max(1, int(min([count, *quotas])))


def _quotas_v2(cgroups: Path, ours: Path) -> list[float]:
    """Of every group that this process is in, from its own to the root."""
    found = []
    for folder in _folders(cgroups, ours, ""):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            found.append(int(words[0]) / int(words[1]))
    return found


def _quotas_v1(cgroups: Path, ours: Path) -> list[float]:
    found = []
    for controller in ("cpu", "cpu,cpuacct"):
        for folder in _folders(cgroups / controller, ours, "cpu"):
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
            if period.isdecimal() and quota.isdecimal() and int(period):
                found.append(int(quota) / int(period))
    return found


def _folders(root: Path, ours: Path, controller: str) -> list[Path]:
    """The group's folder and those above it; a container often sees only the root."""
    for line in _read(ours).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            return [root / group, *(root / above for above in group.parents)]
    return [root]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
