"""Decides the environment of a program that is to run on the stand-in."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from . import build
from .device import Device, check_devices, parse_device

HOOK = Path(__file__).resolve().parent / "hook"
REAL_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TRTLLM_DG_CACHE_DIR": "tensorrt_llm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TILELANG_CACHE_DIR": "tilelang",
    "TILELANG_TMP_DIR": "tilelang/tmp",
    "HUMMING_CACHE_DIR": "humming",
    "VLLM_CONFIG_ROOT": "config",
}
_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


# What environment() adds: variables of its own, and entries in lists.
_OWN = ("VLLM_NCCL_SO_PATH", "TRITON_LIBCUDA_PATH")
_LISTS = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PYTHONPATH")


class RealDriver(RuntimeError):
    """The machine has a GPU driver; the stand-in does not hide it unless told."""


def refuse_real_driver(marks: tuple[Path, ...] = REAL_DRIVER) -> None:
    """Raises :class:`RealDriver` when one of the driver's marks exists."""
    for mark in marks:
        if mark.exists():
            raise RealDriver(
                f"stand-in device: this machine has a real GPU driver ({mark}); "
                "run without the stand-in, or ask for it with --over-real-driver"
            )


def environment(
    device: str | Device,
    devices: int = 1,
    cache_dir: str | Path | None = None,
    base_env: Mapping[str, str] | None = None,
    *,
    over_real_driver: bool = False,
    driver_marks: tuple[Path, ...] = REAL_DRIVER,
) -> dict[str, str]:
    """A complete environment for a child program on the stand-in.

    Builds the library when needed. With ``cache_dir``, every kernel cache lies in it,
    whatever ``base_env`` says; without, a cache that ``base_env`` names is kept and the
    others are left alone, so the caller must give one to leave nothing behind.

    Raises:
        ValueError: unknown device, or a count outside 1 to 16.
        RealDriver: a driver is there and ``over_real_driver`` is false.
        build.BuildError: the library cannot be built.
    """
    pose = parse_device(device) if isinstance(device, str) else device
    check_devices(devices)
    if not over_real_driver:
        refuse_real_driver(driver_marks)
    base = dict(os.environ if base_env is None else base_env)
    folder = build.ensure(base, sys.path)
    result = base | {
        "STANDIN_GPU": pose.encode(devices),
        "STANDIN_GPU_FOLDER": str(folder),
        "VLLM_NCCL_SO_PATH": str(folder / "libstandin_nccl.so"),
        "TRITON_LIBCUDA_PATH": str(folder),
    }
    for name, value in _QUIET.items():
        result.setdefault(name, value)
    libraries = (folder / "libcuda.so.1", folder / "libstandin_nccl.so")
    for library in reversed(libraries):
        _prepend(result, "LD_PRELOAD", str(library))
    _prepend(result, "LD_LIBRARY_PATH", str(folder))
    _prepend(result, "LIBRARY_PATH", str(folder))
    _prepend(result, "PYTHONPATH", str(HOOK))
    if cache_dir is not None:
        root = Path(cache_dir).resolve()
        result |= {name: str(root / part) for name, part in CACHES.items()}
    return result


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` as it was before :func:`environment`, its cache folders apart.

    For a child program that is to run beside the stand-in and not on it.
    """
    folder = environ.get("STANDIN_GPU_FOLDER")
    if folder is None:
        return dict(environ)
    result = {
        name: value
        for name, value in environ.items()
        if not name.startswith("STANDIN_GPU") and name not in _OWN
    }
    for name in _LISTS:
        entries = [
            entry
            for entry in result.pop(name, "").split(":")
            if entry and not Path(entry).is_relative_to(folder) and entry != str(HOOK)
        ]
        if entries:
            result[name] = ":".join(entries)
    return result


def _prepend(env: dict[str, str], name: str, entry: str) -> None:
    rest = [part for part in env.get(name, "").split(":") if part and part != entry]
    env[name] = ":".join([entry, *rest])
