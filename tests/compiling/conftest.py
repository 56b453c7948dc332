"""Kernels that are not real, and compilers that do as they are told."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.compiling.store import Context
from vllm_deep_gemm_warmup.cubins import cubin
from vllm_deep_gemm_warmup.kernel_caches import FOLDER

CONTEXT = Context(
    major=9,
    minor=0,
    sm_count=132,
    library="a library",
    compiler="a compiler",
    variables=(),
    every_row=False,
)


def make_kernel(name: str) -> Kernel:
    """A kernel whose compiler gets its name in the source."""
    files = "@FOLDER@/kernel.cu --cubin --output-file @FOLDER@/kernel.cubin"
    meta = {"command": f"@NVCC@ {files}", "compiler_options": {}}
    return Kernel(
        entry=f"gemm.{name}",
        source=f"{name}\n",
        record=json.dumps(meta),
        shape='{"rows": 1}',
    )


@pytest.fixture
def nvcc(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a compiler: a shell line, then a cubin; it logs what it compiles.

    In the line `$name` is the kernel's; the cubin ends with it.
    """

    def make(line: str = "true") -> Path:
        program, empty = tmp_path / "nvcc", tmp_path / "empty.cubin"
        empty.write_bytes(cubin("kernel"))
        program.write_text(
            '#!/bin/sh\nread name < "$1"\n'
            f"echo $name >> {tmp_path}/compiled\n"
            f"{line} || exit 1\n"
            f'cp {empty} "$4"; printf $name >> "$4"\n'
        )
        program.chmod(0o755)
        return program

    return make


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[[], list[str]]:
    """The names of the kernels that were compiled, in order."""

    def read() -> list[str]:
        try:
            return (tmp_path / "compiled").read_text().split()
        except FileNotFoundError:
            return []

    return read


@pytest.fixture
def config(tmp_path: Path, nvcc: Callable[[str], Path]) -> Callable[..., Config]:
    """Makes a coordinator's config around a compiler; ``given`` are other fields."""

    def make(line: str = "true", **given: object) -> Config:
        root = tmp_path / "root"
        fields = {
            "context": CONTEXT,
            "root": root,
            "work": root / FOLDER,
            "nvcc": nvcc(line),
            "library": tmp_path,
            "workers": 8,
            "limit": 60.0,
            "group": "engine",
        }
        return Config(**{**fields, **given})

    return make
