"""Builds a part of FlashInfer's `fused_moe_90`: what block-FP8 experts run through.

    python tests/proof/partial_fused_moe.py DIR

With DIR in `PYTHONPATH`, FlashInfer takes the module for one that was built ahead of
time. All of it is 249 files and hours of compiling; this is FlashInfer's own source of
the binding, of the experts' runner for bfloat16 activations and float8 weights, and of
the block-scale GEMM with its choice of kernels and its compiler. What is partial:

* Device code is checked and not generated (`-fdevice-syntax-only`), and the host's is
  not optimized: it is for the stand-in device, which runs no kernel. On a GPU it fails.
* The runner of GEMMs that are not block-scale ones has one configuration and needs no
  memory, as `_OTHER_GEMMS` says. What it would run, and other types of weights and
  activations, are traps: a call of one ends the process with SIGILL.
"""

import argparse
import concurrent.futures
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_deep_gemm_warmup import toolchain

MODULE = "fused_moe_90"
PACKAGE = "flashinfer_jit_cache"
_AT_A_TIME = 2
# Compiled by nvcc, for they launch kernels; the others by the C++ compiler alone.
_LAUNCHING = ("fp8_blockscale_gemm.cu", "deepgemm_jit_setup.cu")
_HOST = (
    "flashinfer_cutlass_fused_moe_binding.cu",
    "envUtils.cpp",
    "logger.cpp",
    "stringUtils.cpp",
    "tllmException.cpp",
    "lora.cpp",
)
_NAMESPACE = "namespace tensorrt_llm::kernels::cutlass_kernels"
# FlashInfer instantiates it for all types.
_RUNNER = f"""\
#include "cutlass_fused_moe_kernels.cuh"
#include "moe_kernels.h"
{_NAMESPACE} {{
template class CutlassMoeFCRunner<__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16>;
}}
"""
_OTHER_GEMMS = f"""\
#include "moe_gemm_kernels.h"
{_NAMESPACE} {{
using Config = cutlass_extensions::CutlassGemmConfig;
using Configs = std::vector<Config>;
using Runner = MoeGemmRunner<__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16>;
using Type = ActivationType;
template <> Runner::MoeGemmRunner() : sm_(90) {{}}
template <> Configs Runner::getConfigs(bool) const {{ return {{Config()}}; }}
template <> bool Runner::isTmaWarpSpecialized(Config) const {{ return false; }}
template <> bool Runner::supportsTmaWarpSpecialized(int) {{ return false; }}
template <>
bool Runner::isFusedGatedActivation(Config, Type, int, int) const {{ return false; }}
template <> size_t Runner::getMaxWorkspaceSize(int) const {{ return 0; }}
template <> int Runner::getSM() const {{ return sm_; }}
template <> int Runner::queryOccupancyForConfig(Config const&) {{ return 1; }}
}}
"""
_TRAPS = '.section .note.GNU-stack,"",@progbits\n.text\n'
_SHIM = """\
\"\"\"A part of FlashInfer's fused experts; see partial_fused_moe.py.\"\"\"

import pathlib
import types

__version__ = {version!r}


def get_jit_cache_providers():
    return [
        types.SimpleNamespace(
            provider_id="partial",
            distribution="flashinfer-jit-cache",
            version=__version__,
            jit_cache_dir=pathlib.Path(__file__).parent / "modules",
            cuda_architectures=["sm90a"],
            modules=[{module!r}],
        )
    ]
"""


def build(folder: Path, scratch: Path) -> Path:
    """Build the module into `folder`, which is then for `PYTHONPATH`; return its path.

    Raises:
        subprocess.CalledProcessError: A compiler failed; its output was printed.

    """
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(scratch)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
    os.environ |= toolchain.variables(toolchain.read_facts(os.environ))
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module
    from flashinfer.version import __version__

    spec = gen_cutlass_fused_moe_sm90_module(use_fast_build=False)
    objects = _compile(spec, scratch)
    library = folder / PACKAGE / "modules" / MODULE / f"{MODULE}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    _link(objects, scratch, library)
    shim = _SHIM.format(version=__version__, module=MODULE)
    (folder / PACKAGE / "__init__.py").write_text(shim)
    return library


