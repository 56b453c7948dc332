"""Decides why a kernel is not found in a cache that looks as if it had it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compiling.kernel import Kernel
from .kernel_caches import KernelCache


@dataclass(frozen=True)
class KeyParts:
    """What DeepGEMM 2.8.1 makes an entry's name of, as the entry itself records it.

    Attributes:
        kernel: the first part of the name.
        source: text of `kernel.cu`, or "" where it is gone.
        compiler: what `nvcc --version` answered, whole.
        library: DeepGEMM's signature of its own headers.
        options: (name, value) of the compiler's options, values as JSON.

    """

    kernel: str
    source: str
    compiler: str
    library: str
    options: tuple[tuple[str, str], ...]

    @property
    def release(self) -> str:
        """The compiler's, such as 13.0.88."""
        found = re.search(r"\bV(\d[\d.]*)", self.compiler)
        return found[1] if found else "of unknown release"


def read_key_parts(entry: Path) -> KeyParts | None:
    """Read an entry, or None where it does not say."""
    try:
        meta = json.loads((entry / "meta.json").read_text())
        source = entry / "kernel.cu"
        text = source.read_text() if source.is_file() else ""
        return parse_key_parts(entry.name, text, meta)
    except (OSError, ValueError, AttributeError):
        return None


def parse_key_parts(entry: str, source: str, meta: dict[str, Any]) -> KeyParts:
    """Return the parts of an entry's name.

    Args:
        entry: the name.
        source: of the kernel.
        meta: `meta.json`, parsed.

    """
    options = meta.get("compiler_options", {})
    return KeyParts(
        kernel=entry.partition(".")[0],
        source=source,
        compiler=meta.get("compiler_info", {}).get("version", ""),
        library=meta.get("config", {}).get("extra_signature", "unknown"),
        options=tuple((n, json.dumps(v)) for n, v in sorted(options.items())),
    )


def explain(wanted: KeyParts, present: Iterable[KeyParts], sm_count: int) -> str | None:
    """Say which part of the key differs from the likest kernel there, or None.

    Args:
        wanted: the kernel that is not there.
        present: those that are.
        sm_count: SMs that the wanted one is for.

    Returns:
        None where there is no other build of this kernel: it is simply missing.

    """
    alike = [parts for parts in present if parts.kernel == wanted.kernel]
    reasons = [_reasons(wanted, parts, sm_count) for parts in alike]
    found = min(filter(None, reasons), key=len, default=None)
    return None if found is None else "; ".join(found)


def explain_misses(
    kernels: Iterable[Kernel], cache: KernelCache, sm_count: int
) -> list[str]:
    """One line for each part of the key that keeps kernels from being found.

    Args:
        kernels: what is needed.
        cache: where they are looked for.
        sm_count: SMs that they are for.

    """
    present = cache.entries()
    missing = {k.entry: k for k in kernels if k.entry not in present}
    if not missing or not present:
        return []
    there = [read_key_parts(cache.folder / name) for name in sorted(present)]
    known = [parts for parts in there if parts is not None]
    reasons = Counter(
        explain(
            parse_key_parts(k.entry, k.source, json.loads(k.record)), known, sm_count
        )
        for k in missing.values()
    )
    return [
        f"DeepGEMM cache ({cache.folder}): {count} kernels are there as others: "
        f"{reason}; they are built again"
        for reason, count in reasons.most_common()
        if reason is not None
    ]


def _reasons(wanted: KeyParts, found: KeyParts, sm_count: int) -> list[str]:
    """The parts that differ; none where these are two kernels of one model."""
    reasons = []
    if wanted.source != found.source:
        other = _other_sm_count(wanted.source, found.source, sm_count)
        if other is None:
            return []
        reasons.append(f"built for {other} SMs, and this is for {sm_count}")
    if wanted.compiler != found.compiler:
        reasons.append(_compilers(wanted, found))
    if wanted.library != found.library:
        reasons.append(f"library {found.library}, and this is {wanted.library}")
    before = dict(found.options)
    reasons += [
        f"{name} {before.get(name)}, and this is {value}"
        for name, value in wanted.options
        if before.get(name) != value
    ]
    return reasons


def _compilers(wanted: KeyParts, found: KeyParts) -> str:
    if wanted.release != found.release:
        return f"compiler {found.release}, and this is {wanted.release}"
    return f"another build of compiler {found.release}"


def _other_sm_count(wanted: str, found: str, sm_count: int) -> int | None:
    """The SM count of a source that differs from the wanted one in nothing else."""
    ours, theirs = (re.split(r"(\d+)", text) for text in (wanted, found))
    if len(ours) != len(theirs):
        return None
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    if len(pairs) == 1 and pairs[0][0] == str(sm_count) and pairs[0][1].isdigit():
        return int(pairs[0][1])
    return None
