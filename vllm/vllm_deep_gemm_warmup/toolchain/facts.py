"""Decides what the choice of a compiler depends on; reads it in one place."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .answer import PATIENCE

HOME_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
COMPILER_VARIABLE = "DG_JIT_NVCC_COMPILER"
HOST_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
CACHE_VARIABLES = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME")
FALLBACK_HOME = Path("/usr/local/cuda")

_VARIABLES = (
    *HOME_VARIABLES,
    COMPILER_VARIABLE,
    *HOST_FLAG_VARIABLES,
    *CACHE_VARIABLES,
    "NVCC_CCBIN",
    "PATH",
)
_DRIVER_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
)


@dataclass(frozen=True)
class Facts:
    """What the lookup depends on. Hashable, so that answers can be cached.

    Attributes:
        variables: (name, value) of the environment variables that matter and
            are set to a non-empty value.
        pip_roots: toolkits that pip unpacked, best first.
        fallback: the home DeepGEMM takes when it is told nothing.
        driver_folders: where a driver's `libcuda.so.1` may lie.
        patience: seconds that `nvcc --version` may take (a cold network disk).

    """

    variables: tuple[tuple[str, str], ...]
    pip_roots: tuple[Path, ...] = ()
    fallback: Path = FALLBACK_HOME
    driver_folders: tuple[Path, ...] = ()
    patience: float = PATIENCE

    def get(self, name: str) -> str | None:
        """The variable's value; None where it is unset or empty."""
        return dict(self.variables).get(name)

    def with_home(self, home: Path) -> Facts:
        """The same facts with CUDA_HOME set to `home`."""
        rest = tuple(item for item in self.variables if item[0] != "CUDA_HOME")
        return replace(self, variables=(*rest, ("CUDA_HOME", str(home))))

    def which(self, program: str) -> Path | None:
        """The program that PATH leads to, or None."""
        found = shutil.which(program, path=self.get("PATH") or "")
        return Path(found) if found else None


def read_facts(
    environ: Mapping[str, str] | None = None,
    search_path: Iterable[str] | None = None,
    fallback: Path = FALLBACK_HOME,
) -> Facts:
    """Read the facts of this process: environment, `sys.path`, driver folders."""
    environ = os.environ if environ is None else environ
    search_path = sys.path if search_path is None else search_path
    return Facts(
        variables=tuple((n, environ[n]) for n in _VARIABLES if environ.get(n)),
        pip_roots=pip_roots(search_path),
        fallback=fallback,
        driver_folders=tuple(map(Path, _DRIVER_FOLDERS)),
    )


def pip_roots(search_path: Iterable[str]) -> tuple[Path, ...]:
    """The `nvidia/cuNN` folders with an nvcc in them, newest CUDA first.

    Found by looking at folders: importing the `nvidia` namespace is not needed.
    """
    found = [
        root
        for entry in search_path
        for root in Path(entry, "nvidia").glob("cu[0-9]*")
        if entry and is_program(root / "bin" / "nvcc")
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda r: -int(r.name[2:] or 0)))


def breaks_shell(path: Path | str) -> bool:
    """Whether DeepGEMM's shell reads the path as more than one word.

    The library (2.8.1) puts paths into its commands without quotes.
    """
    return re.search(r"""[\s"'\\$`&;|<>()*?#]""", str(path)) is not None


def is_program(path: Path) -> bool:
    """Whether this user can run the file."""
    return os.access(path, os.X_OK) and path.is_file()
