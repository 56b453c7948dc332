"""A cubin written by hand: what a driver reads of it, and no code."""

import struct

NVIDIA = 190


def cubin(*names: str, architecture: int = 90, machine: int = NVIDIA) -> bytes:
    """ELF bytes with one kernel symbol per name, for ``sm_<architecture>``."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    sections = b"\0.strtab\0.symtab\0"
    symbols, offset = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0), 1
    for name in names:
        symbols += struct.pack("<IBBHQQ", offset, 0x12, 0x10, 1, 0, 16)
        offset += len(name) + 1
    at_strings = 64
    at_symbols = at_strings + len(strings)
    at_sections = at_symbols + len(symbols)
    at_table = at_sections + len(sections)

    def section(name: int, kind: int, at: int, size: int, link: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, size, link, 0, 1, 24)

    table = section(0, 0, 0, 0, 0)
    table += section(1, 3, at_strings, len(strings), 0)
    table += section(9, 2, at_symbols, len(symbols), 1)
    table += section(1, 3, at_sections, len(sections), 0)
    identity = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
    header = identity + struct.pack(
        "<HHIQQQIHHHHHH",
        2, machine, 1, 0, 0, at_table, architecture << 8, 64, 56, 0, 64, 4, 3,
    )  # fmt: skip
    return header + strings + symbols + sections + table
