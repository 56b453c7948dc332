"""Decides what `status [DIR]` says of a folder of kernels."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .. import cache_care
from ..cache_keys import read_key_parts
from ..kernel_caches import EntryState, KernelCache, deep_gemm, deep_gemm_root
from .manifest import FILE, Manifest, ManifestError


def main(argv: Sequence[str]) -> int:
    """Run `vllm-deep-gemm status ARGV`.

    0: all is well; 1: an entry is damaged or a kernel of the manifest is missing;
    2: there is no such folder.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-deep-gemm status",
        description="Say what is in a folder of DeepGEMM's kernels. Changes nothing.",
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR",
        help="default: the folder that vLLM would take")  # fmt: skip
    root = parser.parse_args(argv).folder or deep_gemm_root()
    cache = deep_gemm(root)
    if not root.is_dir():
        print(f"{root}: no such folder", file=sys.stderr)
        return 2
    lines, healthy = _describe(cache)
    print("\n".join(lines))
    return 0 if healthy else 1


def _describe(cache: KernelCache) -> tuple[list[str], bool]:
    states = dict(cache.judge_all())
    counts = Counter(states.values())
    whole = [name for name, state in states.items() if state is EntryState.WHOLE]
    size = sum((cache.folder / name / cache.cubin).stat().st_size for name in whole)
    lines = [f"folder    {cache.root}", f"kernels   {len(whole)}, {size >> 10} KiB"]
    lines += [f"compiler  {line}" for line in _compilers(cache, whole)]
    for state in (EntryState.DAMAGED, EntryState.UNMARKED, EntryState.FOREIGN):
        named = [name for name, its in states.items() if its is state]
        lines += [f"{state.value:<9} {name}" for name in named]
    intruder = cache_care.intruders(cache)
    lines += [] if intruder is None else [f"warning   {intruder}"]
    missing = _manifest(cache.root, lines)
    healthy = not counts[EntryState.DAMAGED] + counts[EntryState.UNMARKED] + missing
    return lines, healthy


def _compilers(cache: KernelCache, whole: Sequence[str]) -> list[str]:
    parts = filter(None, (read_key_parts(cache.folder / name) for name in whole))
    counts = Counter((part.release, part.library) for part in parts)
    return [
        f"nvcc {release}, library {library}: {count} kernels"
        for (release, library), count in sorted(counts.items())
    ]


def _manifest(root: Path, lines: list[str]) -> int:
    """Add what the manifest says; return how many of its kernels are not there."""
    if not (root / FILE).exists():
        lines.append("manifest  none")
        return 0
    try:
        manifest = Manifest.read(root)
    except ManifestError as error:
        lines.append(f"manifest  {error}")
        return 1
    problems = list(manifest.problems(root))
    count, wrong = len(manifest.kernels), len(problems)
    versions = ", ".join(f"{name} {text}" for name, text in manifest.versions.items())
    lines += [
        f"manifest  {manifest.purpose}",
        *(f"          {purpose}" for purpose in manifest.joined),
        f"          {manifest.device} ({manifest.target}), {versions}",
        f"          {count} kernels of {manifest.specs} specs, {wrong} not as built",
        *(f"missing   {line}" for line in problems),
    ]
    return wrong
