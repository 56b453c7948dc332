"""Decides how the operator's environment variables steer the warmup."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

MODE = "VLLM_DEEP_GEMM_WARMUP"
STRICT = "VLLM_DEEP_GEMM_WARMUP_STRICT"
REPORT = "VLLM_DEEP_GEMM_WARMUP_REPORT"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the warmup reads from the environment, once a start.

    Attributes:
        every_row: Call DeepGEMM with every row count (``full``) and not with one
            of every window (``relax``).
        strict: A kernel that fails to build or a layer that should have
            registered ends the start.
        report: File for the JSON report, or None.

    """

    every_row: bool
    strict: bool
    report: pathlib.Path | None


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings from ``environ``.

    The plugin has refused an unknown mode before; ``skip`` never comes here.
    """
    report = environ.get(REPORT)
    return Settings(
        every_row=environ.get(MODE, "relax") == "full",
        strict=environ.get(STRICT, "0") == "1",
        report=pathlib.Path(report) if report else None,
    )
