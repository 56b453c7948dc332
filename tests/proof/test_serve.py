"""The proof: the real `vllm serve` on the stand-in, nothing built after ready.

One server leaves half of a machine idle, so the runs that the selected tests need are
started in advance, two at a time; a test waits for its own.
"""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parents[1] / "models"
SMALL = "qwen3-0.6b-fp8"
AT_A_TIME = 2


@dataclass(frozen=True)
class Proof:
    """One call of the command.

    ``start`` is how vLLM starts its engine: `vllm serve` spawns it unless told, which
    costs half a minute more of imports than to fork it.
    """

    model: str
    options: tuple[str, ...]
    nvcc: str = "fake"
    start: str = "fork"

    def __str__(self) -> str:
        return " ".join([self.model, *self.options, self.nvcc, self.start])


def direct(model: str, *options: str, start: str = "fork") -> Proof:
    """Return a run with DeepGEMM alone, without FlashInfer's kernel."""
    return Proof(model, ("--kernel=deep_gemm", *options), start=start)


def slow(proof: Proof) -> Any:
    return pytest.param(proof, marks=pytest.mark.slow)


MODES = [
    direct(SMALL, "--mode=graphs"),
    direct(SMALL, start="spawn"),
    direct(SMALL, "--runner=v1"),
    slow(direct(SMALL, "--runner=v1", "--mode=graphs")),
    slow(direct(SMALL, "--tp=2", start="spawn")),
]
EXPERTS = "qwen3-30b-a3b-fp8"
FOLDERS = [
    direct(path.parent.name, f"--device={('h100', 'h20')[number % 2]}")
    for number, path in enumerate(sorted(MODELS.glob("*/config.json")))
    if path.parent.name not in (SMALL, EXPERTS)
]
# Its experts run on DeepGEMM only where the operator asks for it.
FOLDERS.append(direct(EXPERTS, "--", "--moe-backend=deep_gemm"))
# Slow: FlashInfer's module alone is four minutes of compiling.
DEFAULT = [slow(Proof(SMALL, ())), slow(Proof(SMALL, ("--mode=graphs",)))]
# 64 rows: three classes of rows, a few kernels, each a real Hopper cubin.
REAL = Proof(SMALL, ("--kernel=deep_gemm", "--max-num-batched-tokens=64"), nvcc="real")
STOCK = direct(SMALL, "--stock")

Result = dict[str, Any]


class Runs:
    """Runs of the command, two at a time, each with its result or its output."""

    def __init__(self, environ: Mapping[str, str], caches: Path, folder: Path) -> None:
        self._environ, self._caches, self._folder = environ, caches, folder
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def result(self, proof: Proof, *more: str) -> Result:
        """Run ``proof`` as a user does and return what its ``--json`` holds."""
        assert not self._stopped
        path = self._folder / f"{uuid.uuid4()}.json"
        command = [
            sys.executable, "-m", "vllm_deep_gemm_warmup.proof.run",
            str(MODELS / proof.model), f"--nvcc={proof.nvcc}", f"--json={path}",
            f"--other-caches={self._caches}", *more, *proof.options,
        ]  # fmt: skip
        environ = dict(self._environ) | {"VLLM_WORKER_MULTIPROC_METHOD": proof.start}
        with subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            self._running.add(process)
            output, _ = process.communicate()
            self._running.discard(process)
        assert process.returncode == 0, output
        loaded: Result = json.loads(path.read_text())
        return loaded

    def stop(self) -> None:
        """End the runs in progress; each ends its server and removes its folder."""
        self._stopped = True
        for process in tuple(self._running):
            process.terminate()


@pytest.fixture(scope="session")
def runs(
    bare_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    made = Runs(
        bare_environment,
        tmp_path_factory.mktemp("other-caches"),
        tmp_path_factory.mktemp("results"),
    )
    yield made
    made.stop()


@pytest.fixture(scope="session")
def result_of(
    request: pytest.FixtureRequest, runs: Runs
) -> Iterator[Callable[[Proof], Result]]:
    """Start what the selected tests are parametrized with; hand out by proof."""
    params = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = [
        spec.params["proof"] for spec in params if spec and "proof" in spec.params
    ]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        started = {proof: pool.submit(runs.result, proof) for proof in wanted}
        try:
            yield lambda proof: started[proof].result()
        finally:
            runs.stop()
            pool.shutdown(cancel_futures=True)


def check(result: Result) -> None:
    assert result["right"] == result["asked"] == 463 + 556
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
