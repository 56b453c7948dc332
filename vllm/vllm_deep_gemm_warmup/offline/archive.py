"""Decides what one file of kernels looks like, and what of such a file is taken.

A tar file: `manifest.json`, `checksums.json` (path -> SHA-256 of every other member),
`nvcc-version.txt`, plans, and `cache/<entry>/<file>`. No owner, no time: the same
kernels make the same file. No program is in it: unpacking writes our own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..cache_keys import read_key_parts
from ..kernel_caches import FOLDER, EntryState, KernelCache, deep_gemm
from ..toolchain.recorded import record, recorded_answer
from .manifest import ENTRY_FILES, FILE, Manifest, ManifestError, cubin_digest

CHECKSUMS = "checksums.json"
# What `nvcc --version` answered: DeepGEMM asks for it even where it builds nothing.
VERSION_TEXT = "nvcc-version.txt"
_TOP = (FILE, CHECKSUMS, VERSION_TEXT)
# A kernel has some 100 kB; nothing here has this.
_MOST_BYTES = 1 << 28


class ArchiveError(ValueError):
    """The file or folder cannot be used; the message is one line."""


def pack(root: Path, file: Path) -> int:
    """Write every whole entry of a cache into one file; return how many.

    Entries are taken as they are found by then: what is damaged stays behind.

    Raises:
        ArchiveError: nothing to pack, or the file is there already.
        OSError: it cannot be written.

    """
    if os.path.lexists(file):
        raise ArchiveError(f"{file}: it is there already; remove it or name another")
    cache = deep_gemm(root)
    whole = [name for name, state in cache.judge_all() if state is EntryState.WHOLE]
    if not whole:
        raise ArchiveError(f"{root}: no whole kernel in it; name a cache folder")
    members = {
        str(path.relative_to(root)): path.read_bytes()
        for path in _files(root, whole)
        if path.is_file() and not path.is_symlink()
    }
    # Of two compilers neither answers for the other's kernels.
    if len(compilers := _compilers(cache, whole)) == 1:
        members[VERSION_TEXT] = compilers.pop().encode(errors="surrogateescape")
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        _write(temporary, members)
        os.link(temporary, file)
    except FileExistsError:
        raise ArchiveError(f"{file}: it is there already; name another") from None
    finally:
        temporary.unlink(missing_ok=True)
    return len(whole)


def _compilers(cache: KernelCache, entries: Iterable[str]) -> set[str]:
    """Return what the compilers of a folder answer: as recorded, else as entries say.

    A folder that engines filled has no record.
    """
    recorded = recorded_answer(cache.root)
    if recorded is not None:
        return {recorded}
    known = (read_key_parts(cache.folder / entry) for entry in entries)
    return {parts.compiler for parts in known if parts is not None} - {""}


def _files(root: Path, entries: list[str]) -> Iterator[Path]:
    yield root / FILE
    yield from (root / FOLDER / "plans").glob("*/*.json")
    cache = deep_gemm(root)
    for entry in entries:
        yield from (cache.folder / entry / name for name in ENTRY_FILES)


def _write(path: Path, members: dict[str, bytes]) -> None:
    digests = {}
    with tarfile.open(path, "x", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(members.items()):
            digests[name] = hashlib.sha256(content).hexdigest()
            _add(archive, name, content)
        _add(archive, CHECKSUMS, json.dumps(digests, indent=1).encode())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))


def unpack(file: Path, root: Path) -> tuple[int, int]:
    """Put the kernels of a file into a cache; return (new entries, those there).

    What is there stays as it is, and a manifest gets the new kernels. Everything is
    checked before the first entry comes in, each of which comes in whole.

    Raises:
        ArchiveError: it is no such file, a member has another name or kind than
            `pack` writes, a checksum differs, or another compiler built all that
            is there: a host without one could find the kernels of only one of them.
        OSError: the file cannot be read, or the folder written.

    """
    root.mkdir(parents=True, exist_ok=True)
    staged = root / "tmp" / f"unpack-{os.getpid()}-{secrets.token_hex(8)}"
    staged.mkdir(parents=True)
    try:
        entries = _extract(file, staged)
        _check_compiler(file, staged, root)
        manifest = _joined(file, staged, root)
        counts = _publish(staged, root, entries)
        if manifest is not None:
            manifest.write(root)
        return counts
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _extract(file: Path, staged: Path) -> list[str]:
    try:
        with tarfile.open(file, "r:") as archive:
            digests = {
                name: _save(staged / name, content)
                for name, content in _members(file, archive)
            }
    except tarfile.TarError as error:
        raise ArchiveError(f"{file}: no file of `pack`: {error}") from error
    except EOFError as error:
        raise ArchiveError(f"{file}: it ends too early") from error
    _check(file, staged, digests)
    return sorted({name.split("/")[1] for name in digests if name[:6] == "cache/"})


def _members(file: Path, archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    seen = set()
    for member in archive:
        if not member.isreg() or not _is_ours(member.name):
            raise ArchiveError(f"{file}: {member.name!r} is no member of a pack")
        if member.name in seen or member.size > _MOST_BYTES:
            raise ArchiveError(f"{file}: {member.name!r} comes twice or is too large")
        seen.add(member.name)
        content = archive.extractfile(member)
        assert content is not None  # it is a regular file
        yield member.name, content.read()


def _is_ours(name: str) -> bool:
    pattern = deep_gemm(Path()).pattern
    files = "|".join(map(re.escape, ENTRY_FILES))
    kinds = (rf"cache/{pattern}/({files})", rf"{FOLDER}/plans/\w+/\w+\.json")
    return name in _TOP or any(re.fullmatch(kind, name) for kind in kinds)


def _save(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _check(file: Path, staged: Path, digests: dict[str, str]) -> None:
    found = digests.pop(CHECKSUMS, None)
    if found is None:
        raise ArchiveError(f"{file}: no {CHECKSUMS} in it, it is not whole")
    try:
        expected = json.loads((staged / CHECKSUMS).read_text())
    except ValueError as error:
        raise ArchiveError(f"{file}: {CHECKSUMS} is damaged") from error
    if expected != digests:
        wrong = sorted(
            name
            for name in {*expected, *digests}
            if expected.get(name) != digests.get(name)
        )
        raise ArchiveError(f"{file}: {wrong[0]} is not what was packed")
    for name, state in deep_gemm(staged).judge_all():
        if state is not EntryState.WHOLE:
            raise ArchiveError(f"{file}: {name} is not a whole kernel")


def _check_compiler(file: Path, staged: Path, root: Path) -> None:
    if not (staged / VERSION_TEXT).is_file():
        return
    theirs = (staged / VERSION_TEXT).read_bytes().decode(errors="surrogateescape")
    cache = deep_gemm(root)
    mine = _compilers(cache, cache.entries())
    if len(mine) == 1 and mine != {theirs}:
        raise ArchiveError(
            f"{file}: another compiler built it than what is in {root}; unpack it "
            "into a folder of its own"
        )


def _joined(file: Path, staged: Path, root: Path) -> Manifest | None:
    """Return the manifest that the folder is to have; None where neither has one."""
    try:
        theirs = Manifest.read(staged) if (staged / FILE).is_file() else None
    except ManifestError as error:
        raise ArchiveError(f"{file}: {FILE} is damaged") from error
    if theirs is not None:
        theirs = replace(theirs, kernels=_as_it_will_be(theirs, root))
    try:
        mine = Manifest.read(root) if (root / FILE).is_file() else None
    except ManifestError as error:
        raise ArchiveError(str(error)) from error
    return mine.join(theirs) if mine and theirs else mine or theirs


def _as_it_will_be(manifest: Manifest, root: Path) -> dict[str, str]:
    """Return its kernels; one that is there will stay, and may have other bytes."""
    cache = deep_gemm(root)
    present = cache.entries()
    return {
        entry: cubin_digest(cache, entry) if entry in present else digest
        for entry, digest in manifest.kernels.items()
    }


def _publish(staged: Path, root: Path, entries: list[str]) -> tuple[int, int]:
    cache = deep_gemm(root)
    cache.folder.mkdir(exist_ok=True)
    new = 0
    for entry in entries:
        # A folder that has something in it is not replaced by a rename.
        try:
            (staged / "cache" / entry).rename(cache.folder / entry)
            new += 1
        except OSError:
            if cache.judge(entry) is not EntryState.WHOLE:
                raise
    for path in (staged / FOLDER).rglob("*.json"):
        target = root / path.relative_to(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            path.replace(target)
    if (staged / VERSION_TEXT).is_file() and recorded_answer(root) is None:
        text = (staged / VERSION_TEXT).read_bytes().decode(errors="surrogateescape")
        # Where several built what was there, none answers for the others.
        if _compilers(cache, cache.entries()) <= {text}:
            record(root, text)
    return new, len(entries) - new
