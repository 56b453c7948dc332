"""Decides what is done about a cache before the weights load: mended, and warned of."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from .kernel_caches import EntryState, KernelCache

# Beside the entries, so that moving one there is a rename. Nothing reads it.
ASIDE = "set-aside"
_SHOWN = 3


@dataclass(frozen=True)
class Mended:
    """What one process did to a cache; another did the rest.

    Attributes:
        set_aside: names of damaged entries, which will be built again.
        repaired: names of entries that got their marker back.
        left: names of damaged entries that this user cannot move.

    """

    set_aside: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def mend(cache: KernelCache) -> Mended:
    """Set damaged entries aside and give whole ones their marker back.

    Every process may call this at the same time, without a lock: of all that
    rename one entry one succeeds. What is no entry is never touched.
    """
    done: dict[str, list[str]] = {"set_aside": [], "repaired": [], "left": []}
    for name, state in cache.judge_all():
        try:
            if state is EntryState.UNMARKED:
                (cache.folder / name / cache.marker).touch()
                done["repaired"].append(name)
            elif state is EntryState.DAMAGED and _set_aside(cache, name):
                done["set_aside"].append(name)
        except FileNotFoundError:
            continue  # another process was first
        except OSError:
            done["left"].append(name)
    return Mended(**{kind: tuple(names) for kind, names in done.items()})


def describe(cache: KernelCache, mended: Mended) -> list[str]:
    """One line for each thing that was done; none for a cache in order."""
    lines = []
    if mended.set_aside:
        lines.append(
            f"DeepGEMM cache ({cache.folder}): {_count(mended.set_aside)} damaged "
            f"({_names(mended.set_aside)}), moved to {cache.root / ASIDE}; built "
            "again now"
        )
    if mended.repaired:
        lines.append(
            f"DeepGEMM cache ({cache.folder}): {_count(mended.repaired)} without "
            f"{cache.marker} ({_names(mended.repaired)}), repaired; what copies a "
            "cache has to copy hidden files as well"
        )
    if mended.left:
        lines.append(
            f"DeepGEMM cache ({cache.folder}): {_count(mended.left)} damaged "
            f"({_names(mended.left)}) and not to be moved by this user, their kernels "
            "will fail; remove them, or name another folder with DG_JIT_CACHE_DIR"
        )
    return lines


def intruders(cache: KernelCache) -> str | None:
    """Say who else may write kernels here, or None.

    A cubin is code that the GPU runs. Members of the folder's group do not count:
    a volume of a cluster is writable by a group.
    """
    for folder in (cache.root, cache.folder):
        try:
            state = folder.stat()
        except OSError:
            continue
        who = None
        if state.st_mode & stat.S_IWOTH:
            who = f"every user (mode {stat.S_IMODE(state.st_mode):o})"
        elif state.st_uid not in (0, os.geteuid()):
            who = f"its owner, user {state.st_uid},"
        if who is not None:
            return (
                f"DeepGEMM cache ({folder}): {who} may put kernels there, and a "
                "kernel is code that this engine runs; make the folder writable by "
                "its own user alone (chmod go-w)"
            )
    return None


def _set_aside(cache: KernelCache, name: str) -> bool:
    """Move an entry out of the way; False where it was whole by then.

    Between the look and the move another process may have built it again.
    """
    aside = cache.root / ASIDE
    aside.mkdir(exist_ok=True)
    moved = aside / f"{name}.{secrets.token_hex(8)}"
    (cache.folder / name).rename(moved)
    if cache.judge_folder(moved) is not EntryState.WHOLE:
        return True
    moved.rename(cache.folder / name)
    return False


def _count(names: Sequence[str]) -> str:
    return "1 entry is" if len(names) == 1 else f"{len(names)} entries are"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
