"""The offline benchmark's parts; what a compile takes is not tested."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Holds 64 MiB and says so, until its input ends.
HOLD = "import sys; keep = bytearray(64 << 20); print(flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).with_name("offline.py")
    spec = importlib.util.spec_from_file_location("offline_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_is_that_of_all_processes_together(benchmark: Any) -> None:
    """Children of children too: two of them hold 64 MiB at the same time."""
    # A shell gives what runs beside it no input of its own.
    hold = f"{sys.executable} -c '{HOLD}' <&3"
    with subprocess.Popen(
        ["sh", "-c", f"exec 3<&0; ({hold}) & ({hold}) & wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        for _ in range(2):
            assert shell.stdout.readline()
        processes = list(benchmark.tree(shell.pid))
        assert sum(map(benchmark.memory, processes)) > 128 << 20
        shell.stdin.close()


def test_a_command_s_seconds_and_memory_are_taken(benchmark: Any) -> None:
    command = [sys.executable, "-c", "keep = bytearray(64 << 20)"]
    seconds, together, largest = benchmark.run(command, os.environ)
    assert seconds > 0
    assert together > 0
    assert largest > 64 << 20


def test_a_process_that_has_ended_takes_nothing(benchmark: Any) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert list(benchmark.tree(child)) == [child]
    assert benchmark.memory(child) == 0


def test_a_compile_that_fails_gives_no_figures(benchmark: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.run(["sh", "-c", "exit 3"], os.environ)
    assert ended.value.code == 3


def test_the_table_says_what_stock_cannot_and_what_a_fake_is(benchmark: Any) -> None:
    found = benchmark.Compiled(12.3, 3_000_000_000, 1_000_000_000, 140, 20)
    words = ["model", "--device", "h100"]
    text = "\n".join(benchmark.table(found, words, "real"))
    assert "| ours | 12 | 140 | 20 | 3000 | 1000 |" in text
    assert "| stock | cannot" in text
    assert "fake" not in text
    assert "compiles nothing" in "\n".join(benchmark.table(found, words, "fake"))
