"""A key that DeepGEMM makes on the stand-in is the key that it makes without it.

DeepGEMM names a kernel by its source, the text of ``nvcc --version 2>&1`` and flags.
The stand-in could only change the text. So the same GEMM is asked for three times: as
it is; through an ``nvcc`` that clears every variable before it answers, as on a machine
without the stand-in; and beside a library that does print, which shows that the test
would see it.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .cubin import cubin

GEMM = """
import torch
from vllm.third_party import deep_gemm
a = torch.empty(64, 1024, device="cuda", dtype=torch.float8_e4m3fn)
b = torch.empty(512, 1024, device="cuda", dtype=torch.float8_e4m3fn)
scales = torch.empty(8, 64, device="cuda").t()
deep_gemm.fp8_gemm_nt(
    (a, scales), (b, torch.empty(4, 8, device="cuda")),
    torch.empty(64, 512, device="cuda", dtype=torch.bfloat16), disable_ue8m0_cast=True)
"""

NVCC = """#!{shell}
case "$1" in --version)
  echo "nvcc: NVIDIA (R) Cuda compiler driver"
  echo "Cuda compilation tools, release 13.0, V13.0.88"
  ls /no/such/folder
  exit 0;;
esac
while [ $# -gt 0 ]; do
  [ "$1" = --output-file ] && cp {cubin} "$2"
  shift
done
"""


def keys(
    folder: Path, env: dict[str, str], run: Callable[..., str], clean: bool = False
) -> list[str]:
    """Names of the entries after one GEMM with a fake nvcc."""
    shutil.rmtree(folder, ignore_errors=True)
    home = folder / "home"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (folder / "kernel.cubin").write_bytes(cubin("kernel"))
    nvcc = home / "bin" / "nvcc"
    text = NVCC.format(shell="/bin/sh", cubin=folder / "kernel.cubin")
    if clean:
        real = home / "bin" / "real"
        real.write_text(text)
        real.chmod(0o755)
        text = f'#!/bin/sh\nexec env -i PATH="$PATH" {real} "$@"\n'
    nvcc.write_text(text)
    nvcc.chmod(0o755)
    cache = folder / "cache"
    overrides = {"CUDA_HOME": str(home), "DG_JIT_CACHE_DIR": str(cache)}
    env = {k: v for k, v in env.items() if not k.startswith("DG_JIT")}
    run(GEMM, env | overrides)
    return sorted(path.name for path in (cache / "cache").iterdir())


def test_key_on_the_standin_is_the_key_without_it(
    standin: Callable[..., dict[str, str]], python: Callable[..., str], tmp_path: Path
) -> None:
    env = standin()
    # One folder for all, in case a path should ever be part of a key.
    folder = tmp_path / "gemm"
    with_standin = keys(folder, env, python)
    without = keys(folder, env, python, clean=True)
    assert with_standin
    assert with_standin == without

    source = tmp_path / "printing.c"
    source.write_text(
        "#include <unistd.h>\n"
        '__attribute__((constructor)) static void say(void) { write(2, "hi\\n", 3); }\n'
    )
    printing = tmp_path / "printing.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", printing, source], check=True)
    loud = env | {"LD_PRELOAD": f"{env['LD_PRELOAD']}:{printing}"}
    assert keys(folder, loud, python) != with_standin
