"""Decides whether a file is a whole cubin, as far as a file can tell."""

from __future__ import annotations

import os
import struct
from pathlib import Path

_HEADER = struct.Struct("<4sBB10xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_CLASS_64, _MACHINE_CUDA, _NO_BITS = 2, 190, 8


def is_whole(path: Path) -> bool:
    """Whether the file is an ELF64 cubin with all of its parts within it.

    Finds what a copy that broke off, a full disk or a compiler that was killed
    leave: no file, an empty or shorter one, one of zeros. A byte that changed
    inside a part is not found; a manifest has checksums for that.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _holds_its_parts(file.read(_HEADER.size), file.fileno(), size)
    except (OSError, struct.error):
        return False


def _holds_its_parts(header: bytes, file: int, size: int) -> bool:
    (
        magic, elf_class, _, _, machine, _, _, segments_at, sections_at, _, _,
        segment_size, segments, section_size, sections, _,
    ) = _HEADER.unpack(header)  # fmt: skip
    if (magic, elf_class, machine) != (b"\x7fELF", _CLASS_64, _MACHINE_CUDA):
        return False
    if not sections or section_size != _SECTION.size:
        return False
    tables_end = max(
        sections_at + sections * section_size, segments_at + segments * segment_size
    )
    if tables_end > size:
        return False
    table = os.pread(file, sections * section_size, sections_at)
    return all(
        kind == _NO_BITS or offset + length <= size
        for _, kind, _, _, offset, length, *_ in _SECTION.iter_unpack(table)
    )
