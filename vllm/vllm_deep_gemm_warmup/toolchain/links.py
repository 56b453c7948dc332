"""Decides how pip's toolkit is given an installed one's shape: a folder of links."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from .facts import CACHE_VARIABLES, Facts, breaks_shell

LINKS_FOLDER = "deep_gemm_warmup"


def cuda_home_links(root: Path, facts: Facts) -> Path:
    """A folder shaped like a CUDA toolkit whose entries point into `root`.

    `lib64` carries each library under its full and its unversioned name, which
    is how FlashInfer links (`-L$CUDA_HOME/lib64 -lcudart`); `lib64/stubs` gets
    the driver's `libcuda.so` where a driver is installed. The folder is named
    by its content, published by rename, and shared by every process of a user.

    Returns `root` itself when no folder can be written: that is enough for
    DeepGEMM, though not for FlashInfer.
    """
    links = _toolkit_links(root, facts.driver_folders)
    text = "\n".join(f"{name} -> {target}" for name, target in sorted(links.items()))
    name = f"cuda-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    for parent in _link_parents(facts):
        if breaks_shell(parent):
            continue  # DeepGEMM could not start a compiler there
        try:
            return _publish(parent, name, links)
        except OSError:
            continue  # not writable, or not ours: the next place may be
    return root


def _toolkit_links(root: Path, driver_folders: Iterable[Path]) -> dict[str, str]:
    """Name in the folder of links -> absolute or relative target."""
    links = {
        name: str(root / name)
        for name in ("bin", "include", "nvvm")
        if (root / name).is_dir()
    }
    for library in sorted((root / "lib").glob("lib*")):
        stem = re.match(r"lib.+?\.(?:so|a)(?=\.|$)", library.name)
        if stem and library.is_file():
            links[f"lib64/{library.name}"] = str(library)
            # libnvrtc.alt.so.13 keeps its own short name, libnvrtc.alt.so.
            links.setdefault(f"lib64/{stem[0]}", library.name)
    for folder in driver_folders:
        if (folder / "libcuda.so.1").exists():
            links["lib64/stubs/libcuda.so"] = str(folder / "libcuda.so.1")
            break
    links["lib"] = "lib64"
    return links


def _link_parents(facts: Facts) -> Iterable[Path]:
    """Where a folder of links may lie: vLLM's cache, then a private temp folder."""
    root, xdg, home = (facts.get(name) for name in CACHE_VARIABLES)
    if root:
        yield Path(root).expanduser() / LINKS_FOLDER
    elif xdg:
        yield Path(xdg) / "vllm" / LINKS_FOLDER
    elif home:
        yield Path(home) / ".cache" / "vllm" / LINKS_FOLDER
    yield Path(tempfile.gettempdir()) / f"vllm-deep-gemm-{os.getuid()}"


def _publish(parent: Path, name: str, links: Mapping[str, str]) -> Path:
    """Create `parent/name` with these links unless it is already whole.

    Raises:
        OSError: the folder cannot be written, or belongs to someone else.

    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = parent.lstat()
    # Links of another user could name any compiler.
    if state.st_uid not in (os.getuid(), 0) or state.st_mode & 0o002:
        raise PermissionError(f"{parent} is writable by another user")
    final = parent / name
    if _is_whole(final, links):
        return final
    staged = parent / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    for link, target in links.items():
        (staged / link).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (staged / link).symlink_to(target)
    try:
        return _move_in_place(staged, final, links)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _move_in_place(staged: Path, final: Path, links: Mapping[str, str]) -> Path:
    """Rename; when another process was first, its folder serves as well."""
    for _ in range(8):
        try:
            staged.rename(final)
        except OSError:
            if _is_whole(final, links):
                return final
            if not os.path.lexists(final):
                raise
            aside = final.with_name(f"{staged.name}.damaged")
            with contextlib.suppress(FileNotFoundError):  # someone else moved it
                final.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return final
    raise FileExistsError(f"{final} keeps changing")


def _is_whole(folder: Path, links: Mapping[str, str]) -> bool:
    try:
        return all(str((folder / n).readlink()) == t for n, t in links.items())
    except OSError:
        return False
