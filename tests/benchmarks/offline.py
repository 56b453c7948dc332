"""What an offline compile takes: seconds, memory, kernels.

    python tests/benchmarks/offline.py [--nvcc fake] [MODEL [ARGUMENTS ...]]

Runs `vllm-deep-gemm compile MODEL --output DIR ARGUMENTS` and prints a table. MODEL is
tests/models/deepseek-v3 unless it is given, ARGUMENTS are then those of 8 tensor-
parallel ranks on H100. Stock vLLM has a row and no figures: it builds kernels on a GPU
only, with the weights in it.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from vllm_deep_gemm_warmup.offline.manifest import Manifest
from vllm_deep_gemm_warmup.proof import fake_nvcc

COMPILE = (sys.executable, "-m", "vllm_deep_gemm_warmup.cli", "compile")
MODEL = pathlib.Path(__file__).parents[1] / "models" / "deepseek-v3"
ARGUMENTS = ("--device", "h100", "--tensor-parallel-size", "8")
# A look at a process with much memory takes milliseconds of CPU.
SECONDS_BETWEEN_LOOKS = 1.0
MB = 1000 * 1000


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compile took.

    Attributes:
        seconds: Wall.
        together: Most memory of all its processes, in bytes, what they share counted
            once (``Pss`` of proc(5)); looked at every ``SECONDS_BETWEEN_LOOKS``.
        largest: Most memory of one of its processes, in bytes.
        kernels: Built.
        specs: Planned.

    """

    seconds: float
    together: int
    largest: int
    kernels: int
    specs: int


def tree(process: int) -> Iterator[int]:
    """Yield the process and those that descend from it, those that end left out."""
    yield process
    for task in pathlib.Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def memory(process: int) -> int:
    """Return the bytes of a process, its share of what it shares; 0: it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines if line.startswith("Pss:"))
    return sum(1024 * int(kilobytes) for _, kilobytes, _ in found)


def run(command: Sequence[str], environ: Mapping[str, str]) -> tuple[float, int, int]:
    """Run a command; its seconds, and the most memory together and of one process.

    Raises:
        SystemExit: It failed.

    """
    begin, together = time.monotonic(), 0
    with subprocess.Popen(command, env=dict(environ)) as child:
        while child.returncode is None:
            together = max(together, sum(map(memory, tree(child.pid))))
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_BETWEEN_LOOKS)
    if child.returncode:
        raise SystemExit(child.returncode)
    seconds = time.monotonic() - begin
    largest = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return seconds, together, largest


def measure(words: Sequence[str], nvcc: str) -> Compiled:
    """Compile into a folder that is removed again.

    Args:
        words: MODEL and ARGUMENTS.
        nvcc: ``real``, this machine's, or ``fake``, the declared one.

    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        environ = dict(os.environ)
        if nvcc == "fake":
            fake_nvcc.install(folder / "cuda" / "bin")
            environ.pop("DG_JIT_NVCC_COMPILER", None)
            environ["CUDA_HOME"] = str(folder / "cuda")
        output = folder / "kernels"
        model, *arguments = words
        command = [*COMPILE, model, f"--output={output}", *arguments]
        taken = run(command, environ)
        manifest = Manifest.read(output)
        return Compiled(*taken, kernels=len(manifest.kernels), specs=manifest.specs)


def table(found: Compiled, words: Sequence[str], nvcc: str) -> list[str]:
    """Return the table, stock's row among them."""
    fake = "" if nvcc == "real" else ", a declared fake `nvcc` that compiles nothing"
    ours = (
        f"{found.seconds:.0f} | {found.kernels} | {found.specs} | "
        f"{found.together / MB:.0f} | {found.largest / MB:.0f}"
    )
    return [
        f"`{' '.join(words)}`{fake}",
        "",
        "| | seconds | kernels | specs | MB, all processes | MB, the largest |",
        "|---|---|---|---|---|---|",
        "| stock | cannot: it compiles on a GPU that holds the weights | | | | |",
        f"| ours | {ours} |",
    ]


def main(argv: Sequence[str]) -> None:
    """Compile and print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvcc", choices=("real", "fake"), default="real")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="MODEL ARGUMENTS")
    given = parser.parse_args(argv)
    words = given.words or [os.path.relpath(MODEL), *ARGUMENTS]
    print("", *table(measure(words, given.nvcc), words, given.nvcc), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
