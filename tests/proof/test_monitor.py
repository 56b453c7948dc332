"""A kernel built after ready, by HTTP: counted on `/metrics`, fatal if asked for."""

import contextlib
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.proof import run, server
from vllm_deep_gemm_warmup.proof.client import Endpoint, send
from vllm_deep_gemm_warmup.proof.environment import (
    caches,
    server_environment,
    socket_folder,
)
from vllm_deep_gemm_warmup.proof.settings import parse
from vllm_deep_gemm_warmup.proof.workload import Request

from .runs import MODELS

SMALL = "qwen3-0.6b-fp8"
# Above what graphs are captured for.
ROWS = 700


class Served:
    """A server that warmed up nothing."""

    def __init__(self, url: str, log: Path) -> None:
        self._url, self._log = url, log

    def builds(self) -> float:
        with urllib.request.urlopen(f"{self._url}/metrics") as answer:
            text = answer.read().decode()
        name = "vllm:deep_gemm_jit_builds_total"
        found = re.search(rf'{name}{{entry_point="fp8_gemm_nt"}} (\S+)', text)
        assert found, text
        return float(found[1])

    def ask(self) -> int:
        """Send a prompt; return how many answers were right."""
        request = Request("prompt", ROWS, 1, 0)
        return send(Endpoint(self._url, SMALL, 1000), [[request]], 120).right

    def reported(self) -> list[str]:
        """Return the GEMMs that were reported, each once."""
        pattern = (
            r"DeepGEMM kernel JIT compilation during inference: \S+ "
            r"\(fp8_gemm_nt (N=\d+ K=\d+ rows=\d+), \d+\.\d\d s\)"
        )
        return sorted(set(re.findall(pattern, self._log.read_text())))


@contextlib.contextmanager
def serve(
    environ: Mapping[str, str], folder: Path, mode: str, *options: str
) -> Iterator[Served]:
    command = [str(MODELS / SMALL), "--kernel=deep_gemm", "--nvcc=fake"]
    settings = parse([*command, f"--mode={mode}", "--", *options])
    port, log = server.free_port(), folder / "log"
    serve_command = run.serve_command(settings, port)
    with socket_folder() as sockets:
        where = caches(settings, folder, sockets)
        there = server_environment(settings, where, environ)
        there["VLLM_DEEP_GEMM_WARMUP"] = "skip"
        there["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        with server.running(serve_command, there, port, log, 600) as up:
            yield Served(up.base_url, log)


@pytest.mark.slow
def test_builds_are_reported_once_and_counted(
    bare_environment: Mapping[str, str], tmp_path: Path
) -> None:
    with serve(bare_environment, tmp_path, "eager") as served:
        assert served.builds() == 0.0
        assert served.ask() == 1
        assert served.builds() == 4.0
        assert served.ask() == 1
        assert served.builds() == 4.0
        assert served.reported() == [
            f"N={n} K={k} rows={ROWS}"
            for n, k in ((1024, 2048), (1024, 3072), (4096, 1024), (6144, 1024))
        ]


@pytest.mark.slow
def test_error_mode_ends_the_engine(
    bare_environment: Mapping[str, str], tmp_path: Path
) -> None:
    with serve(
        bare_environment, tmp_path, "graphs", "--jit-monitor-mode=error"
    ) as served:
        assert served.builds() == 0.0
        assert served.ask() == 0
        assert served.reported() == [f"N=4096 K=1024 rows={ROWS}"]
        assert served.ask() == 0
