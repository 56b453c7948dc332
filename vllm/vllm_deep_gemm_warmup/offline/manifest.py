"""Decides what a folder of kernels says of itself: planned for what, and what is in it.

`<root>/manifest.json`, beside `cache/`. A manifest proves nothing alone: what it lists
is compared with what is there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from ..kernel_caches import KernelCache, deep_gemm

FILE = "manifest.json"
_FORMAT = 1
# What an entry is to be copied with; anything else in its folder is not ours.
ENTRY_FILES = (".committed", "kernel.cu", "kernel.cubin", "meta.json")


class ManifestError(ValueError):
    """There is no manifest that can be used; the message says why."""


@dataclass(frozen=True)
class Manifest:
    """What kernels were built for, and which they are.

    Attributes:
        model: as it was given to `vllm serve`.
        arguments: those after it.
        device: what the stand-in posed as.
        target: such as `sm90-132sm`, or several with `and` between them.
        versions: of the packages that decide on a kernel, by name.
        library: digest of DeepGEMM's compiled part.
        compiler: what `nvcc --version` answered, whole: it is part of each key.
        variables: those that were set and decide on a kernel, by name.
        specs: how many were planned.
        kernels: entry -> SHA-256 of its cubin; what is planned and not built has "".
        joined: what others that came into the folder later were for, a line each.

    """

    model: str
    arguments: tuple[str, ...]
    device: str
    target: str
    versions: Mapping[str, str]
    library: str
    compiler: str
    variables: Mapping[str, str]
    specs: int
    kernels: Mapping[str, str]
    joined: tuple[str, ...] = ()

    @property
    def purpose(self) -> str:
        """What it was built for, in a line."""
        return " ".join((self.model, *self.arguments))

    @classmethod
    def read(cls, root: Path) -> Self:
        """Read the manifest of a folder.

        Raises:
            ManifestError: there is none, or it is not one that this code knows.

        """
        path = root / FILE
        try:
            value = json.loads(path.read_text())
            if value.pop("format") != _FORMAT:
                raise ManifestError(f"{path}: another format; use the version of it")
            lists = {n: tuple(v) for n, v in value.items() if isinstance(v, list)}
            return cls(**{**value, **lists})
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror}") from error
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ManifestError(f"{path}: it is damaged; compile again") from error

    def write(self, root: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            OSError: the folder cannot be written.

        """
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        temporary = root / f"{FILE}.{secrets.token_hex(8)}"
        try:
            temporary.write_text(text)
            temporary.replace(root / FILE)
        finally:
            temporary.unlink(missing_ok=True)

    def join(self, other: Self) -> Self:
        """Return the manifest of a folder that another's kernels have come into.

        What both list is as this one has it: an entry that was there has stayed.
        """
        added = dict.fromkeys((*self.joined, other.purpose, *other.joined))
        added.pop(self.purpose, None)
        return replace(
            self,
            specs=self.specs + (other.specs if added.keys() - self.joined else 0),
            kernels={**other.kernels, **self.kernels},
            joined=tuple(added),
        )

    def problems(self, root: Path) -> Iterator[str]:
        """Yield a line for each kernel that is missing or is not what was built."""
        cache = deep_gemm(root)
        present = cache.entries()
        for entry, digest in self.kernels.items():
            if entry not in present:
                yield f"{entry}: missing"
            elif not digest or cubin_digest(cache, entry) != digest:
                yield f"{entry}: not the kernel that was built"


def version_of(distribution: str) -> str:
    """Version of an installed package, or `unknown`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def cubin_digest(cache: KernelCache, entry: str) -> str:
    """SHA-256 of the entry's kernel.

    Raises:
        OSError: there is none.

    """
    content = (cache.folder / entry / cache.cubin).read_bytes()
    return hashlib.sha256(content).hexdigest()
