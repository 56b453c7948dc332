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
# What vLLM's own list of variables does not have.
OURS = (SWITCH, STRICT, REPORT)

MODES = ("skip", "relax", "full")
_RETIRED = "VLLM_SKIP_DEEP_GEMM_WARMUP"
_CHOICES = {MODE: MODES, SWITCH: ("0", "1"), STRICT: ("0", "1")}


@dataclass(frozen=True)
class Settings:
    """What the warmup does.

    Attributes:
        every_row: call DeepGEMM with every row count (`full`) and not with one
            of every window (`relax`).
        strict: a kernel that fails to build or a layer that should have
            registered ends the start.
        report: file for the report, a page if it ends in `.html`, else JSON; or None.

    """

    every_row: bool
    strict: bool
    report: Path | None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings; `skip` never comes as far as this.

    Raises:
        ValueError: as `check_settings`.

    """
    environ = os.environ if environ is None else environ
    check_settings(environ)
    report = environ.get(REPORT)
    return Settings(
        every_row=environ.get(MODE) == "full",
        strict=environ.get(STRICT) == "1",
        # The shell leaves `~` alone where the variable comes from a file.
        report=Path(os.path.expanduser(report)) if report else None,  # noqa: PTH111
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
