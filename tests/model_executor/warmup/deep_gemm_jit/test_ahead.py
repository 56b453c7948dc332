"""Building begins with the layers' construction; the profiling run waits for it."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
from typing import Any

import pytest
from vllm_deep_gemm_warmup import kernel_caches, standin

BEGIN = pathlib.Path(__file__).with_name("begin.py")


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_kernel_is_compiled_once_and_before_the_first_gemm_runs(
    fake_nvcc_environment: dict[str, str], tmp_path: pathlib.Path, ranks: int
) -> None:
    """Of an engine of several ranks as of one; counted by the compiler itself."""
    fake = pathlib.Path(fake_nvcc_environment["CUDA_HOME"], "bin", "nvcc")
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--cubin*) echo $$ >> {tmp_path}/compiled;; esac\n'
        f'exec {shlex.quote(str(fake))} "$@"\n'
    )
    nvcc.chmod(0o755)
    environ = standin.environment("h100", ranks, base_env=fake_nvcc_environment)
    environ |= {
        "CUDA_HOME": str(tmp_path / "cuda"),
        "DG_JIT_CACHE_DIR": str(tmp_path / "cache"),
        "VLLM_DEEP_GEMM_WARMUP_WORKERS": "2",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    }
    done = subprocess.run(
        [sys.executable, str(BEGIN), str(tmp_path), str(ranks), "320", "832"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    cache = kernel_caches.deep_gemm(tmp_path / "cache")
    built = len(cache.entries())
    assert built > 5
    for answer in answers:
        assert answer["forward"] == answer["all"] == built
    said = answers[0]["said"]
    assert [line for line in said if "kernels to build, 2 at a time" in line]
    assert not [line for line in said if "in this process" in line]
    assert os.listdir(tmp_path / "cache" / "tmp") == []  # noqa: PTH208
