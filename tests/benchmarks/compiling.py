"""Seconds and compiles of a start, stock and ours, by what the start has to build.

    python tests/benchmarks/compiling.py [CASE ...]

Cases: parallel, real, ranks, full, ahead, growth; all unless some are named.

Every row is a process of real vLLM layers on the stand-in device, without and with our
files. `parallel`, `ranks`, `full`, `ahead` and `growth` compile with a declared fake
nvcc that only waits; `real` with the one of this machine. What is counted are runs of
the compiler; `nvcc --version` is none.
"""

import dataclasses
import json
import os
import pathlib
import resource
import shlex
import subprocess
import sys
import tempfile
from typing import Any

from vllm_deep_gemm_warmup import standin, toolchain
from vllm_deep_gemm_warmup.compiling.cpus import available_cpus
from vllm_deep_gemm_warmup.proof import fake_nvcc

PROGRAM = pathlib.Path(__file__).with_name("warm_layers.py")
# Qwen3-0.6B's four layers: qkv, o, gate_up, down.
SIZES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]


@dataclasses.dataclass(frozen=True)
class Case:
    """What one start has to do; see ``warm_layers``.

    Attributes:
        nvcc_seconds: What the declared fake waits; None: the real compiler.
        workers: Most compilers at once; None: one a CPU.

    """

    sizes: tuple[tuple[int, int], ...] = tuple(SIZES)
    copies: int = 1
    ranks: int = 1
    limit: int = 8192
    load: float = 0.0
    nvcc_seconds: float | None = 2.3
    workers: int | None = 16


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a start took: seconds after loading, of its slowest rank, and compiles."""

    profile: float
    warmup: float
    compiles: int
    entries: int
    calls: int | None
    cpu: float

    @property
    def seconds(self) -> float:
        """Seconds that the start waits once the weights are in."""
        return self.profile + self.warmup


def write_compiler(folder: pathlib.Path, case: Case) -> pathlib.Path:
    """Write a compiler that counts its runs; the CUDA home that holds it."""
    home = folder / "cuda"
    program = home / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    if case.nvcc_seconds is None:
        found = toolchain.describe_current()
        assert isinstance(found, toolchain.Toolchain), found
        real, wait = found.nvcc, "true"
    else:
        real = fake_nvcc.install(folder / "fake")
        wait = f"sleep {case.nvcc_seconds}"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--cubin*) echo $$ >> {folder}/compiled; {wait};; esac\n'
        f'exec {shlex.quote(str(real))} "$@"\n'
    )
    program.chmod(0o755)
    return home


def measure(case: Case, cache: pathlib.Path, *, ours: bool) -> Measured:
    """Start once with the kernels in ``cache``, and what it adds to them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        home = write_compiler(folder, case)
        environ = standin.environment("h100", case.ranks, cache_dir=folder / "caches")
        environ |= {
            "CUDA_HOME": str(home),
            "DG_JIT_CACHE_DIR": str(cache),
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
            "VLLM_DEEP_GEMM_OVERLAY": "1" if ours else "0",
            "VLLM_DEEP_GEMM_WARMUP_REPORT": str(folder / "report.json"),
        }
        if case.workers:
            environ["VLLM_DEEP_GEMM_WARMUP_WORKERS"] = str(case.workers)
        values = {
            name: getattr(case, name)
            for name in ("sizes", "copies", "ranks", "limit", "load")
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, str(PROGRAM), scratch, json.dumps(values)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(done.stderr[-4000:])
        ranks: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
        log, report = folder / "compiled", folder / "report.json"
        slowest = max(ranks, key=lambda rank: rank["profile"] + rank["warmup"])
        return Measured(
            slowest["profile"],
            slowest["warmup"],
            len(log.read_text().split()) if log.exists() else 0,
            len(list((cache / "cache").glob("*/.committed"))),
            _calls(json.loads(report.read_text())) if report.exists() else None,
            sum(
                getattr(after, n) - getattr(before, n) for n in ("ru_utime", "ru_stime")
            ),
        )


def _calls(report: dict[str, Any]) -> int:
    return sum(spec["calls"] for spec in report["specs"])


def both(name: str, case: Case) -> Measured:
    """Print a row of stock and one of ours, each with a cache of its own."""
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as cache:
            found = measure(case, pathlib.Path(cache), ours=ours)
        show(name, "ours" if ours else "stock", found)
    return found


def show(name: str, side: str, found: Measured) -> None:
    """Print a row."""
    calls = "" if found.calls is None else found.calls
    print(
        f"| {name} | {side} | {found.profile:.1f} | {found.warmup:.1f} | "
        f"{found.compiles} | {found.entries} | {calls} |",
        flush=True,
    )


def parallel() -> None:
    """85 kernels or so, a compiler that takes 2.3 s, 16 at once."""
    both("16 workers", Case())


def real() -> None:
    """The real compiler, as many at once as there are CPUs; one small layer."""
    case = Case(sizes=((1024, 3072),), limit=512, nvcc_seconds=None, workers=None)
    found = both(f"real nvcc, {available_cpus()} CPUs", case)
    print(f"CPU seconds of the whole process, imports too: {found.cpu:.0f}")


def ranks() -> None:
    """Eight ranks and one, one cold cache, a compiler that takes 1 s."""
    for number in (1, 8):
        both(f"{number} ranks", Case(ranks=number, nvcc_seconds=1.0))


def full() -> None:
    """A second start on the cache of the first."""
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder)
            measure(Case(nvcc_seconds=0.0), cache, ours=ours)
            found = measure(Case(nvcc_seconds=0.0), cache, ours=ours)
        show("full cache", "ours" if ours else "stock", found)


def ahead() -> None:
    """Loading takes longer than compiling."""
    both("load of 60 s", Case(load=60.0))


def growth() -> None:
    """By number of layers, distinct shapes, rows and ranks."""
    small = Case(sizes=((1024, 3072),), nvcc_seconds=0.5, limit=2048, workers=4)
    rows = {
        "1 layer": small,
        "20 equal layers": dataclasses.replace(small, copies=20),
        "2 shapes": dataclasses.replace(small, sizes=((1024, 3072), (4096, 1024))),
        "4 shapes": dataclasses.replace(small, sizes=tuple(SIZES)),
        "8192 rows": dataclasses.replace(small, limit=8192),
        "4 ranks": dataclasses.replace(small, ranks=4),
    }
    for name, case in rows.items():
        both(name, case)


CASES = {f.__name__: f for f in (parallel, real, ranks, full, ahead, growth)}


def main() -> None:
    """Run the cases that are named, or all."""
    print("| case | | first GEMMs, s | warmup, s | compiles | kernels | calls |")
    print("|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or CASES:
        CASES[name]()


if __name__ == "__main__":
    # A run's caches, the stand-in's build among them, are not this one's.
    os.environ.pop("DG_JIT_NVCC_COMPILER", None)
    main()
