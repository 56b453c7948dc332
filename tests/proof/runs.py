"""Runs of the proof as a user makes them, in processes of their own."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[1] / "models"
# One server leaves half of a machine idle.
AT_A_TIME = 2

Result = dict[str, Any]


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


class Runs:
    """Runs of the command, two at a time, each with its result or its output.

    ``caches`` are what they share; no DeepGEMM kernel is in them.
    """

    def __init__(self, environ: Mapping[str, str], caches: Path, folder: Path) -> None:
        self._environ, self.caches, self._folder = environ, caches, folder
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def result(self, proof: Proof, *more: str) -> Result:
        """Run ``proof`` as a user does and return what its ``--json`` holds."""
        assert not self._stopped
        path = self._folder / f"{uuid.uuid4()}.json"
        command = [
            sys.executable, "-m", "vllm_deep_gemm_warmup.proof.run",
            str(MODELS / proof.model), f"--nvcc={proof.nvcc}", f"--json={path}",
            f"--other-caches={self.caches}", *more, *proof.options,
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


class Started:
    """Runs that were started in advance, and their results by proof."""

    def __init__(self, runs: Runs, proofs: Iterable[Proof]) -> None:
        self.runs = runs
        self._pool = ThreadPoolExecutor(AT_A_TIME)
        self._results: dict[Proof, Future[Result]] = {
            proof: self._pool.submit(runs.result, proof)
            for proof in dict.fromkeys(proofs)
        }

    def result(self, proof: Proof) -> Result:
        """Wait for the run of ``proof``."""
        return self._results[proof].result()

    def stop(self) -> None:
        self.runs.stop()
        self._pool.shutdown(cancel_futures=True)
