"""A declared fake `nvcc`: answers in milliseconds with an ELF cubin of one kernel.

It stands in for the compiler of DeepGEMM's and FlashInfer's run-time kernels and does
nothing else; any other use of it fails. Its version text says that it is a fake, so
that DeepGEMM, which hashes that text, never takes its output for the real one's.
It imports this package and the standard library only.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_deep_gemm_warmup.cubins import cubin

RELEASE = "13.0"
VERSION = f"""\
nvcc: NVIDIA (R) Cuda compiler driver
Declared fake: writes cubins of empty kernels, compiles nothing
Built on Thu_Jan__1_00:00:00_AM_UTC_1970
Cuda compilation tools, release {RELEASE}, V{RELEASE}.0
Build cuda_{RELEASE}.r{RELEASE}/declared_fake_0
"""
_MODULE = "vllm_deep_gemm_warmup.proof.fake_nvcc"
_RUN = """\
import sys
sys.path.append({path!r})
from {module} import main
sys.exit(main(sys.argv[1:]))"""
_KERNEL = re.compile(r"&\s*(?:\w+::)*(\w+)\s*<")
_PLAIN = re.compile(r"__global__\s+(?:\w+\s+)*?void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)")
_ARCHITECTURE = re.compile(r"-arch(?:itecture)?=sm_(\d+)")


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

    The program is a shell line that runs this module without site packages: an
    interpreter with them starts ten times slower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvcc"
    run = _RUN.format(path=str(Path(__file__).resolve().parents[2]), module=_MODULE)
    line = shlex.join([python, "-I", "-S", "-c", run])
    program.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    program.chmod(0o755)
    return program
