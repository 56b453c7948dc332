"""Decides where DeepGEMM's kernels go where its own folder cannot be written."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .kernel_caches import FOLDER, EntryState, KernelCache

# A kernel is some 100 kB, and nvcc's own files are larger for a moment.
_PROBE_BYTES = 1 << 20
# In a stand-in for a cache: the path of that cache.
ORIGIN = "stands-in-for"


@dataclass(frozen=True)
class Place:
    """Where the kernels of this node go.

    Attributes:
        root: for `DG_JIT_CACHE_DIR`.
        reason: why it is not the folder asked for, or None.

    """

    root: Path
    reason: str | None = None


def choose(
    cache_at: Callable[[Path], KernelCache], root: Path, temporary: Path | None = None
) -> Place:
    """Return `root`, or a folder in its place if it cannot be written.

    DeepGEMM 2.8.1 fails where it has a kernel to build and cannot write, and reads
    `DG_JIT_CACHE_DIR` once, before it knows: this is to be asked before. The folder
    in its place holds links to the entries of `root`, so that a cache that has all
    kernels serves and nothing is written to it. Every process of a user finds the
    same folder. Where there is no such place either, `root` is returned.
    """
    reason = write_problem(root)
    if reason is None:
        return Place(root)
    try:
        stand_in = _private(temporary or Path(tempfile.gettempdir()), root)
        if write_problem(stand_in) is not None:
            return Place(root)
        _link_entries(cache_at(root), cache_at(stand_in))
        _link_plans(root, stand_in)
        (stand_in / ORIGIN).write_text(f"{root}\n{reason}\n")
    except OSError:
        return Place(root)
    return Place(stand_in, reason)


def describe(cache: KernelCache) -> str | None:
    """Say which kernels lie beside the cache that was asked for, or None."""
    try:
        asked, reason = (cache.root / ORIGIN).read_text().splitlines()
    except (OSError, ValueError):
        return None
    own = [
        name
        for name in cache.entries()
        if not (cache.folder / name).is_symlink()
        and not (cache.folder / name / cache.cubin).is_symlink()
    ]
    if not own:
        return None
    return (
        f"DeepGEMM cache ({asked}): {reason}, and {len(own)} kernels are missing in "
        f"it; they are in {cache.root}, which may go with this container; fill the "
        "cache with `vllm-deep-gemm compile`, or make it writable"
    )


def write_problem(root: Path) -> str | None:
    """Why no kernel can be built in the folder, or None; it is made if need be.

    Found by writing, in the folder that DeepGEMM builds in: rights do not tell of
    a disk that is full, read-only or over its quota.
    """
    if root.parts[:1] == ("~",):
        return "there is no home directory"
    probe = root / "tmp" / f"probe-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        for folder in (root / "cache", probe.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with _removed(probe, root):
            probe.write_bytes(bytes(_PROBE_BYTES))
            # As an entry comes in.
            probe.rename(root / "cache" / probe.name)
    except OSError as error:
        return error.strerror or str(error)
    return None


@contextlib.contextmanager
def _removed(probe: Path, root: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in (probe, root / "cache" / probe.name):
            with contextlib.suppress(OSError):
                path.unlink()


def _private(temporary: Path, root: Path) -> Path:
    """A folder for `root` that no other user may write.

    Raises:
        OSError: it cannot be made, or is someone else's.

    """
    parent = temporary / f"vllm-deep-gemm-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    state = parent.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{parent} may be written by another user")
    name = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]
    folder = parent / f"kernels-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _link_entries(from_cache: KernelCache, to_cache: KernelCache) -> None:
    """Give every whole kernel of one cache an entry in the other.

    Links of entries that are gone are removed.
    """
    for path in to_cache.folder.iterdir():
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)
    known = to_cache.entries()
    for name, state in from_cache.judge_all():
        entry = (from_cache.folder / name).absolute()
        if name in known:
            continue
        if state is EntryState.WHOLE:
            with contextlib.suppress(FileExistsError):  # another process was first
                (to_cache.folder / name).symlink_to(entry)
        elif state is EntryState.UNMARKED:
            _link_files(entry, to_cache)


def _link_plans(root: Path, stand_in: Path) -> None:
    """With the plans that came with it, a full cache needs no planning."""
    for path in (root / FOLDER / "plans").glob("*/*.json"):
        link = stand_in / path.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(path.absolute())


def _link_files(entry: Path, cache: KernelCache) -> None:
    """Make an entry of links to the files of one that has lost its marker."""
    made = cache.root / "tmp" / f"{entry.name}-{secrets.token_hex(8)}"
    made.mkdir()
    for path in entry.iterdir():
        (made / path.name).symlink_to(path)
    (made / cache.marker).touch()
    try:
        made.rename(cache.folder / entry.name)
    except OSError:  # another process was first
        shutil.rmtree(made)
