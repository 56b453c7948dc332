"""Which compiler is taken: the operator's, pip's, or DeepGEMM's own fallback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import toolchain
from vllm_deep_gemm_warmup.toolchain import Facts, Toolchain
from vllm_deep_gemm_warmup.toolchain.facts import pip_roots

from .toolkits import NOWHERE, one_line, script

# As small as a kernel gets that includes what DeepGEMM's do.
KERNEL = """\
#include <cuda_runtime.h>
#include <cuda/std/utility>
extern "C" __global__ void kernel(int* out) { *out = 1; }
"""


def test_order_is_that_of_the_library(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], compilers: Path
) -> None:
    homes = {n: toolkit(name=n) for n in ("a", "b", "path", "fallback")}
    variables: dict[str, object] = {
        "CUDA_HOME": homes["a"],
        "CUDA_PATH": homes["b"],
        "PATH": f"{homes['path'] / 'bin'}:{compilers}",
    }
    expected = [("CUDA_HOME", "a"), ("CUDA_PATH", "b"), ("PATH", "path")]
    for origin, name in expected:
        given = facts(fallback=homes["fallback"], **variables)
        found = toolchain.describe(given)
        assert isinstance(found, Toolchain)
        assert (found.origin, found.home) == (origin, homes[name])
        assert toolchain.operator_choice(given) == origin
        variables[origin] = compilers if origin == "PATH" else None
    found = toolchain.describe(facts(fallback=homes["fallback"]))
    assert isinstance(found, Toolchain)
    assert found.origin == str(homes["fallback"])


@pytest.mark.parametrize(
    "name", ["CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "PATH"]
)
def test_operator_wins_over_pip_even_with_a_bad_choice(
    toolkit: Callable[..., Path],
    facts: Callable[..., Facts],
    compilers: Path,
    name: str,
) -> None:
    own, pip = toolkit("12.1", name="own"), toolkit("13.0", name="pip")
    value = {
        "PATH": f"{own / 'bin'}:{compilers}",
        "DG_JIT_NVCC_COMPILER": own / "bin" / "nvcc",
    }.get(name, own)
    given = facts(pip=(pip,), fallback=own, **{name: value})
    root, answer = toolchain.choose(given)
    assert root is None
    assert "12.1 is too old" in one_line(answer)
    assert toolchain.variables(given) == {}


def test_pip_wins_over_the_fallback(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    pip, fallback = toolkit(name="pip"), toolkit(name="fallback")
    given = facts(pip=(pip,), fallback=fallback)
    root, answer = toolchain.choose(given)
    assert root == pip
    assert isinstance(answer, Toolchain)
    (name, links) = toolchain.variables(given).popitem()
    assert name == "CUDA_HOME"
    assert (Path(links) / "bin" / "nvcc").resolve() == pip / "bin" / "nvcc"


def test_bad_pip_leaves_the_fallback(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    pip = toolkit("13.5", name="pip", headers=13000)
    fallback = toolkit(name="fallback")
    given = facts(pip=(pip,), fallback=fallback)
    root, answer = toolchain.choose(given)
    assert (root, toolchain.variables(given)) == (None, {})
    assert isinstance(answer, Toolchain)
    assert answer.home == fallback
    # And where there is no fallback, the message is about what is there.
    _, answer = toolchain.choose(facts(pip=(pip,)))
    assert "does not fit" in one_line(answer)


def test_empty_variable_is_an_unset_one(toolkit: Callable[..., Path]) -> None:
    given = toolchain.read_facts({"CUDA_HOME": "", "PATH": ""}, (), NOWHERE)
    assert given.variables == ()


def test_pip_roots_prefer_the_newest(tmp_path: Path) -> None:
    for name in ("cu12", "cu13", "cu9", "cudnn"):
        script(tmp_path / "nvidia" / name / "bin" / "nvcc", "")
    (tmp_path / "nvidia" / "cu14").mkdir()
    names = [r.name for r in pip_roots(["", str(tmp_path), str(tmp_path)])]
    assert names == ["cu13", "cu12", "cu9"]


def test_pip_toolchain_compiles_with_the_system_nvcc_hidden(tmp_path: Path) -> None:
    """A new process with no CUDA variable, no nvcc on PATH and no /usr/local/cuda."""
    source, cubin = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text(KERNEL)
    code = f"""
import os, subprocess
from pathlib import Path
from vllm_deep_gemm_warmup import toolchain as t
facts = t.read_facts(fallback=Path({str(NOWHERE)!r}))
assert t.operator_choice(facts) is None
os.environ.update(t.variables(facts))
found = t.describe_current()
assert isinstance(found, t.Toolchain), str(found)
print(found.nvcc.resolve())
command = [found.nvcc, "--cubin", "-arch=sm_90a", {str(source)!r}, "-o", {str(cubin)!r}]
subprocess.run(command, check=True)
"""
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("gcc", "g++", "cc", "as", "ld", "sh"):
        program = shutil.which(name)
        assert program, f"{name} is missing: apt-get install g++"
        (path / name).symlink_to(program)
    environ = {"PATH": str(path), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        if name in os.environ:
            environ[name] = os.environ[name]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/nvidia/cu13/bin/nvcc")
    assert cubin.stat().st_size
