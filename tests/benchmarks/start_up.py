"""Start-up of stock and of this patch set, each on an empty cache, as one ratio.

    python tests/benchmarks/start_up.py MODEL_DIR [options of `vllm-deep-gemm prove`]

Runs `vllm-deep-gemm prove` for stock, then for ours, and prints how long each took
until `/health` answered and until the first request was answered. A ratio above 1:
stock took longer.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROVE = (sys.executable, "-m", "vllm_deep_gemm_warmup.proof.run")

Result = dict[str, Any]


def measure(arguments: Sequence[str], folder: Path) -> Result:
    """Run one proof on caches of its own and return what its ``--json`` holds.

    Raises:
        SystemExit: a request was not answered as asked, or the server did not start.
    """
    path = folder / "result.json"
    done = subprocess.run([*PROVE, *arguments, f"--json={path}"], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    loaded: Result = json.loads(path.read_text())
    return loaded


def first_answer(result: Result) -> float:
    """Return the seconds from the start until the first request was answered."""
    return float(result["ready_seconds"]) + float(result["first_request_seconds"])


def lines(stock: Result, ours: Result) -> list[str]:
    """Return the comparison as a markdown table."""
    rows = [
        ("seconds to ready", stock["ready_seconds"], ours["ready_seconds"]),
        ("seconds to the first answer", first_answer(stock), first_answer(ours)),
    ]
    table = ["| | stock | ours | stock / ours |", "|---|---|---|---|"]
    for name, theirs, mine in rows:
        table.append(f"| {name} | {theirs:.1f} | {mine:.1f} | {theirs / mine:.2f} |")
    for name, key in (
        ("DeepGEMM kernels before ready", "deep_gemm_before"),
        ("FlashInfer's kernels before ready", "flashinfer_before"),
    ):
        table.append(f"| {name} | {stock[key]} | {ours[key]} | |")
    for name, key in (
        ("DeepGEMM kernels after ready", "deep_gemm_after"),
        ("FlashInfer's kernels after ready", "flashinfer_after"),
    ):
        table.append(f"| {name} | {len(stock[key])} | {len(ours[key])} | |")
    return table


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    results = []
    for side in (("--stock",), ()):
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure([argv[0], *side, *argv[1:]], Path(folder)))
    print(*lines(*results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
