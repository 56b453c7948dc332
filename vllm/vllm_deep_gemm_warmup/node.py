"""Decides where the processes that one launcher started on a node meet: one folder.

The launcher names it in the environment, which its children inherit; who first has
something to leave there makes it, and the launcher removes it. A child without the
name (on another node, or under a launcher that passes no environment on) has none.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# Not a VLLM_ name: those are checked against vLLM's list.
MEETING = "_DEEP_GEMM_WARMUP_MEETING"


def announce(environ: MutableMapping[str, str]) -> Path | None:
    """Name a folder for this process and its children; None if one is named already.

    It is removed when this process ends; a name that cannot be guessed keeps other
    users of the temporary folder out of it until it is made.
    """
    if MEETING in environ:
        return None
    name = f"vllm-deep-gemm-warmup-{os.getpid()}-{secrets.token_hex(8)}"
    folder = Path(tempfile.gettempdir(), name)
    environ[MEETING] = str(folder)
    atexit.register(_remove, folder, os.getpid())
    return folder


def meeting_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder, made if it was not there; None if there is none to be had."""
    named = (os.environ if environ is None else environ).get(MEETING)
    if named is None:
        return None
    folder = Path(named)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


def _remove(folder: Path, owner: int) -> None:
    # A forked child has the parent's list of what to do at the end.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
