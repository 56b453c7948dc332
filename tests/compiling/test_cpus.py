"""A container's quota counts, whichever version of control groups says it."""

import os
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.compiling.cpus import available_cpus

HERE = len(os.sched_getaffinity(0))


def tell(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "groups", "expected"),
    [
        ({}, "0::/", HERE),
        ({"cpu.max": "max 100000"}, "0::/", HERE),
        ({"cpu.max": "150000 100000"}, "0::/", 1),
        ({"pod/cpu.max": "100000 100000"}, "0::/pod/container", 1),
        ({"pod/container/cpu.max": "20000 100000"}, "0::/pod/container", 1),
        (
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            "3:cpu,cpuacct:/",
            HERE,
        ),
        (
            {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"},
            "3:cpu,cpuacct:/x",
            1,
        ),
    ],
)
def test_available_cpus(
    tmp_path: Path, files: dict[str, str], groups: str, expected: int
) -> None:
    tell(tmp_path / "groups", f"{groups}\n")
    for name, text in files.items():
        tell(tmp_path / "fs" / name, f"{text}\n")
    assert available_cpus(tmp_path / "fs", tmp_path / "groups") == expected
