"""A declared fake `nvcc`: answers in milliseconds with an ELF cubin of one kernel.

It stands in for the compiler of DeepGEMM's and FlashInfer's run-time kernels and does
nothing else; any other use of it fails. Its version text says that it is a fake, so
that DeepGEMM, which hashes that text, never takes its output for the real one's.
This file runs as a program of its own: it imports the standard library only.
"""

import re
import shlex
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

RELEASE = "13.0"
VERSION = f"""\
nvcc: NVIDIA (R) Cuda compiler driver
Declared fake: writes cubins of empty kernels, compiles nothing
Built on Thu_Jan__1_00:00:00_AM_UTC_1970
Cuda compilation tools, release {RELEASE}, V{RELEASE}.0
Build cuda_{RELEASE}.r{RELEASE}/declared_fake_0
"""
_KERNEL = re.compile(r"&\s*(?:\w+::)*(\w+)\s*<")
_PLAIN = re.compile(r"__global__\s+(?:\w+\s+)*?void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)")
_ARCHITECTURE = re.compile(r"-arch(?:itecture)?=sm_(\d+)")
# Header values that nvcc 13.0 writes; the second byte of the flags is the SM's number.
_OSABI, _ABI_VERSION, _MACHINE, _FLAGS = 0x41, 8, 190, 0x06000004
_ENTRY_POINT = 0x10  # st_other of a __global__ function
_HEADER, _SECTION, _SYMBOL = 64, 64, 24


def kernel_name(source: str) -> str:
    """Return the name of the kernel that ``source`` instantiates.

    Both libraries take the address of one template instance in a function of their
    own; a source without one gets the name of its first ``__global__`` function.
    """
    found = _KERNEL.search(source) or _PLAIN.search(source)
    return found[1] if found else "kernel"


def architecture(arguments: Sequence[str]) -> int:
    """Return the SM number that is compiled for; Hopper's where none is named."""
    found = _ARCHITECTURE.search(" ".join(arguments))
    return int(found[1]) if found else 90


def cubin(name: str, sm: int = 90) -> bytes:
    """Return an ELF64 cubin for ``sm`` with the one kernel ``name`` of 128 bytes."""
    code = bytes(128)
    names = b"\0.shstrtab\0.strtab\0.symtab\0.text." + name.encode() + b"\0"
    strings = b"\0" + name.encode() + b"\0"
    symbols = bytes(_SYMBOL) + struct.pack(
        "<IBBHQQ", 1, (1 << 4) | 2, _ENTRY_POINT, 4, 0, len(code)
    )
    parts = (names, strings, symbols, code)
    kinds = (
        # name, type, flags, link, info, align, entry size
        (names.index(b".shstrtab"), 3, 0, 0, 0, 1, 0),
        (names.index(b".strtab"), 3, 0, 0, 0, 1, 0),
        (names.index(b".symtab"), 2, 0, 2, 1, 8, _SYMBOL),
        (names.index(b".text."), 1, 6, 3, 1, 128, 0),
    )
    blob, sections = bytearray(_HEADER), bytearray(_SECTION)
    for part, (at, kind, flags, link, info, align, size) in zip(
        parts, kinds, strict=True
    ):
        blob += bytes(-len(blob) % align)
        sections += struct.pack(
            "<IIQQQQIIQQ",
            at, kind, flags, 0, len(blob), len(part), link, info, align, size,
        )  # fmt: skip
        blob += part
    blob += bytes(-len(blob) % 8)
    header = struct.pack(
        "<4sBBBBB7sHHIQQQIHHHHHH",
        b"\x7fELF", 2, 1, 1, _OSABI, _ABI_VERSION, b"",
        2, _MACHINE, 1, 0, 0, len(blob), _FLAGS | sm << 8,
        _HEADER, 0, 0, _SECTION, len(kinds) + 1, 1,
    )  # fmt: skip
    blob[: len(header)] = header
    return bytes(blob + sections)


def _output(arguments: Sequence[str]) -> str | None:
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag in ("-o", "--output-file"):
            return value
        if flag.startswith(("-o=", "--output-file=")):
            return flag.partition("=")[2]
    return None


def main(arguments: Sequence[str]) -> int:
    """Answer one command line of ``nvcc``; return its exit status."""
    if "--version" in arguments or "-V" in arguments:
        sys.stdout.write(VERSION)
        return 0
    target = _output(arguments)
    sources = [text for text in arguments if text.endswith(".cu") and text != target]
    wants_cubin = "--cubin" in arguments or "-cubin" in arguments
    if not (wants_cubin and target and len(sources) == 1):
        sys.stderr.write(
            "declared fake nvcc: only --version, and --cubin of one .cu file; "
            f"got {shlex.join(arguments)}\n"
        )
        return 1
    source = Path(sources[0])
    if not source.is_file():
        sys.stderr.write(f"declared fake nvcc: no such file: {source}\n")
        return 1
    name = kernel_name(source.read_text())
    Path(target).write_bytes(cubin(name, architecture(arguments)))
    return 0


def install(folder: Path, python: str = sys.executable) -> Path:
    """Write an executable ``nvcc`` into ``folder`` and return its path.

    The program is a shell line that runs this file without site packages: an
    interpreter with them starts ten times slower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvcc"
    line = shlex.join([python, "-I", "-S", str(Path(__file__).resolve())])
    program.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
