"""What workers count reaches the registry that `/metrics` reads; nothing is left."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm_deep_gemm_warmup import metrics, node

COUNT = """
from vllm_deep_gemm_warmup.metrics import open_counters
counters = open_counters(["fp8_gemm_nt", "fp8_einsum"])
counters.add("fp8_gemm_nt", 2, 1.5)
counters.add("fp8_gemm_nt", 1, 0.25)
"""


def run(program: str, environ: Mapping[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def scrape(registry: CollectorRegistry) -> list[str]:
    return [
        line
        for line in generate_latest(registry).decode().splitlines()
        if not line.startswith("#")
    ]


def sums(builds: float, seconds: float) -> list[str]:
    values = [
        ("builds", "fp8_gemm_nt", builds),
        ("builds", "fp8_einsum", 0.0),
        ("build_seconds", "fp8_gemm_nt", seconds),
        ("build_seconds", "fp8_einsum", 0.0),
    ]
    return [
        f'vllm:deep_gemm_jit_{name}_total{{entry_point="{entry_point}"}} {value}'
        for name, entry_point, value in values
    ]


def test_two_workers_are_added_up(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(metrics.BuildCollector(tmp_path / "[0] meeting"))
    assert scrape(registry) == []
    for _ in range(2):
        run(COUNT, {node.MEETING: str(tmp_path / "[0] meeting")})
    assert scrape(registry) == sums(6.0, 3.5)


def test_several_api_servers_read_them_by_vllm_s_own_way(tmp_path: Path) -> None:
    run(
        COUNT,
        {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), node.MEETING: str(tmp_path / "x")},
    )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    assert scrape(registry) == sums(3.0, 1.75)


def test_without_a_launcher_nothing_is_counted_and_nothing_fails(
    tmp_path: Path,
) -> None:
    assert metrics.open_counters(["fp8_gemm_nt"], {}) is None
    (tmp_path / "file").write_text("")
    blocked = {node.MEETING: str(tmp_path / "file" / "folder")}
    assert metrics.open_counters(["fp8_gemm_nt"], blocked) is None


def test_the_first_process_shows_what_its_children_count(tmp_path: Path) -> None:
    """Its own registry, its children's counts; a fork leaves the folder in place."""
    program = f"""
import os, subprocess, sys
from pathlib import Path
from prometheus_client import REGISTRY, generate_latest
from vllm_deep_gemm_warmup import metrics, node
metrics.collect_builds(os.environ)
metrics.collect_builds(os.environ)
subprocess.run([sys.executable, "-c", {COUNT!r}], check=True)
if os.fork() == 0:
    sys.exit()
os.wait()
lines = generate_latest(REGISTRY).decode().splitlines()
print(*[line for line in lines if line.startswith("vllm:")], sep="\\n")
print(os.environ[node.MEETING])
"""
    *lines, folder = run(program, {"TMPDIR": str(tmp_path)}).splitlines()
    assert lines == sums(3.0, 1.75)
    assert Path(folder).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_its_user_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    environ = {node.MEETING: str(tmp_path / "meeting")}
    assert node.announce(environ) is None
    folder = node.meeting_folder(environ)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
