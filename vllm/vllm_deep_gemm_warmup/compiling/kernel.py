"""Decides what is known of a kernel before it is built: all that its compiler needs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# Stand in a record for what differs from one machine or build to the next; none of it
# enters DeepGEMM's key.
_NVCC = "@NVCC@"
_FOLDER = "@FOLDER@"
_LIBRARY = "@LIBRARY@"


@dataclass(frozen=True)
class Places:
    """Where a kernel is built.

    Attributes:
        nvcc: the compiler.
        folder: an empty one, in which it runs.
        library: DeepGEMM's package, with the headers.

    """

    nvcc: Path
    folder: Path
    library: Path

    def take_out(self, text: str) -> str:
        """The text with a mark in place of each path, the longest first."""
        for path, mark in self._marks():
            text = text.replace(str(path), mark)
        return text

    def fill_in(self, text: str) -> str:
        """Inverse of ``take_out``."""
        for path, mark in self._marks():
            text = text.replace(mark, str(path))
        return text

    def _marks(self) -> list[tuple[Path, str]]:
        marks = [(self.folder, _FOLDER), (self.library, _LIBRARY), (self.nvcc, _NVCC)]
        return sorted(marks, key=lambda item: -len(str(item[0])))


@dataclass(frozen=True)
class Kernel:
    """One kernel of DeepGEMM 2.8.1, as the library itself would build it.

    Attributes:
        entry: name of its folder in the cache, `<kernel>.<hash>`.
        source: text of `kernel.cu`.
        record: text of `meta.json`, with marks in place of paths.
        shape: JSON of a call that takes it (a `Shape` of its entry point).

    """

    entry: str
    source: str
    record: str
    shape: str

    def meta(self, places: Places) -> str:
        """What the library writes into `meta.json` when it builds here."""
        return places.fill_in(self.record)

    def command(self, places: Places) -> list[str]:
        """The compiler's command line; it writes `kernel.cubin` in the folder."""
        return shlex.split(json.loads(self.meta(places))["command"])

    @property
    def unusual(self) -> str | None:
        """The option that asks for more of the library than a compile, or None."""
        options = json.loads(self.record)["compiler_options"]
        return next((name for name in _MORE_THAN_A_COMPILE if options.get(name)), None)

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Kernel:
        """Inverse of ``to_json``.

        Raises:
            KeyError, TypeError: a field is missing or is no text.

        """
        texts = {field.name: value[field.name] for field in fields(cls)}
        if not all(isinstance(text, str) for text in texts.values()):
            raise TypeError(f"kernel ({texts['entry']!r}): a field is not a text")
        return cls(**texts)


# The library looks at what the compiler said, or writes more files.
_MORE_THAN_A_COMPILE = (
    "check_no_spills",
    "check_no_local_memory",
    "dump_ptx",
    "dump_sass",
    "ptxas_verbose",
    "post_hook",
)


def shape_text(shape: Mapping[str, Any]) -> str:
    """The JSON by which a plan names a call."""
    return json.dumps(shape, sort_keys=True)
