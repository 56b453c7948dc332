"""Decides what the planner's `nvcc` does: it answers as the real one, compiles nothing.

DeepGEMM writes the command line of every kernel into its entry, so that there is
nothing to record but an entry with a cubin that can be loaded. A shell script: a
Python interpreter for each of some hundred kernels takes longer than all the rest.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ..cubins import cubin

_SCRIPT = """\
#!/bin/sh
# Declared recording nvcc: writes the cubin of an empty kernel, compiles nothing.
case "$1" in --version) cat {version}; exit 0;; esac
while [ $# -gt 0 ]; do
  case "$1" in --output-file) cp {cubin} "$2"; exit;; esac
  shift
done
echo "declared recording nvcc: no --output-file" >&2
exit 1
"""


def install(folder: Path, version: str, sm: int) -> Path:
    """Write the program into ``folder`` and return its path.

    Args:
        folder: an empty one.
        version: what the real compiler answers to `--version`, whole: DeepGEMM's
            key holds that text.
        sm: for which the cubins are, such as 90.

    """
    answer, kernel = folder / "version", folder / "kernel.cubin"
    answer.write_text(version, errors="surrogateescape")
    kernel.write_bytes(cubin("kernel", sm))
    program = folder / "nvcc"
    program.write_text(
        _SCRIPT.format(version=shlex.quote(str(answer)), cubin=shlex.quote(str(kernel)))
    )
    program.chmod(0o755)
    return program
