"""FlashInfer's own kernels, exactly: here, since a proof's run has built its module."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import standin, toolchain
from vllm_deep_gemm_warmup.proof import fake_nvcc

from .runs import FLASHINFER_MODULE, Proof, Result, Runs

PROGRAM = Path(__file__).parents[1] / "model_executor/warmup/deep_gemm_jit/few_rows.py"
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("proof", [FLASHINFER_MODULE], ids=str)
@pytest.mark.parametrize("sms", [132, 78])
def test_few_rows_take_the_kernels_that_were_warmed_in_little_memory(
    sms: int,
    proof: Proof,
    result_of: Callable[[Proof], Result],
    runs: Runs,
    bare_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    result_of(proof)
    # Beside the fake, which cannot build FlashInfer's module, the real toolchain.
    environ = standin.environment(str(sms), base_env=bare_environment)
    environ |= toolchain.variables(toolchain.read_facts(environ))
    program = str(fake_nvcc.install(tmp_path / "fake"))
    environ |= {
        "DG_JIT_NVCC_COMPILER": program,
        "TRTLLM_DG_NVCC_COMPILER": program,
        "DG_JIT_CACHE_DIR": str(tmp_path / "deep_gemm"),
        "TRTLLM_DG_CACHE_DIR": str(tmp_path / "flashinfer_deep_gemm"),
        "FLASHINFER_WORKSPACE_BASE": str(runs.flashinfer),
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "VLLM_DEEP_GEMM_WARMUP_STRICT": "1",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])

    for n, kernels in found["rows"].items():
        assert kernels["warmed"], n
        assert kernels["served"] == kernels["warmed"], n
    loaded, freed = found["loaded"], found["freed"]
    assert loaded["failures"] == loaded["left"] == []
    # Serving's own calls take a workspace of 593 MiB, of N * K bytes.
    assert loaded["peak"] <= 256 * MIB
    # Its 593 MiB would have to be there, all of them: a row of the report instead.
    (failure,) = freed["failures"]
    assert "needs 593 MiB, more than a warmup may take" in failure
    assert freed["peak"] == 0
    assert loaded["kept"] == freed["kept"] == 0
