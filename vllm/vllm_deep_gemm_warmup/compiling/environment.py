"""Decides the environment of the planner: the engine's, on a device that is not there.

Also what of it decides a plan, and how a planner's process is given its own cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .. import node
from ..standin import device, environment
from ..toolchain.answer import ask

# Read by DeepGEMM, and by vLLM where it chooses how DeepGEMM is called.
_PREFIXES = ("DG_", "VLLM_USE_DEEP_GEMM", "VLLM_BATCH_INVARIANT")
# These say where, not what: neither enters DeepGEMM's key.
_PLACES = ("DG_JIT_CACHE_DIR", "DG_JIT_NVCC_COMPILER")
# Of the engine's processes and not of the planner's one.
_OTHERS = ("CUDA_VISIBLE_DEVICES", "STANDIN_GPU_TRACE", "VLLM_PLUGINS")


class Unplannable(Exception):
    """The planner cannot work here; the message says why."""


def deciding_variables(
    environ: Mapping[str, str] | None = None,
) -> tuple[tuple[str, str], ...]:
    """(name, value) of the variables that a plan depends on, sorted."""
    environ = os.environ if environ is None else environ
    return tuple(
        (name, value)
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and name not in _PLACES
    )


def process_group(environ: Mapping[str, str] | None = None) -> str:
    """Names the processes that one launcher started on this node.

    By the launcher's own name, which no other has: containers can share a host's
    name, a process number and a cache, and two engines a shell. Without one, by
    their parent.
    """
    named = (os.environ if environ is None else environ).get(node.MEETING)
    return f"{os.uname().nodename} {named or os.getppid()}"


def compiler_text(nvcc: Path) -> str:
    """What the compiler answers to `--version`, as DeepGEMM's key holds it.

    Raises:
        Unplannable: it does not answer.

    """
    try:
        answer = ask(nvcc)
    except OSError as error:
        raise Unplannable(f"`nvcc --version`: {error}") from error
    if answer.text is None or answer.code != 0:
        how = "no answer in time" if answer.text is None else f"status {answer.code}"
        raise Unplannable(f"`nvcc --version` ({nvcc}): {how}")
    return answer.text


def planner_environment(
    environ: Mapping[str, str],
    capability: tuple[int, int],
    sm_count: int,
    nvcc: Path,
    scratch: Path,
) -> dict[str, str]:
    """The environment of a process that selects kernels for a device it has not.

    Args:
        environ: the engine's.
        capability: of the engine's device.
        sm_count: SMs that DeepGEMM may use.
        nvcc: the recording one.
        scratch: a private folder, for every cache.

    Raises:
        Unplannable: no such device can be stood in for, or nothing builds it.

    """
    base = {name: value for name, value in environ.items() if name not in _OTHERS}
    try:
        result = environment(
            _pose(capability, sm_count),
            cache_dir=scratch / "caches",
            base_env=base,
            over_real_driver=True,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise Unplannable(str(error)) from error
    return {
        **result,
        "DG_JIT_NVCC_COMPILER": str(nvcc),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TMPDIR": str(scratch),
    }


def _pose(capability: tuple[int, int], sm_count: int) -> device.Device:
    """A device of that architecture with that many SMs.

    Raises:
        Unplannable: the stand-in has none of that architecture.

    """
    for pose in device.POSES.values():
        if pose.capability == capability:
            return replace(pose, name=f"{sm_count} SMs", sms=sm_count)
    raise Unplannable(
        f"stand-in device: none of compute capability {capability[0]}.{capability[1]}"
    )


def use_cache(folder: Path) -> None:
    """Have this process's DeepGEMM build into ``folder``; it is not imported yet."""
    os.environ["DG_JIT_CACHE_DIR"] = str(folder)