def _compile(spec: object, scratch: Path) -> list[Path]:
    commands = {
        Path(entry["file"]).name: shlex.split(entry["command"])
        for entry in spec.get_compile_commands()  # type: ignore[attr-defined]
    }
    own = {
        "runner.cu": (_RUNNER, "cutlass_fused_moe_instantiation.cu"),
        "other_gemms.cpp": (_OTHER_GEMMS, "moe_gemm_kernels_bf16_fp8.cu"),
    }
    for name, (text, model) in own.items():
        source, (compiler, *words) = scratch / name, commands[model]
        source.write_text(text)
        place = words.index("-c") + 1
        folder = Path(words[place]).parent
        words[place] = str(source)
        commands[name] = [compiler, f"-I{folder}", *words]
    names = {name: _nvcc(commands[name]) for name in (*_LAUNCHING, "runner.cu")}
    names |= {name: _cxx(commands[name]) for name in (*_HOST, "other_gemms.cpp")}
    outputs = {name: scratch / f"{name}.o" for name in names}
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(_run, ([*names[n], "-o", str(outputs[n])] for n in names)))
    return list(outputs.values())


def _nvcc(command: Sequence[str]) -> list[str]:
    """Check the device code and generate none; optimize nothing on the host."""
    flags = [flag for flag in command[:-2] if "compress" not in flag]
    return [*flags, "-fdevice-syntax-only", "-Xcompiler", "-O0"]


def _cxx(command: Sequence[str]) -> list[str]:
    """Compile the same for the host alone."""
    kept = ["c++", "-x", "c++", "-std=c++17", "-fPIC", "-O0", "-w"]
    words = iter(command)
    for word in words:
        if word in ("-isystem", "-c"):
            kept += [word, next(words)]
        elif word.startswith(("-I", "-D")):
            kept.append(word)
    return kept


def _link(objects: Sequence[Path], scratch: Path, library: Path) -> None:
    toolkit = Path(os.environ["CUDA_HOME"]) / "lib64"
    link = ["c++", "-shared", *map(str, objects)]
    libraries = [
        *(f"-L{folder}" for folder in (toolkit, scratch)),
        *("-Wl,--no-as-needed", "-lcudart", "-lcuda", "-lnvrtc"),
    ]
    # The driver's, of which a machine without one has no stub.
    driver = scratch / "libcuda.so"
    named = ["-Wl,-soname,libcuda.so.1", "-o", str(driver)]
    _run(["c++", "-shared", "-x", "c++", os.devnull, *named])
    draft = scratch / "draft.so"
    _run([*link, *libraries, "-o", str(draft)])
    traps = scratch / "traps.s"
    traps.write_text(_TRAPS + "".join(_trap(name) for name in _undefined(draft)))
    _run([*link, str(traps), *libraries, "-o", str(library)])


def _undefined(library: Path) -> list[str]:
    """Names of this module's own functions that it lacks."""
    listed = subprocess.check_output(["nm", "-D", "-u", str(library)], text=True)
    names = [line.split()[-1] for line in listed.splitlines()]
    return [name for name in names if "tensorrt_llm" in name]


def _trap(name: str) -> str:
    return f".globl {name}\n.type {name}, @function\n{name}: ud2\n"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()


def main() -> None:
    """Build into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="builds a part of fused_moe_90")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if shutil.which("c++") is None:
        sys.exit("c++: not found; a C++ compiler is needed")
    with tempfile.TemporaryDirectory() as scratch:
        print(build(folder, Path(scratch)))


if __name__ == "__main__":
    main()
