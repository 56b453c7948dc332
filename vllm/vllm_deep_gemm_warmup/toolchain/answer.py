"""Decides what a compiler answers to `--version`: asked once in each of its states."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 60.0

# When it was written, in ns, and its bytes.
FileState = tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """What `nvcc --version 2>&1` said.

    Attributes:
        text: as DeepGEMM's key holds it; None when it did not end in time.
        code: its exit status.

    """

    text: str | None
    code: int = 0


def ask(nvcc: Path, patience: float = PATIENCE) -> Answer:
    """Ask a compiler; the answer is kept for as long as its file stays the same.

    Args:
        nvcc: the program.
        patience: seconds that it may take.

    Raises:
        OSError: there is no such file, or no shell.

    """
    return _ask(str(nvcc), state_of(nvcc), patience)


def state_of(path: Path) -> FileState:
    """What changes when a file is replaced.

    Raises:
        OSError: there is none.

    """
    state = path.stat()
    return state.st_mtime_ns, state.st_size


@functools.lru_cache(maxsize=64)
def _ask(nvcc: str, state: FileState, patience: float) -> Answer:
    """Run it as DeepGEMM does, by the shell, which also runs what has no first line."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", '"$0" --version 2>&1', nvcc],
            stdout=subprocess.PIPE,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None)
    return Answer(done.stdout.decode(errors="surrogateescape"), done.returncode)
