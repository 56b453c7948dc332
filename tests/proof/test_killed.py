"""A cache outlives what filled it: killed starts, and a host that cannot compile."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.kernel_caches import EntryState, deep_gemm
from vllm_deep_gemm_warmup.offline import archive
from vllm_deep_gemm_warmup.proof import run, server, workload
from vllm_deep_gemm_warmup.proof.client import Endpoint, send
from vllm_deep_gemm_warmup.proof.environment import (
    caches,
    server_environment,
    socket_folder,
)
from vllm_deep_gemm_warmup.proof.settings import Settings, parse
from vllm_deep_gemm_warmup.toolchain import facts

from ..processes import family_of, is_running, wait_for
from .runs import MODELS, Runs

SMALL = "qwen3-0.6b-fp8"
VOCABULARY = 1000
KERNELS = 88
WITHOUT_NVCC = Path(__file__).with_name("without_nvcc.py")
NOT_ALLOWED = 77
# Whom to kill, at some moment after a start has built more than so many kernels.
FEWEST = {"engine": 0, "API server": 10, "all": 20}


def toolkits() -> list[Path]:
    """The folders of compilers where DeepGEMM and we look without being told."""
    found = [root / "bin" for root in facts.pip_roots(sys.path)]
    if (facts.FALLBACK_HOME / "bin").is_dir():
        found.append(facts.FALLBACK_HOME / "bin")
    return [folder.resolve() for folder in found]


def python_without(folders: list[Path]) -> list[str]:
    """The beginning of a command line of Python that sees these folders empty."""
    return [sys.executable, str(WITHOUT_NVCC), *map(str, folders), "--"]


class Host:
    """A machine that serves the small model, with one cache for all its starts."""

    def __init__(
        self, environ: Mapping[str, str], others: Path, folder: Path, sockets: Path
    ) -> None:
        self._base, self._others, self._sockets = environ, others, sockets
        command = [str(MODELS / SMALL), "--kernel=deep_gemm", "--nvcc=fake"]
        kept = [f"--keep-cache={folder / 'kept'}", f"--other-caches={others}"]
        self.settings: Settings = parse([*command, *kept])
        self._where = caches(self.settings, folder, sockets)
        self.cache = deep_gemm(self._where.deep_gemm)
        self.environ = server_environment(self.settings, self._where, environ)
        self.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.log = folder / "log"
        self._late, self._ready = folder / "late", folder / "ready"
        self._put_a_slow_compiler_in_place(folder / "nvcc")

    def without_nvcc(self, folder: Path) -> "Host":
        """Another host, with an empty cache."""
        (folder / "host").mkdir()
        other = Host(self._base, self._others, folder / "host", self._sockets)
        for name in ("DG_JIT_NVCC_COMPILER", "TRTLLM_DG_NVCC_COMPILER", "CUDA_HOME"):
            other.environ.pop(name, None)
        command = [*python_without(toolkits()), *other.settings.vllm[1:]]
        other.settings = replace(other.settings, vllm=tuple(command))
        return other

    def _put_a_slow_compiler_in_place(self, program: Path) -> None:
        """Slow enough to be killed at; after ready slower than probes wait (G37)."""
        works = self.environ["DG_JIT_NVCC_COMPILER"]
        program.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *--cubin*) if [ -e {self._ready} ]; then '
            f"echo $* >> {self._late}; sleep 5; else sleep 0.2; fi;; esac\n"
            f'exec {works} "$@"\n'
        )
        program.chmod(0o755)
        self.environ["DG_JIT_NVCC_COMPILER"] = str(program)

    def start(self) -> subprocess.Popen[bytes]:
        """Begin a start, in a process group of its own."""
        command = run.serve_command(self.settings, server.free_port())
        with self.log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def serve(self) -> int:
        """Start, send what `prove` sends, end; the kernels built before ready."""
        before = self.cache.entries()
        port, log = server.free_port(), self.log
        steps = [[it] for it in workload.sized_requests(self.settings.limit)]
        steps += workload.batch_requests()
        command = run.serve_command(self.settings, port)
        with server.running(command, self.environ, port, log, 900) as up:
            self._ready.touch()
            ready = self.cache.entries()
            answers = send(Endpoint(up.base_url, SMALL, VOCABULARY), steps, 300)
        assert answers.right == answers.asked == 463 + 556, server.tail(log)
        assert not self._late.exists(), self._late.read_text()
        assert self.cache.entries() == ready
        return len(ready - before)


@pytest.fixture(scope="module")
def host(
    runs: Runs,
    bare_environment: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Host]:
    """Of the machine's environment, without its toolkits; one cache for all tests."""
    with socket_folder() as sockets:
        folder = tmp_path_factory.mktemp("host")
        yield Host(bare_environment, runs.caches, folder, sockets)


def engine_of(leader: int) -> int:
    """The process that has kernels built: the parent of what builds them."""
    for process in family_of(leader):
        line = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if b"vllm_deep_gemm_warmup.compiling.coordinator" in line:
            return int(Path(f"/proc/{process}/stat").read_text().split()[3])
    raise AssertionError("nothing builds kernels")


def kill_a_start(host: Host, victim: str, fewest: int, pause: float) -> None:
    """Kill so many seconds after so many kernels; nothing that compiles is left."""
    before = len(host.cache.entries())
    leader = host.start()
    try:
        wait_for(
            lambda: (
                len(host.cache.entries()) - before > fewest or leader.poll() is not None
            ),
            600,
        )
        assert leader.poll() is None, server.tail(host.log)
        engine, family = engine_of(leader.pid), family_of(leader.pid)
        time.sleep(pause)
        if victim == "all":
            os.killpg(leader.pid, signal.SIGKILL)
        else:
            os.kill(engine if victim == "engine" else leader.pid, signal.SIGKILL)
        leader.wait(60)
        wait_for(lambda: not any(map(is_running, family)), 120)
    finally:
        server.end(leader)
    assert set(dict(host.cache.judge_all()).values()) == {EntryState.WHOLE}


@pytest.fixture(scope="module")
def survivor(host: Host) -> Host:
    """The cache of three starts that were killed, and served from since."""
    chance = random.Random(3)
    for victim, fewest in FEWEST.items():
        kill_a_start(host, victim, fewest, chance.uniform(0, 0.5))
    host.serve()
    return host


@pytest.mark.slow
def test_three_killed_starts_leave_a_cache_that_serves(survivor: Host) -> None:
    """Whole, and nothing is compiled after ready, which would take 5 s each (G37)."""
    assert len(survivor.cache.entries()) == KERNELS
    assert set(dict(survivor.cache.judge_all()).values()) == {EntryState.WHOLE}


@pytest.mark.slow
def test_a_host_without_an_nvcc_serves_from_a_pack(
    survivor: Host, tmp_path: Path
) -> None:
    """No compiler is on it, in a variable, on PATH, in pip's or the system's folder."""
    code = "import os, sys; print(*map(os.path.exists, sys.argv[1:]))"
    programs = [str(folder / "nvcc") for folder in toolkits()]
    seen = subprocess.run(
        [*python_without(toolkits()), "-c", code, *programs],
        capture_output=True,
        text=True,
        check=False,
    )
    if seen.returncode == NOT_ALLOWED:
        pytest.skip("this user may not hide the toolkits")
    assert set(seen.stdout.split()) == {"False"}
    file = tmp_path / "kernels.tar"
    archive.pack(survivor.cache.root, file)
    host = survivor.without_nvcc(tmp_path)
    archive.unpack(file, host.cache.root)
    assert host.serve() == 0
    assert "there is no nvcc on this host" in host.log.read_text()
