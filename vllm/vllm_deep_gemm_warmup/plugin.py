"""Decides what a process of vLLM does first; the one place that sets its environment.

`vllm.general_plugins` functions run in the API server, each engine and each
worker, before a model exists. An exception here ends the process that raises
it, and the API server is the first.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

from . import cache_place, finder, kernel_caches, lineage, toolchain
from .finder import Decision
from .metrics import collect_builds
from .settings import OURS, check_settings, check_switch

# Says what a parent process has said already. Not a VLLM_ name: those
# are checked against vLLM's list.
SPOKEN = "_DEEP_GEMM_WARMUP_SPOKEN"
# Says for which host and folders a parent process has chosen a place already.
PLACED = "_DEEP_GEMM_WARMUP_PLACED"

_ASIDE = "DeepGEMM warmup patch set stands aside, stock vLLM runs"

logger = logging.getLogger("vllm.deep_gemm_warmup")


def register() -> None:
    """Check the settings, find a toolchain, say once if the finder stood aside.

    The first process of a tree, an API server's, also has its `/metrics` show what
    the others count.

    On a device that does not run DeepGEMM, only the settings are checked. Where it
    stood aside, only its own switch is checked: stock vLLM runs, with
    stock vLLM's rules.

    Raises:
        ValueError: a setting has an unknown value, or is retired.

    """
    check_switch(os.environ)
    declare_settings()
    decision = finder_decision()
    if not decision.active:
        level = logging.INFO if decision.expected else logging.WARNING
        # The API server loads plugins before it configures logging, and a
        # forked engine never loads them again: a warning is heard even so.
        heard = level >= logging.WARNING or logger.hasHandlers()
        message = f"{_ASIDE}: {decision.reason}"
        if heard and claim_speech(os.environ, message):
            logger.log(level, "%s", message)
        return
    check_settings(os.environ)
    if os.environ.get("VLLM_USE_DEEP_GEMM") == "0":
        return
    if not device_runs_deep_gemm():
        return
    lineage.begin(os.environ)
    facts = toolchain.read_facts()
    os.environ.update(toolchain.variables(facts))
    root = kernel_caches.deep_gemm_root(os.environ)
    os.environ.update(toolchain.recorded_variables(facts, root))
    place_flashinfer_cache(os.environ)
    collect_builds(os.environ)
    place_caches(os.environ)


def declare_settings() -> None:
    """Add our variables to those that vLLM knows, or it warns of each.

    The value stays None for vLLM: where a report goes must not change the key
    of its compile cache.
    """
    from vllm import envs

    for name in OURS:
        envs.environment_variables.setdefault(name, _no_compile_factor)


def place_flashinfer_cache(environ: MutableMapping[str, str]) -> None:
    """Put the kernels of FlashInfer's DeepGEMM beside DeepGEMM's own.

    By itself it takes a folder in the home directory, which a volume mounted at
    `VLLM_CACHE_ROOT` does not keep. An operator's choice stays.
    """
    folder = kernel_caches.vllm_root(environ) / "flashinfer_deep_gemm"
    environ.setdefault("TRTLLM_DG_CACHE_DIR", str(folder))


def device_runs_deep_gemm() -> bool:
    """Whether this host's devices are ones that vLLM runs DeepGEMM on.

    vLLM asks NVML; CUDA itself must not begin in a process that forks engines.
    """
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda() and current_platform.support_deep_gemm())


def place_caches(environ: MutableMapping[str, str]) -> None:
    """Name another folder for each cache that cannot be written; once a node.

    DeepGEMM's own is left to vLLM to name where it can be, and made: the library
    does without a cache where it is imported before the folder exists.
    """
    for name, cache_at, root in (
        (
            "DG_JIT_CACHE_DIR",
            kernel_caches.deep_gemm,
            kernel_caches.deep_gemm_root(environ),
        ),
        (
            "TRTLLM_DG_CACHE_DIR",
            kernel_caches.flashinfer,
            Path(environ["TRTLLM_DG_CACHE_DIR"]),
        ),
    ):
        told = f"{PLACED}_{name}"
        if environ.get(told) == f"{os.uname().nodename} {root}":
            continue
        place = cache_place.choose(cache_at, root)
        if place.reason is not None:
            environ[name] = str(place.root)
        environ[told] = f"{os.uname().nodename} {place.root}"


def finder_decision() -> Decision:
    """What the finder does in this process, also where there is none."""
    installed = finder.installed()
    if installed is None:
        return Decision(False, expected=False, reason="its .pth line did not run")
    return installed.decide()


def claim_speech(environ: MutableMapping[str, str], message: str) -> bool:
    """True for the first process of a node that has this to say.

    Children inherit the claim, so eight ranks say it once. It names the host,
    since a launcher may copy the environment to another, and the message, since
    a parent may have said something else. Under `torchrun`, where ranks have no
    parent of ours, local rank 0 speaks.
    """
    text = f"{os.uname().nodename} {message}"
    claim = hashlib.sha256(text.encode()).hexdigest()[:16]
    if environ.get(SPOKEN) == claim or environ.get("LOCAL_RANK", "0") != "0":
        return False
    environ[SPOKEN] = claim
    return True


def _no_compile_factor() -> None:
    return None
