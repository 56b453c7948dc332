"""Processes that each have to do a thing do it one after the other, or share it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.compiling import locks

NAMES = ["a", "b", "c", "b"]
# Makes what is not there yet, slowly, and says so; then waits for its end.
WORKER = """
import sys, time
from pathlib import Path
from vllm_deep_gemm_warmup.compiling.locks import in_turn
path, names = Path(sys.argv[1]), sys.argv[2:]
print("here", flush=True)
sys.stdin.readline()
done = []
for index in in_turn(path / "new" / "locks", names):
    done.append(index)
    product = path / names[index]
    if not product.exists():
        time.sleep(0.2)
        with (path / "made").open("a") as log:
            log.write(names[index])
        product.touch()
print(sorted(done), flush=True)
"""
# Keeps the locks of all names.
HOLDER = """
import sys
from pathlib import Path
from vllm_deep_gemm_warmup.compiling.locks import Locks
locks = Locks(Path(sys.argv[1]))
assert all([locks.take(name) for name in sys.argv[2:]])
print("here", flush=True)
sys.stdin.readline()
"""


def start(code: str, path: Path, *names: str) -> subprocess.Popen[str]:
    """Start a process and wait until it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def test_what_each_needs_is_made_once(tmp_path: Path) -> None:
    workers = [start(WORKER, tmp_path, *NAMES) for _ in range(3)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()

    said = [worker.communicate(timeout=60)[0] for worker in workers]

    assert said == ["[0, 1, 2, 3]\n"] * 3
    assert sorted((tmp_path / "made").read_text()) == ["a", "b", "c"]


def test_what_is_free_comes_before_what_is_not(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    holder = start(HOLDER, path, "a")
    turns = locks.in_turn(path, NAMES)

    assert [next(turns) for _ in range(3)] == [1, 2, 3]
    holder.kill()
    holder.wait()

    assert list(turns) == [0]


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locks"
    holder = start(HOLDER, path, *NAMES)
    monkeypatch.setattr(locks, "_PATIENCE", 0.1)

    assert list(locks.in_turn(path, NAMES)) == [0, 1, 2, 3]

    holder.kill()
    holder.wait()


def test_without_a_place_for_locks_all_is_done_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (None, tmp_path / "file" / "locks"):
        assert list(locks.in_turn(path, NAMES)) == [0, 1, 2, 3]
