"""Decides what the table of entry points holds: one row a way into DeepGEMM."""

import argparse
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_deep_gemm_warmup.proof import run
from vllm_deep_gemm_warmup.proof.rows import Row, measured
from vllm_deep_gemm_warmup.proof.settings import Settings, UsageError, parse


@dataclass(frozen=True)
class Case:
    """One way into DeepGEMM, and the run that takes it.

    Attributes:
        name: What is called, or when.
        settings: The run, as ours; None where ``reason`` says why there is none.
        reason: Why no server shows it.
        kernels: Of the run's kernels those are counted whose text this expression
            finds; "": all, FlashInfer's among them.

    """

    name: str
    settings: Settings | None
    reason: str = ""
    kernels: str = ""


def load(path: Path) -> list[Case]:
    """Return the cases of a TOML file, whose model folders lie beside it.

    Each ``[[case]]`` has a ``name`` and either ``prove``, the arguments of
    `vllm-deep-gemm prove`, in which ``{models}`` is that folder, or the ``reason`` why
    there is no run; with ``prove`` it can have ``kernels``, see ``Case``, and a table
    ``environment`` of variables for its servers.

    Raises:
        UsageError: the file cannot be read, or a case is not of this form.
    """
    try:
        cases = tomllib.loads(path.read_text())["case"]
        return [_case(path.parent, case) for case in cases]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"cases ({path}): {type(error).__name__}: {error}; give each [[case]] a "
            "name, and prove or reason"
        ) from error


def _case(folder: Path, case: Mapping[str, Any]) -> Case:
    if "reason" in case:
        return Case(case["name"], None, case["reason"])
    model, *options = (word.replace("{models}", str(folder)) for word in case["prove"])
    variables = case.get("environment", {})
    if not all(isinstance(value, str) for value in variables.values()):
        raise TypeError(f"environment of {case['name']!r}: a value is no string")
    settings = replace(
        parse([str(folder / model), *options]), environment=tuple(variables.items())
    )
    return Case(case["name"], settings, kernels=case.get("kernels", ""))


def _late(row: Row, kernels: str) -> str:
    """Return how many kernels requests waited for."""
    if "error" in row:
        return "failed"
    late = [*row["deep_gemm_after"], *row["flashinfer_after"]]
    return str(sum(re.search(kernels, text) is not None for text in late))


def _command(settings: Settings) -> str:
    options = [f"--device={settings.device}", f"--mode={settings.mode}"]
    options += [f"--runner={settings.runner}", f"--kernel={settings.kernel}"]
    if settings.tp > 1:
        options.append(f"--tp={settings.tp}")
    if settings.pp > 1:
        options.append(f"--pp={settings.pp}")
    if settings.dp > 1:
        options.append(f"--dp={settings.dp}")
    if settings.limit != Settings.limit:
        options.append(f"--max-num-batched-tokens={settings.limit}")
    if settings.batch:
        options.append(f"--batch={settings.batch}")
    if settings.context:
        options.append(f"--context={settings.context}")
    extra = ["--", *settings.extra] if settings.extra else []
    given = [f"{name}={value}" for name, value in settings.environment]
    return " ".join([*given, settings.model.name, *options, *extra])


def markdown(cases: Iterable[Case], rows: Mapping[Settings, Row]) -> str:
    """Return the table: kernels built after ready, by stock and by ours.

    Args:
        cases: Its lines.
        rows: The results of their runs, stock's and ours.

    """
    table = [
        "| way into DeepGEMM | stock | ours | `prove` |",
        "|---|---|---|---|",
    ]
    for case in cases:
        if case.settings is None:
            table.append(f"| {case.name} | | | {case.reason} |")
            continue
        theirs = rows[replace(case.settings, stock=True)]
        ours = rows[case.settings]
        table.append(
            f"| {case.name} | {_late(theirs, case.kernels)} | "
            f"{_late(ours, case.kernels)} | `{_command(case.settings)}` |"
        )
    return "\n".join(table)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="vllm-deep-gemm prove --cases",
        description="Run every case of a TOML file twice, with stock vLLM and with "
        "this patch set, and print one table. Rows are kept in a JSON lines file; a "
        "run that is in it with the same commit is not repeated.",
    )
    add = made.add_argument
    add("cases", type=Path, metavar="FILE", help="such as tests/models/cases.toml")
    add("--rows", type=Path, default=Path("matrix.jsonl"), metavar="FILE")
    add("--only", default="", metavar="TEXT", help="cases whose name holds it")
    add("--nvcc", choices=("real", "fake"), default="fake")
    add("--other-caches", type=Path, metavar="DIR",
        help="keep here what is not a DeepGEMM kernel; the runs share it")  # fmt: skip
    return made


def main(argv: Sequence[str]) -> int:
    """Run the cases; return 0 when ours built nothing late in any of them."""
    options = _parser().parse_args(argv)
    given = {"nvcc": options.nvcc, "other_caches": options.other_caches}
    cases = [
        case
        if case.settings is None
        else replace(case, settings=replace(case.settings, **given))
        for case in load(options.cases)
        if options.only in case.name
    ]
    if not cases:
        raise UsageError(f"cases ({options.cases}): none has {options.only!r} in it")
    run.check_file(options.rows)
    wanted = [
        replace(case.settings, stock=side)
        for case in cases
        if case.settings is not None
        for side in (True, False)
    ]
    pairs = list(measured(wanted, options.rows))
    rows = {cell: row for cell, (row, _) in zip(wanted, pairs, strict=True)}
    print(markdown(cases, rows))
    return 0 if all(good for _, good in pairs) else 1
