"""Seconds and compiles of a start, stock and ours, by what the start has to build.

    python tests/benchmarks/compiling.py [options] [CASE ...]

Cases: parallel, real, ranks, full, ahead, growth; all unless some are named. Each
prints its rows and then its ratios, with the goals.

Every row is a process of real vLLM layers on the stand-in device, without and with our
files. `parallel`, `ranks`, `full`, `ahead` and `growth` compile with a declared fake
nvcc that only waits; `real` with the one of this machine. What is counted are runs of
the compiler; `nvcc --version` is none. `torch.compile` is off on both sides: what it
takes is neither's, and more than some of the goals.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_deep_gemm_warmup import standin, toolchain
from vllm_deep_gemm_warmup.compiling.cpus import available_cpus
from vllm_deep_gemm_warmup.proof import fake_nvcc

PROGRAM = pathlib.Path(__file__).with_name("warm_layers.py")
# Qwen3-0.6B's four layers: qkv, o, gate_up, down.
SIZES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
# Another model's, for a hundred kernels and more.
ONE_MORE = (2560, 4096)
SIDES = ("stock", "ours")
HEAD = (
    "| case | | start, s | first GEMMs, s | warmup, s | compiles | kernels | calls |",
    "|---|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one start has to do; see ``warm_layers``.

    Attributes:
        nvcc_seconds: What the declared fake waits; None: the real compiler.
        workers: Most compilers at once; None: one a CPU.

    """

    sizes: tuple[tuple[int, int], ...] = SIZES
    copies: int = 1
    ranks: int = 1
    limit: int = 8192
    load: float = 0.0
    nvcc_seconds: float | None = 2.3
    workers: int | None = 16


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a start took: seconds of its slowest rank, and compiles.

    Attributes:
        seconds: From the first layer's construction to the end of the warmup, but for
            those that the load only waits.
        profile: Those of the first GEMMs, which are the memory-profiling run's.
        warmup: Those of the warmup.
        compiles: Runs of the compiler.
        kernels: In the cache.
        cpu: CPU seconds of the compilers.
        calls: GEMMs that the warmup called; None: it does not say.
        specs: That it had to warm.

    """

    seconds: float
    profile: float
    warmup: float
    compiles: int
    kernels: int
    cpu: float
    calls: int | None = None
    specs: int = 0


def write_compiler(folder: pathlib.Path, case: Case) -> pathlib.Path:
    """Write a compiler whose runs and CPU seconds are kept; the CUDA home of it."""
    home = folder / "cuda"
    program = home / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    (folder / "compiled").mkdir()
    if case.nvcc_seconds is None:
        found = toolchain.describe_current()
        assert isinstance(found, toolchain.Toolchain), found
        real, wait = found.nvcc, "true"
    else:
        real = fake_nvcc.install(folder / "fake")
        wait = f"sleep {case.nvcc_seconds}"
    times = shlex.quote(str(folder / "compiled"))
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--cubin*) {wait};; *) exec {shlex.quote(str(real))} "$@";; '
        "esac\n"
        f'{shlex.quote(str(real))} "$@"\n'
        "status=$?\n"
        # Appended: numbers of processes come again.
        f"times >> {times}/$$\n"
        "exit $status\n"
    )
    program.chmod(0o755)
    return home


def cpu_seconds(times: str) -> list[float]:
    """Return the seconds, user and system, of the children of each shell.

    Args:
        times: What ``times`` of POSIX shells printed, two lines each: the shell's own
            and its children's.

    """
    return [sum(map(_seconds, line.split())) for line in times.splitlines()[1::2]]


def _seconds(word: str) -> float:
    minutes, seconds = word.removesuffix("s").split("m")
    return 60 * int(minutes) + float(seconds)


def measure(case: Case, cache: pathlib.Path, *, ours: bool) -> Measured:
    """Start once with the kernels in ``cache``, and what it adds to them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        home = write_compiler(folder, case)
        environ = standin.environment("h100", case.ranks, cache_dir=folder / "caches")
        environ |= {
            "CUDA_HOME": str(home),
            "DG_JIT_CACHE_DIR": str(cache),
            "TORCH_COMPILE_DISABLE": "1",
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
        done = subprocess.run(
            [sys.executable, str(PROGRAM), scratch, json.dumps(values)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(done.stderr[-4000:])
        ranks: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
        slowest = max(ranks, key=lambda rank: sum(rank.values()))
        runs = [
            seconds
            for path in (folder / "compiled").iterdir()
            for seconds in cpu_seconds(path.read_text())
        ]
        return Measured(
            seconds=sum(slowest.values()) - case.load,
            profile=slowest["profile"],
            warmup=slowest["warmup"],
            compiles=len(runs),
            kernels=len(list((cache / "cache").glob("*/.committed"))),
            cpu=sum(runs),
            **_in_report(folder / "report.json"),
        )


def _in_report(path: pathlib.Path) -> dict[str, Any]:
    """Calls and specs of our report; stock writes none."""
    if not path.exists():
        return {}
    specs = json.loads(path.read_text())["specs"]
    return {"calls": sum(spec["calls"] for spec in specs), "specs": len(specs)}


def verdict(what: str, value: float, goal: float) -> str:
    """Return a line that says whether a value is at most its goal."""
    word = "met" if value <= goal else "missed"
    return f"{what}: {value:.3f}, goal at most {goal:.3f}: {word}"


def shares(found: Mapping[str, Measured], goal: float) -> Iterator[str]:
    """Yield how much of stock's seconds ours are, where both sides were run."""
    if len(found) == len(SIDES):
        share = found["ours"].seconds / found["stock"].seconds
        yield verdict("ours / stock", share, goal)


class Benchmark:
    """Runs cases and prints what they took.

    Args:
        sides: Of ``SIDES``, those to be run.
        layers: Most distinct layers of a start; None: the case's.
        rows: Most rows; None: the case's.

    """

    def __init__(self, sides: Sequence[str], layers: int | None, rows: int | None):
        self.sides, self._layers, self._rows = tuple(sides), layers, rows

    def left_out(self) -> Iterator[str]:
        """Yield what was left out."""
        if self._layers or self._rows:
            yield "Smaller than the benchmark (--layers, --rows): no figures of it."
        for side in SIDES:
            if side not in self.sides:
                yield f"Without {side} (--only): no ratio to it."

    def run(self, name: str, case: Case) -> dict[str, Measured]:
        """Print a row for each side, each with a cache of its own, and return them."""
        found = {}
        for side in self.sides:
            with tempfile.TemporaryDirectory() as cache:
                found[side] = self.start(name, side, case, pathlib.Path(cache))
        return found

    def start(self, name: str, side: str, case: Case, cache: pathlib.Path) -> Measured:
        """Start one side with a cache, print a row and return it."""
        smaller = dataclasses.replace(
            case,
            sizes=case.sizes[: self._layers],
            limit=min(case.limit, self._rows or case.limit),
        )
        found = measure(smaller, cache, ours=side == "ours")
        print(row(name, side, found), flush=True)
        return found


def row(name: str, side: str, found: Measured) -> str:
    """Return a row of the table."""
    calls = "" if found.calls is None else found.calls
    return (
        f"| {name} | {side} | {found.seconds:.1f} | {found.profile:.1f} | "
        f"{found.warmup:.1f} | {found.compiles} | {found.kernels} | {calls} |"
    )


def parallel(benchmark: Benchmark) -> Iterator[str]:
    """85 kernels or so, a compiler that takes 2.3 s, 16 at once."""
    yield from shares(benchmark.run("16 workers", Case()), 1 / 8)


def real(benchmark: Benchmark) -> Iterator[str]:
    """The real compiler, as many at once as there are CPUs."""
    cpus = available_cpus()
    case = Case(nvcc_seconds=None, workers=None)
    for side, found in benchmark.run(f"real nvcc, {cpus} CPUs", case).items():
        what = (
            f"{side}, {found.seconds:.1f} s / ({found.cpu:.1f} CPU-seconds of the "
            f"builds / {cpus} CPUs)"
        )
        yield verdict(what, found.seconds / (found.cpu / cpus), 1.15)


def ranks(benchmark: Benchmark) -> Iterator[str]:
    """Eight ranks and one, one cold cache."""
    one = benchmark.run("1 rank", Case())
    eight = benchmark.run("8 ranks", Case(ranks=8))
    for side, found in eight.items():
        each = found.compiles / found.kernels
        yield verdict(f"{side}, compiles / distinct kernels of 8 ranks", each, 1)
        grown = found.seconds / one[side].seconds
        yield verdict(f"{side}, 8 ranks / 1 rank", grown, 1.2)


def full(benchmark: Benchmark) -> Iterator[str]:
    """A second start on the cache of the first; a hundred kernels and more."""
    case = Case(sizes=(*SIZES, ONE_MORE), nvcc_seconds=0.0)
    for side in benchmark.sides:
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder)
            benchmark.start("to fill a cache", side, case, cache)
            found = benchmark.start("full cache", side, case, cache)
        yield verdict(f"{side}, compiles", found.compiles, 0)
        yield verdict(f"{side}, seconds of the warmup", found.warmup, 1)
        if found.calls is not None:
            most = found.kernels + 2 * found.specs
            yield verdict(f"{side}, calls of {found.specs} specs", found.calls, most)


def ahead(benchmark: Benchmark) -> Iterator[str]:
    """Loading takes longer than compiling; the load only waits."""
    case = Case(load=60.0)
    for side in benchmark.sides:
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder)
            empty = benchmark.start("load of 60 s, empty cache", side, case, cache)
            filled = benchmark.start("load of 60 s, full cache", side, case, cache)
        added = empty.seconds - filled.seconds
        yield verdict(f"{side}, seconds that an empty cache adds", added, 1)


def growth(benchmark: Benchmark) -> Iterator[str]:
    """By number of layers and ranks (flat), distinct shapes and rows (by kernels)."""
    small = Case(sizes=SIZES[-1:], nvcc_seconds=0.5, limit=2048, workers=4)
    first = benchmark.run("1 layer", small)
    flat = {
        "20 equal layers": dataclasses.replace(small, copies=20),
        "4 ranks": dataclasses.replace(small, ranks=4),
    }
    by_kernels = {
        "2 shapes": dataclasses.replace(small, sizes=SIZES[-2:]),
        "4 shapes": dataclasses.replace(small, sizes=SIZES),
        "8192 rows": dataclasses.replace(small, limit=8192),
    }
    for name, case in (flat | by_kernels).items():
        for side, found in benchmark.run(name, case).items():
            grown = found.seconds / first[side].seconds
            kernels = found.kernels / first[side].kernels
            goal = 1.2 if name in flat else kernels
            yield verdict(f"{side}, {name} / 1 layer", grown, goal)


CASES: dict[str, Callable[[Benchmark], Iterator[str]]] = {
    case.__name__: case for case in (parallel, real, ranks, full, ahead, growth)
}


def main(argv: Sequence[str]) -> None:
    """Run the cases that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # No choices: argparse would check an empty list against them.
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--only", choices=SIDES, help="run one side: no ratio to it")
    parser.add_argument("--layers", type=int, metavar="N",
        help="at most N distinct layers, to see that it runs")  # fmt: skip
    parser.add_argument("--rows", type=int, metavar="N",
        help="at most N rows, to see that it runs")  # fmt: skip
    given = parser.parse_args(argv)
    for name in given.cases:
        if name not in CASES:
            parser.error(f"no such case ({name}): name some of {', '.join(CASES)}")
    sides = [side for side in SIDES if given.only in (None, side)]
    benchmark = Benchmark(sides, given.layers, given.rows)
    # A run's caches, the stand-in's build among them, are not this one's.
    os.environ.pop("DG_JIT_NVCC_COMPILER", None)
    for line in benchmark.left_out():
        print(line)
    for name in given.cases or CASES:
        print("", *HEAD, sep="\n", flush=True)
        # Rows are printed meanwhile.
        lines = list(CASES[name](benchmark))
        print("", *(f"{name}: {line}" for line in lines), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
