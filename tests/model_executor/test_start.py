"""Starts that cannot go well end in one line that says why, and in another kernel."""

import os
import pathlib
import re
from typing import Any

import pytest
from vllm_deep_gemm_warmup.standin import environment as standin_environment

from .starts import PLAIN, compiler, library, run, start


@pytest.fixture
def environ(
    fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path
) -> dict[str, str]:
    cache = {"DG_JIT_CACHE_DIR": str(tmp_path / "cache")}
    return {**fake_nvcc_environment, **PLAIN, **cache}


def test_switched_off_means_nothing_registered_and_nothing_imported(
    environ: dict[str, str],
) -> None:
    """G64."""
    result = start({**environ, "VLLM_USE_DEEP_GEMM": "0"}, 256)
    assert result["stamped"] == [False]
    assert result["imported"] == []
    assert result["warnings"] == []
    assert "DeepGemm" not in result["kernels"][0]


def test_an_old_compiler_is_found_before_the_weights_and_named_once(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G19: two layers, one line, the next kernel."""
    old = compiler(tmp_path, "echo 'Cuda compilation tools, release 12.8, V12.8.1'")
    result = start({**environ, **old}, 256, 512)
    assert result["stamped"] == [False, False]
    (line,) = [line for line in result["warnings"] if "is not used" in line]
    assert any("none is registered" in line for line in result["warnings"])
    assert "12.8 is too old" in line
    assert old["CUDA_HOME"] in line


@pytest.mark.slow
def test_a_library_that_cannot_be_imported_is_named_and_not_used(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G15, G22: an external package without the symbol, which vLLM prefers."""
    external = library(tmp_path, "def get_num_sms(): return 132\n", environ)
    result = start({**environ, **external}, 256)
    assert result["stamped"] == [False]
    (line,) = [line for line in result["warnings"] if "is not used" in line]
    assert "lacks fp8_gemm_nt" in line
    assert str(tmp_path / "site" / "deep_gemm.py") in line


NO_COPY = """
import sys
sys.modules["vllm.third_party.deep_gemm"] = None
raise ImportError("undefined symbol: cuFoo")
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            "assert False, 'no CUDA home'",
            "AssertionError: no CUDA home",
            id="asserts a toolkit",
        ),
        pytest.param(
            NO_COPY,
            "ImportError: undefined symbol: cuFoo",
            id="and vllm has no copy",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_library_that_raises_is_quoted_and_not_used(
    environ: dict[str, str], tmp_path: pathlib.Path, text: str, reason: str
) -> None:
    """G20, G22: an older package looks for a CUDA home while it is imported."""
    external = library(tmp_path, text, environ)
    result = start({**environ, **external}, 256)
    assert result["stamped"] == [False]
    (line,) = [line for line in result["warnings"] if "is not used" in line]
    assert f"deep_gemm: {reason}" in line


def test_a_kernel_that_does_not_build_is_named_and_the_rest_go_on(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G26: the compiler fails on N=320 only.

    DeepGEMM 2.8.1 has no NVRTC: its switch is not read, and nvcc is what fails. It
    leaves no log behind; what the compiler said is in the line.
    """
    calls = tmp_path / "calls"
    works = f"{environ['CUDA_HOME']}/bin/nvcc"
    failing = compiler(
        tmp_path,
        f'echo "$*" >> {calls}\n'
        'for file; do case "$file" in *.cu) grep -q "320, 256" "$file" && '
        '{ echo "error: no such luck" >&2; exit 1; };; esac; done\n'
        f'exec {works} "$@"',
    )
    nvrtc = {"DG_JIT_USE_NVRTC": "1"}
    result = start({**environ, **failing, **nvrtc}, 256, 320, 512)
    assert result["stamped"] == [True, True, True]
    lines = [line for line in result["warnings"] if "calls failed" in line]
    assert len(lines) >= 1
    assert all("N=320 K=256" in line for line in lines)
    assert all("no such luck" in line for line in lines), lines
    assert all(f"{failing['CUDA_HOME']}/bin/nvcc " in line for line in lines)
    assert all(len(line) < 2000 for line in lines)
    assert not any("N=256" in line or "N=512" in line for line in lines)
    # What the profiling run meets: our message ends the start.
    works, fails, works_too = result["forward"]
    assert (works, works_too) == ("", "")
    assert "DeepGEMM GEMM (fp8_gemm_nt N=320 K=256, M=64)" in fails
    assert "no such luck" in fails
    assert f"{failing['CUDA_HOME']}/bin/nvcc " in fails
    assert "C++ trace" not in fails
    assert "check the CUDA compiler" in fails
    # G29: what fails after the warmup finds its closing line in the log.
    closing = [line for line in result["said"] if "DeepGEMM warmup complete" in line]
    assert len(set(closing)) == 1
    # The positive control of what a switched-off start must not do.
    assert len(result["imported"]) == 2


@pytest.mark.slow
def test_an_architecture_that_the_library_does_not_know_is_not_warmed(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G18: compute capability 12.0, and a library that raises for it."""
    external = library(
        tmp_path,
        "from vllm.third_party.deep_gemm import *\n"
        "def fp8_gemm_nt(*operands, **options):\n"
        "    raise RuntimeError('Assertion error: Unknown recipe')\n",
        environ,
    )
    posed = standin_environment(
        "rtx-pro-6000", base_env={**environ, **external}, over_real_driver=True
    )
    result = start(posed, 256)
    assert result["stamped"] == [True]
    (line,) = result["warnings"]
    assert "fp8_gemm_nt N=256 K=256" in line
    assert "not warmed, all of 5 calls failed, " in line
    assert "Assertion error: Unknown recipe" in line


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3, 12])
def test_a_slow_compiler_is_not_a_silent_one(
    environ: dict[str, str], tmp_path: pathlib.Path, seconds: int
) -> None:
    """G42: a line at least every 10 s, also while one compiler runs longer; G29."""
    works = f"{environ['CUDA_HOME']}/bin/nvcc"
    slow = compiler(
        tmp_path,
        f'case "$*" in *--version*) ;; *) sleep {seconds};; esac\nexec {works} "$@"',
    )
    result = start({**environ, **slow}, 256)
    times, lines = zip(*result["progress"], strict=True)
    *progress, closing = lines
    assert re.match(r"DeepGEMM warmup complete, (\d+) kernels built, ", closing)
    assert progress, "nothing was said meanwhile"
    assert all(line.startswith("DeepGEMM warmup: ") for line in progress)
    took = float(re.search(r"built, (\S+) s", closing)[1])  # type: ignore[index]
    assert took > seconds
    first, *others = times
    assert first - (times[-1] - took) <= 10.0
    gaps = [after - before for before, after in zip(times, others, strict=False)]
    assert max(gaps) <= 10.0
    assert len(progress) <= took


@pytest.mark.slow
def test_eight_ranks_without_a_toolkit_say_so_once(environ: dict[str, str]) -> None:
    """G20."""
    bare = {
        name: value
        for name, value in environ.items()
        if name not in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER")
    }
    folders = environ["PATH"].split(os.pathsep)
    bare["PATH"] = os.pathsep.join(
        folder for folder in folders if not pathlib.Path(folder, "nvcc").exists()
    )
    posed = standin_environment("h100", 8, base_env=bare, over_real_driver=True)
    output = run(posed, "--ranks", 8, 256)
    (line,) = [line for line in output.splitlines() if "CUDA toolkit" in line]
    assert "DeepGEMM is not used" in line
    assert "CUDA_HOME and CUDA_PATH are unset, no nvcc on PATH" in line
    assert "set CUDA_HOME" in line
    assert "Traceback" not in output


TOOLCHAIN = re.compile(
    r"DeepGEMM toolchain: release 2\.8\.1 needs nvcc 12\.9 or newer, CUDA headers of "
    r"the same release and a C\+\+ compiler \(g\+\+\); found nvcc 13\.0 at "
    r"\S+/bin/nvcc \(CUDA_HOME\), headers (not seen|13\.0), C\+\+ compiler \S+/g\+\+$"
)


@pytest.mark.slow
def test_eight_ranks_say_once_what_they_compile_with(environ: dict[str, str]) -> None:
    posed = standin_environment("h100", 8, base_env=environ, over_real_driver=True)
    output = run(posed, "--ranks", 8, 256)
    (line,) = [line for line in output.splitlines() if "DeepGEMM toolchain" in line]
    assert TOOLCHAIN.search(line), line


def test_what_is_compiled_with_is_said_before_the_load(environ: dict[str, str]) -> None:
    said = start(environ, 256, 512)["constructed"]
    (line,) = [line for line in said if "DeepGEMM toolchain" in line]
    assert TOOLCHAIN.search(line), line


def test_a_model_without_fp8_layers_never_meets_the_library(
    environ: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """G15: plain linear and expert layers, and a library that cannot be imported."""
    external = library(
        tmp_path,
        "import logging\nlogging.getLogger('vllm').warning('DeepGEMM was imported')\n"
        "raise ImportError('undefined symbol')\n",
        environ,
    )
    result = start({**environ, **external}, "--bf16")
    assert result["said"] == result["warnings"] == []
    assert result["imported"] == []


@pytest.mark.parametrize(
    ("pose", "capability", "scale"),
    [
        ("h100", [9, 0], ["torch.float32", [2, 1, 2]]),
        pytest.param(
            "b200", [10, 0], ["torch.int32", [2, 128, 1]], marks=pytest.mark.slow
        ),
    ],
)
def test_a_warmup_covers_an_einsum_and_imports_no_model(
    environ: dict[str, str], pose: str, capability: list[int], scale: list[Any]
) -> None:
    """G04, with Blackwell's packed scale as well.

    G10: MegaMoE's modules, which are looked for on Blackwell, and all others.
    """
    posed = standin_environment(pose, base_env=environ, over_real_driver=True)
    result = start(posed, "--einsum", "--forget", 256)
    assert result["capability"] == capability
    assert result["stamped"] == [True]
    assert result["warnings"] == []
    assert any("DeepGEMM warmup complete" in line for line in result["said"])
    (einsum,) = result["einsum"]
    assert einsum["scale"] == scale
    # Those of the linear layer and of the einsum.
    assert len(einsum["before"]) >= 5
    assert einsum["built"] == []
    assert result["models"] == []
