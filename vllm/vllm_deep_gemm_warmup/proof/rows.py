"""Decides which of many runs are done already; keeps their results in a file."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_deep_gemm_warmup.proof import run
from vllm_deep_gemm_warmup.proof.server import ServerError
from vllm_deep_gemm_warmup.proof.settings import Settings, UsageError

Row = dict[str, Any]


def read(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON lines file; a line cut off by an abort is skipped."""
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _key(facts: Mapping[str, Any], commit: str) -> str:
    return json.dumps([facts, commit], sort_keys=True)


def on_file(path: Path, commit: str) -> dict[str, Row]:
    """Return the rows, by their key, of runs that need no repetition.

    There are none of code that no commit names: it may have changed since.
    """
    if commit == "unknown" or commit.endswith("+"):
        return {}
    return {
        _key(row["settings"], row["commit"]): row
        for row in read(path)
        if "error" not in row
    }


def _run(settings: Settings, commit: str) -> tuple[Row, bool]:
    try:
        result = run.prove(settings, os.environ)
    except (ServerError, UsageError) as error:
        print(error, file=sys.stderr, flush=True)
        row = {"settings": settings.facts(), "commit": commit, "error": str(error)}
        return row, False
    run.show(result)
    return asdict(result), not result.problems


def measured(wanted: Sequence[Settings], path: Path) -> Iterator[tuple[Row, bool]]:
    """Yield the row of each run, and whether it was one without a problem.

    Args:
        wanted: The runs; one that ``path`` holds with this commit is not repeated, nor
            one that is wanted twice.
        path: A JSON lines file, to which the others are added.

    """
    commit = run.commit()
    done = on_file(path, commit)
    for number, settings in enumerate(wanted, 1):
        key = _key(settings.facts(), commit)
        row = done.get(key)
        if row is not None:
            yield row, not run.from_row(row).problems
            continue
        print(f"--- {number} of {len(wanted)}", flush=True)
        row, good = _run(settings, commit)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "error" not in row:
            done[key] = row
        yield row, good
