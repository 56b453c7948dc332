"""Decides which runs make up a matrix of models and modes; prints a table."""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from vllm_deep_gemm_warmup.proof import run
from vllm_deep_gemm_warmup.proof.rows import measured
from vllm_deep_gemm_warmup.proof.settings import (
    Settings,
    positive,
    serve_options,
)

DEVICES = ("h100", "h20")
COLUMNS = (
    "model", "device", "mode", "runner", "kernel", "side", "layers",
    "before", "after", "FlashInfer before", "FlashInfer after", "requests", "ready s",
    "requests s", "commit",
)  # fmt: skip


def cells(folders: Iterable[Path], template: Settings, full: bool) -> list[Settings]:
    """Return the runs of a matrix; all folders pass before the mode changes.

    Every folder on H100 and H20, eager and with graphs, with vLLM's default kernel
    choice and with DeepGEMM alone, on the V2 runner. ``full`` adds the V1 runner.
    """
    runners = ("v2", "v1") if full else ("v2",)
    modes = product(
        ("deep_gemm", "default"), runners, ("eager", "graphs"), DEVICES, folders
    )
    return [
        replace(
            template,
            model=model,
            device=device,
            mode=mode,
            runner=runner,
            kernel=kernel,
        )
        for kernel, runner, mode, device, model in modes
    ]


def _line(row: Mapping[str, Any]) -> str:
    facts = row["settings"]
    side = "stock" if facts["stock"] else "overlay"
    model = " ".join([facts["model"], *facts["extra"]])
    head = [model, facts["device"], facts["mode"], facts["runner"]]
    head += [facts["kernel"], side]
    if "error" in row:
        rest = [row["error"].splitlines()[0], *[""] * 7]
    else:
        layers = "-" if row["layers"] is None else row["layers"]
        rest = [
            layers,
            row["deep_gemm_before"],
            len(row["deep_gemm_after"]),
            row["flashinfer_before"],
            len(row["flashinfer_after"]),
            f"{row['right']}/{row['asked']}",
            row["ready_seconds"],
            row["request_seconds"],
        ]
    return "| " + " | ".join(map(str, [*head, *rest, row["commit"]])) + " |"


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(head + [_line(row) for row in rows])


def _cell(row: Mapping[str, Any]) -> str:
    """Return kernels before and after ready; FlashInfer's own behind a plus sign."""
    if "error" in row or run.from_row(row).problems:
        return "failed"
    before, after = row["deep_gemm_before"], len(row["deep_gemm_after"])
    own, late = row["flashinfer_before"], len(row["flashinfer_after"])
    return f"{before}+{own} / {after}+{late}" if own or late else f"{before} / {after}"


def overview(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return one line a model and kernel choice, one column a device and mode."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        facts = row["settings"]
        model = " ".join([facts["model"], *facts["extra"]])
        side = "stock" if facts["stock"] else "overlay"
        line = (model, facts["kernel"], facts["runner"], side, row["commit"])
        column = f"{facts['device']} {facts['mode']}"
        lines.setdefault(line, {})[column] = _cell(row)
    columns = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    head = ["model", "kernel", "runner", "side", *columns, "commit"]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (*names, commit), found in lines.items():
        texts = [*names, *(found.get(name, "") for name in columns), commit]
        table.append("| " + " | ".join(texts) + " |")
    return "\n".join(table)


def _folders(root: Path, names: Sequence[str]) -> list[Path]:
    found = sorted(path.parent for path in root.glob("*/config.json"))
    return [path for path in found if not names or path.name in names]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="vllm-deep-gemm prove --matrix",
        usage="vllm-deep-gemm prove --matrix FOLDER [options] [-- vllm serve options]",
        description="Prove every model folder in FOLDER on H100 and H20, eager and "
        "with graphs, with both kernel choices. Rows are kept in a JSON lines file; "
        "a run that is in it with the same commit is not repeated.",
    )
    add = made.add_argument
    add("folder", type=Path, metavar="FOLDER", help="holds model folders")
    add("--rows", type=Path, default=Path("matrix.jsonl"), metavar="FILE")
    add("--only", action="append", default=[], metavar="NAME", help="one model folder")
    add("--kernel", choices=("default", "deep_gemm"), help="one kernel choice only")
    add("--mode", choices=("eager", "graphs"), help="one mode only")
    add("--device", choices=DEVICES, help="one device only")
    add("--full", action="store_true", help="the V1 runner as well")
    add("--stock", action="store_true", help="vLLM without this patch set")
    add("--nvcc", choices=("real", "fake"), default="fake")
    add(
        "--max-num-batched-tokens",
        dest="limit",
        type=positive,
        default=8192,
        metavar="N",
    )
    add("--other-caches", type=Path, metavar="DIR",
        help="keep here what is not a DeepGEMM kernel; the runs share it")  # fmt: skip
    return made


def main(argv: Sequence[str]) -> int:
    """Run the matrix; return 0 when every cell of it was proved."""
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:at])
    folders = _folders(options.folder, options.only)
    if not folders:
        print(f"matrix ({options.folder}): no folder with config.json", file=sys.stderr)
        return 2
    unknown = set(options.only) - {folder.name for folder in folders}
    if unknown:
        print(
            f"matrix ({options.folder}): no folder {', '.join(sorted(unknown))} with "
            "config.json",
            file=sys.stderr,
        )
        return 2
    run.check_file(options.rows)
    template = Settings(
        model=folders[0],
        stock=options.stock,
        nvcc=options.nvcc,
        limit=options.limit,
        other_caches=options.other_caches,
        extra=serve_options(given[at + 1 :]),
    )
    wanted = [
        cell
        for cell in cells(folders, template, options.full)
        if options.kernel in (None, cell.kernel)
        and options.mode in (None, cell.mode)
        and options.device in (None, cell.device)
    ]
    pairs = list(measured(wanted, options.rows))
    rows = [row for row, _ in pairs]
    print(markdown(rows), overview(rows), sep="\n\n")
    return 0 if all(good for _, good in pairs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
