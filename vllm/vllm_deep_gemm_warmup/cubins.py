"""Decides what a cubin is: whether a file is a whole one, and an empty kernel's."""

from __future__ import annotations

import os
import struct
from pathlib import Path

_HEADER = struct.Struct("<4sBB10xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_CLASS_64, _MACHINE_CUDA, _NO_BITS = 2, 190, 8
# Header values that nvcc 13.0 writes; the second byte of the flags is the SM's number.
_OSABI, _ABI_VERSION, _FLAGS = 0x41, 8, 0x06000004
_ENTRY_POINT = 0x10  # st_other of a __global__ function


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


def cubin(name: str, sm: int = 90) -> bytes:
    """Return an ELF64 cubin for ``sm`` with the one kernel ``name`` of 128 bytes."""
    code = bytes(128)
    names = b"\0.shstrtab\0.strtab\0.symtab\0.text." + name.encode() + b"\0"
    strings = b"\0" + name.encode() + b"\0"
    symbols = bytes(_SYMBOL.size) + _SYMBOL.pack(
        1, (1 << 4) | 2, _ENTRY_POINT, 4, 0, len(code)
    )
    parts = (names, strings, symbols, code)
    kinds = (
        # name, type, flags, link, info, align, entry size
        (names.index(b".shstrtab"), 3, 0, 0, 0, 1, 0),
        (names.index(b".strtab"), 3, 0, 0, 0, 1, 0),
        (names.index(b".symtab"), 2, 0, 2, 1, 8, _SYMBOL.size),
        (names.index(b".text."), 1, 6, 3, 1, 128, 0),
    )
    blob, sections = bytearray(_HEADER.size), bytearray(_SECTION.size)
    for part, (at, kind, flags, link, info, align, size) in zip(
        parts, kinds, strict=True
    ):
        blob += bytes(-len(blob) % align)
        sections += _SECTION.pack(
            at, kind, flags, 0, len(blob), len(part), link, info, align, size,
        )  # fmt: skip
        blob += part
    blob += bytes(-len(blob) % 8)
    header = struct.pack(
        "<4sBBBBB7sHHIQQQIHHHHHH",
        b"\x7fELF", 2, 1, 1, _OSABI, _ABI_VERSION, b"",
        2, _MACHINE_CUDA, 1, 0, 0, len(blob), _FLAGS | sm << 8,
        _HEADER.size, 0, 0, _SECTION.size, len(kinds) + 1, 1,
    )  # fmt: skip
    blob[: len(header)] = header
    return bytes(blob + sections)
