"""Decides how the operator's environment variables steer us; the one place for it.

The names with vLLM's prefix are vLLM's own (the mode) or ours beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SWITCH = "VLLM_DEEP_GEMM_OVERLAY"
MODE = "VLLM_DEEP_GEMM_WARMUP"
STRICT = "VLLM_DEEP_GEMM_WARMUP_STRICT"
REPORT = "VLLM_DEEP_GEMM_WARMUP_REPORT"
WORKERS = "VLLM_DEEP_GEMM_WARMUP_WORKERS"
NVCC_LIMIT = "VLLM_DEEP_GEMM_WARMUP_NVCC_TIMEOUT_S"
# What vLLM's own list of variables does not have.
OURS = (SWITCH, STRICT, REPORT, WORKERS, NVCC_LIMIT)

MODES = ("skip", "relax", "full")
_RETIRED = "VLLM_SKIP_DEEP_GEMM_WARMUP"
# Many times what a kernel takes; one that does not end keeps the engine waiting.
_DEFAULT_NVCC_LIMIT = 300
_CHOICES = {MODE: MODES, SWITCH: ("0", "1"), STRICT: ("0", "1")}


@dataclass(frozen=True)
class Settings:
    """What the warmup does.

    Attributes:
        skip: nothing is warmed (`skip`); vLLM does not even ask then.
        every_row: call DeepGEMM with every row count (`full`) and not with one
            of every window (`relax`).
        strict: a kernel that fails to build or a layer that should have
            registered ends the start.
        report: file for the report, a page if it ends in `.html`, else JSON; or None.
        workers: most compilers at once on this node; None: as many as it has CPUs;
            0: DeepGEMM compiles by itself, in the engine, one kernel after the other.
        nvcc_limit: seconds after which a compiler is stopped.

    """

    skip: bool
    every_row: bool
    strict: bool
    report: Path | None
    workers: int | None
    nvcc_limit: int


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Raises:
        ValueError: as `check_settings`.

    """
    environ = os.environ if environ is None else environ
    check_settings(environ)
    report = environ.get(REPORT)
    return Settings(
        skip=environ.get(MODE) == "skip",
        every_row=environ.get(MODE) == "full",
        strict=environ.get(STRICT) == "1",
        # The shell leaves `~` alone where the variable comes from a file.
        report=Path(os.path.expanduser(report)) if report else None,  # noqa: PTH111
        workers=_number(environ, WORKERS, least=0),
        nvcc_limit=_number(environ, NVCC_LIMIT, least=1) or _DEFAULT_NVCC_LIMIT,
    )


def is_switched_off(environ: Mapping[str, str]) -> bool:
    """Whether the finder is told to stand aside."""
    return environ.get(SWITCH) == "0"


def check_settings(environ: Mapping[str, str]) -> None:
    """Refuse what vLLM would find out after the weights are loaded, or never.

    Raises:
        ValueError: naming the variable, its value and the allowed ones.

    """
    check_switch(environ)
    for name in (MODE, STRICT):
        _check_choice(environ, name)
    _number(environ, WORKERS, least=0)
    _number(environ, NVCC_LIMIT, least=1)
    if _RETIRED in environ:
        raise ValueError(
            f"{_RETIRED} ({environ[_RETIRED]!r}): retired, it has no effect; "
            f"unset it and set {MODE} to one of {', '.join(MODES)}"
        )


def check_switch(environ: Mapping[str, str]) -> None:
    """Refuse an unknown value of the switch, which counts even where it is off.

    Raises:
        ValueError: naming the variable, its value and the allowed ones.

    """
    _check_choice(environ, SWITCH)


def _check_choice(environ: Mapping[str, str], name: str) -> None:
    value, allowed = environ.get(name), _CHOICES[name]
    if value is not None and value not in allowed:
        raise ValueError(
            f"{name} ({value!r}): unknown value; set one of {', '.join(allowed)}, "
            "or unset it"
        )


def _number(environ: Mapping[str, str], name: str, least: int) -> int | None:
    value = environ.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise ValueError(
            f"{name} ({value!r}): not a number from {least}; set one, or unset it"
        )
    return int(value)
