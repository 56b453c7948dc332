"""The proof: the real `vllm serve` on the stand-in, nothing built after ready.

The runs that the selected tests need are started when the session starts (conftest),
two at a time beside the other tests; a test waits for its own.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_deep_gemm_warmup import kernel_caches, standin, toolchain
from vllm_deep_gemm_warmup.proof import fake_nvcc

from .runs import FLASHINFER_MODULE, MODELS, Proof, Result, Runs

# Ranks that load and warm up layers, without a server.
BEGIN = MODELS.parent / "model_executor/warmup/deep_gemm_jit/begin.py"
SMALL = "qwen3-0.6b-fp8"


def direct(model: str, *options: str, start: str = "fork") -> Proof:
    """Return a run with DeepGEMM alone, without FlashInfer's kernel."""
    return Proof(model, ("--kernel=deep_gemm", *options), start=start)


def slow(proof: Proof) -> Any:
    return pytest.param(proof, marks=pytest.mark.slow)


def slow_direct(model: str, *options: str) -> Any:
    return slow(direct(model, *options))


def long_direct(model: str, *options: str) -> Any:
    return pytest.param(direct(model, *options), marks=pytest.mark.long)


MODES = [
    direct(SMALL, "--mode=graphs"),
    direct(SMALL, start="spawn"),
    direct(SMALL, "--runner=v1"),
    slow(direct(SMALL, "--runner=v1", "--mode=graphs")),
    slow(direct(SMALL, "--tp=2", start="spawn")),
]
EXPERTS = "qwen3-30b-a3b-fp8"
# By default a folder for each way that weights come to a linear layer, and one for each
# entry point that a server here reaches; but DeepSeek-V4's TileLang kernels take ten
# minutes to compile, and what it runs is served in one process by test_serving.py.
LONG = "deepseek-v4-flash-base"
QUICK = (
    "deepseek-v3.2",
    "llama-3-8b-compressed-tensors",
    "llama-3-8b-modelopt",
)
NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
FOLDERS = [
    (direct if name in QUICK else slow_direct)(
        name, f"--device={('h100', 'h20')[number % 2]}"
    )
    for number, name in enumerate(NAMES)
    if name not in (SMALL, EXPERTS, LONG)
]
FOLDERS += [long_direct(LONG), long_direct(LONG, "--device=h20", "--mode=graphs")]
# Its experts run on DeepGEMM only where the operator asks for it.
FOLDERS.append(direct(EXPERTS, "--", "--moe-backend=deep_gemm"))
# Each rank's experts get the tokens of both.
FOLDERS.append(
    slow_direct(
        EXPERTS,
        "--dp=2",
        "--max-num-batched-tokens=1024",
        "--",
        "--moe-backend=deep_gemm",
        "--enable-expert-parallel",
    )
)
FOLDERS += [slow_direct("deepseek-v3.2", "--mode=graphs")]
FOLDERS += [long_direct("glm-5", "--mode=graphs")]
# Slow: FlashInfer's module alone is four minutes of compiling.
DEFAULT = [slow(FLASHINFER_MODULE), slow(Proof(SMALL, ("--mode=graphs",)))]
# Two ranks, of which one compiles each of FlashInfer's kernels.
DEFAULT.append(pytest.param(Proof(SMALL, ("--tp=2",)), marks=pytest.mark.long))
# 64 rows: three classes of rows, a few kernels, each a real Hopper cubin.
REAL = Proof(SMALL, ("--kernel=deep_gemm", "--max-num-batched-tokens=64"), nvcc="real")
STOCK = direct(SMALL, "--stock")
# Two ranks, so that `kv_b_proj` is one of those that have kernels above 1024 rows.
CONTEXT = direct(
    "deepseek-v2-lite-fp8", "--tp=2", "--max-num-batched-tokens=1024", "--context=16384"
)
# More decodes than graphs are captured for (512): an indexer's metadata has a kernel
# for each 32 of them. Stock builds up to 15 after ready.
BATCH = direct(
    "deepseek-v3.2", "--mode=graphs", "--batch=1000", "--", "--max-num-seqs=1024"
)


# A drafter whose shapes the target does not have: stock builds 80 kernels after ready.
# The layer of an MTP module has the target's shapes: stock builds none either.
DRAFTER = json.dumps({"model": str(MODELS / SMALL), "num_speculative_tokens": 2})
SPECULATIVE = [
    made("qwen3-8b-fp8", *options, "--", f"--speculative-config={DRAFTER}")
    for made, *options in (
        (slow_direct,),
        (long_direct, "--runner=v1"),
        (long_direct, "--mode=graphs"),
    )
]
SPECULATIVE.append(
    slow_direct(
        "deepseek-v3",
        "--",
        '--speculative-config={"method": "mtp", "num_speculative_tokens": 1}',
    )
)
# Its `fc` and its wider first projection have shapes of their own.
EAGLE3 = MODELS / "drafters" / "eagle3-llama-3-8b-fp8"
SPECULATIVE.append(
    slow_direct(
        "llama-3-8b-modelopt",
        "--",
        "--speculative-config="
        + json.dumps(
            {"method": "eagle3", "model": str(EAGLE3), "num_speculative_tokens": 2}
        ),
    )
)


