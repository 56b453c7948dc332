"""Decides how a child process is started so that it ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1


def start(
    command: Sequence[str],
    *,
    output: IO[bytes] | int,
    errors: IO[bytes] | int,
    given: int = subprocess.DEVNULL,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    niceness: int = 0,
) -> subprocess.Popen[bytes]:
    """Start a child in a process group of its own that is killed with this thread.

    For programs with one thread only: what runs between fork and exec is Python, and
    the kernel's signal (`PR_SET_PDEATHSIG`, prctl(2)) comes when the thread ends.

    Raises:
        OSError: there is no such program, or the system has no room for it.

    """
    return subprocess.Popen(
        command,
        stdin=given,
        stdout=output,
        stderr=errors,
        cwd=folder,
        env=None if environ is None else dict(environ),
        process_group=0,
        preexec_fn=killed_with(os.getpid(), niceness),
    )


def killed_with(parent: int, niceness: int = 0) -> Callable[[], None]:
    """Return what a forked child calls to be killed with the thread that forked it.

    Args:
        parent: its process.
        niceness: what the child adds to its own.

    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        os.nice(niceness)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # It may have died before we asked.
        if os.getppid() != parent:
            os._exit(1)

    return ask


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and what it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
