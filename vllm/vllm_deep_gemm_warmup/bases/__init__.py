"""Decides what is known of a base. Adding one is adding a file beside this one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """One vLLM release that our files were written against.

    Attributes:
        version: vLLM's version.
        files: path below `vllm/` -> sha256 of the base file that ours stands in for.
        wheel_sha256: file name of the wheel -> sha256 on the package index.
        facts: what the release pins or carries -> version.
        wrapper_first_row: least number of rows that the FlashInfer/DeepGEMM
            wrapper sends to DeepGEMM.
        experts_use_prefix_sum: (name of the MoEActivation, device capability
            family, whether DeepGEMM packs scales as UE8M0) -> whether block-FP8
            experts give the grouped GEMM DeepGEMM's psum layout.

    """

    version: str
    files: Mapping[str, str]
    wheel_sha256: Mapping[str, str]
    facts: Mapping[str, str]
    wrapper_first_row: int
    experts_use_prefix_sum: Callable[[str, int, bool], bool]


def known_bases() -> tuple[Base, ...]:
    """Every base, oldest file name first."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(module.BASE for module in modules)
