"""Caches as DeepGEMM 2.8.1 leaves them, filled with the declared fake's kernels."""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

from vllm_deep_gemm_warmup import cubins
from vllm_deep_gemm_warmup.kernel_caches import KernelCache

_PR_CAPBSET_DROP = 24
_VERSION_3 = 0x20080522
# CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
_RIGHTS = (1, 2, 3)


def entry_name(number: int) -> str:
    """The name of an entry."""
    return f"sm90_fp8_gemm_1d2d.{number:032x}"


def answer(version: str) -> str:
    """Return what `nvcc --version` of a version prints, as far as it matters."""
    return f"Cuda compilation tools, release {version[:4]}, V{version}\n"


def write_entry(cache: KernelCache, number: int, version: str = "13.0.88") -> Path:
    """Write a whole entry and return its folder."""
    entry = cache.folder / entry_name(number)
    entry.mkdir(parents=True)
    (entry / "kernel.cu").write_text(f"// {number}\n")
    (entry / "kernel.cubin").write_bytes(cubins.cubin("sm90_fp8_gemm_1d2d_impl"))
    meta = {"compiler_info": {"path": "/x/nvcc", "version": answer(version)}}
    (entry / "meta.json").write_text(json.dumps(meta))
    (entry / ".committed").touch()
    return entry


def as_it_is(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything below the folder: mode, and content of the files."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def make_read_only(folder: Path) -> None:
    """Take every right to write away."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)


def as_plain_user(function: Callable[[], object]) -> None:
    """Run a function in a forked child that obeys the rights of files, as root not."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            obey_rights()
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def obey_rights() -> None:
    """Give up root's right to pass over the rights of files; programs run too."""
    libc = ctypes.CDLL(None)
    for right in _RIGHTS:
        libc.prctl(_PR_CAPBSET_DROP, right, 0, 0, 0)
    header, data = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for word in range(3):
        data[word] &= ~sum(1 << right for right in _RIGHTS)
    libc.capset(header, data)
