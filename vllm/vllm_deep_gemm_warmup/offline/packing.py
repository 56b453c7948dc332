"""Decides what `pack DIR FILE` and `unpack FILE DIR` take and say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import archive


def pack(argv: Sequence[str]) -> int:
    """Run `vllm-deep-gemm pack ARGV`; 0, or 2 where nothing was written."""
    parser = argparse.ArgumentParser(
        prog="vllm-deep-gemm pack",
        description="Make one file of a folder of DeepGEMM's kernels.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("file", type=Path, metavar="FILE")
    given = parser.parse_args(argv)

    def run() -> str:
        kernels = archive.pack(given.folder, given.file)
        size = given.file.stat().st_size / (1 << 20)
        return f"{given.file}: {kernels} kernels, {size:.1f} MiB"

    return _report(run)


def unpack(argv: Sequence[str]) -> int:
    """Run `vllm-deep-gemm unpack ARGV`; 0, or 2 where no kernel was written."""
    parser = argparse.ArgumentParser(
        prog="vllm-deep-gemm unpack",
        description="Put the kernels of such a file into a folder for "
        "DG_JIT_CACHE_DIR. What is there stays, and another compiler's kernels are "
        "refused. A kernel is code: take files "
        "from those alone whose code you would run.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("folder", type=Path, metavar="DIR")
    given = parser.parse_args(argv)

    def run() -> str:
        new, old = archive.unpack(given.file, given.folder)
        return f"{given.folder}: {new} new kernels, {old} were there"

    return _report(run)


def _report(run: Callable[[], str]) -> int:
    try:
        print(run())
    except (archive.ArchiveError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