def check(result: Result, more: int = 0) -> None:
    assert result["right"] == result["asked"] == 463 + 556 + more
    assert result["layers"] > 0
    assert result["deep_gemm_before"] > 0
    assert result["deep_gemm_after"] == []


# First, since it takes the longest: FlashInfer's module is built in minutes.
@pytest.mark.parametrize("proof", DEFAULT, ids=str)
def test_flashinfer_kernels_are_counted_apart(
    proof: Proof, result_of: Callable[[Proof], Result]
) -> None:
    result = result_of(proof)

    check(result)
    assert result["flashinfer_before"] > 0
    assert result["flashinfer_after"] == []


@pytest.mark.parametrize("proof", DEFAULT[:1], ids=str)
def test_two_ranks_compile_each_of_flashinfer_s_kernels_once(
    proof: Proof,
    result_of: Callable[[Proof], Result],
    runs: Runs,
    bare_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    """Counted by the compiler itself; the module is there from the run before."""
    result_of(proof)
    ours, counting = fake_nvcc.install(tmp_path / "fake"), tmp_path / "nvcc"
    counting.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-cubin*) echo $$ >> {tmp_path}/compiled;; esac\n'
        f'exec {shlex.quote(str(ours))} "$@"\n'
    )
    counting.chmod(0o755)
    environ = standin.environment("h100", 2, base_env=bare_environment)
    environ |= {
        **toolchain.variables(toolchain.read_facts(environ)),
        "DG_JIT_NVCC_COMPILER": str(ours),
        "DG_JIT_CACHE_DIR": str(tmp_path / "deep_gemm"),
        "TRTLLM_DG_NVCC_COMPILER": str(counting),
        "TRTLLM_DG_CACHE_DIR": str(tmp_path / "few"),
        "FLASHINFER_WORKSPACE_BASE": str(runs.caches / "flashinfer"),
    }

    done = subprocess.run(
        [sys.executable, str(BEGIN), str(tmp_path), "2", "320", "832"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:]
    built = kernel_caches.flashinfer(tmp_path / "few").entries()
    assert len(built) > 1
    assert len((tmp_path / "compiled").read_text().split()) == len(built)


@pytest.mark.parametrize("proof", [*MODES, *FOLDERS], ids=str)
def test_nothing_is_built_after_ready(
    proof: Proof, result_of: Callable[[Proof], Result]
) -> None:
    check(result_of(proof))


@pytest.mark.parametrize("proof", [REAL], ids=str)
def test_the_compiler_is_the_one_that_the_requirements_brought(
    proof: Proof, result_of: Callable[[Proof], Result]
) -> None:
    result = result_of(proof)

    check(result)
    compiler = Path(result["nvcc"].removeprefix("real: ").split()[0])
    assert compiler.parts[-4:] == ("nvidia", "cu13", "bin", "nvcc")


@pytest.mark.slow
@pytest.mark.parametrize("proof", [CONTEXT], ids=str)
def test_context_that_mla_computes_again_is_covered(
    proof: Proof, result_of: Callable[[Proof], Result]
) -> None:
    """Stock builds eight kernels after ready."""
    check(result_of(proof), more=5)


@pytest.mark.parametrize("proof", SPECULATIVE, ids=str)
def test_drafters_are_covered(
    proof: Proof, result_of: Callable[[Proof], Result]
) -> None:
    check(result_of(proof))


@pytest.mark.slow
@pytest.mark.parametrize("proof", [BATCH], ids=str)
def test_more_decodes_than_graphs_are_captured_for_are_covered(
    proof: Proof, result_of: Callable[[Proof], Result]
) -> None:
    check(result_of(proof), more=1000)


@pytest.mark.slow
@pytest.mark.parametrize("proof", [STOCK], ids=str)
def test_stock_is_one_switch_away(
    proof: Proof, result_of: Callable[[Proof], Result]
) -> None:
    result = result_of(proof)

    assert result["layers"] is None
    assert result["deep_gemm_before"] > 0


@pytest.mark.slow
def test_a_full_cache_builds_nothing(runs: Runs, tmp_path: Path) -> None:
    kept = f"--keep-cache={tmp_path}"
    first = runs.result(direct(SMALL), kept)

    second = runs.result(direct(SMALL), kept)

    assert second["deep_gemm_found"] == first["deep_gemm_before"] > 0
    assert second["deep_gemm_before"] == 0
    assert second["deep_gemm_after"] == []
