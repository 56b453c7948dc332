"""Starts of one engine process in a process of its own, and what they meet."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

START = pathlib.Path(__file__).with_name("start.py")
PLAIN = {"VLLM_DISABLED_KERNELS": "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"}


def run(
    environ: dict[str, str],
    *arguments: object,
    before: Callable[[], object] | None = None,
) -> str:
    """Run start.py and return all its output, what it prints at the end last.

    ``before`` runs in the child, before the program.
    """
    done = subprocess.run(
        [sys.executable, str(START), *map(str, arguments)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=before,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr + done.stdout


def start(
    environ: dict[str, str],
    *arguments: object,
    before: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Run one start with a layer of each size N; K is 256."""
    said = run(environ, *arguments, before=before)
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def library(folder: pathlib.Path, text: str, environ: dict[str, str]) -> dict[str, str]:
    """Environment with an external ``deep_gemm``, which vLLM prefers to its own."""
    module = folder / "site" / "deep_gemm.py"
    module.parent.mkdir()
    module.write_text(text)
    path = os.pathsep.join([str(module.parent), environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path}


def compiler(folder: pathlib.Path, line: str) -> dict[str, str]:
    """Environment of a toolkit whose nvcc is a shell script of one line."""
    program = folder / "home" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)
    return {"CUDA_HOME": str(folder / "home")}
