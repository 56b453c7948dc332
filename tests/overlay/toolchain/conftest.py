"""Facts of a machine with a host compiler, and toolkits to put on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.toolchain import Facts

from .toolkits import NOWHERE, SAYS, script


@pytest.fixture
def toolkit(tmp_path: Path) -> Callable[..., Path]:
    """Make a fake toolkit: `toolkit("13.0")`, or with a body and headers."""

    def make(
        release: str = "13.0",
        name: str = "cuda",
        body: str | None = None,
        headers: int | None = None,
    ) -> Path:
        home = tmp_path / name
        script(home / "bin" / "nvcc", SAYS.format(release) if body is None else body)
        if headers is not None:
            include = home / "include"
            include.mkdir()
            (include / "cuda_runtime_api.h").write_text(
                f"#define CUDART_VERSION  {headers}\n"
            )
        return home

    return make


@pytest.fixture
def compilers(tmp_path: Path) -> Path:
    """A folder for PATH with gcc and g++ and no nvcc."""
    for name in ("gcc", "g++"):
        script(tmp_path / "host" / name, "exit 0\n")
    return tmp_path / "host"


@pytest.fixture
def facts(compilers: Path, tmp_path: Path) -> Callable[..., Facts]:
    """Facts of a machine with a host compiler and nothing of CUDA."""

    def make(
        pip: tuple[Path, ...] = (), fallback: Path = NOWHERE, **variables: object
    ) -> Facts:
        given = {"PATH": compilers, "VLLM_CACHE_ROOT": tmp_path / "cache"} | variables
        items = tuple((n, str(v)) for n, v in given.items() if v is not None)
        return Facts(items, pip, fallback)

    return make


@pytest.fixture
def pip_root(tmp_path: Path) -> Path:
    """A toolkit as pip unpacks it: versioned names in `lib`."""
    root = tmp_path / "site" / "nvidia" / "cu13"
    script(root / "bin" / "nvcc", SAYS.format("13.0"))
    for folder in ("include", "nvvm", "lib/cmake"):
        (root / folder).mkdir(parents=True)
    for name in (
        "libcudart.so.13",
        "libcudart_static.a",
        "libnvrtc.so.13",
        "libnvrtc.alt.so.13",
        "libnvrtc-builtins.so.13.0",
        "libcufile.so.0",
        "libcheckpoint.so",
    ):
        (root / "lib" / name).write_text(name)
    return root
