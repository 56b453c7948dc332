"""Decides what `compile MODEL ... --output DIR` builds, where, and when it may."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import cache_care
from ..compiling.building import Outcome
from ..compiling.coordinator import Config
from ..compiling.session import Ended, Session
from ..compiling.store import plain
from ..kernel_caches import FOLDER, KernelCache, deep_gemm
from ..proof.settings import UsageError
from ..toolchain.recorded import FOLDER as RECORDED
from ..toolchain.recorded import record
from .arguments import Serving, add_serving, machines_for, read_serving
from .ask import AskError, Needs, ShareNeeds
from .manifest import FILE, Manifest, cubin_digest, version_of

# There while a folder is not finished: what it is to become.
BEGUN = "compile.json"
_OURS = {
    BEGUN,
    f"tmp.{BEGUN}",
    FILE,
    FOLDER,
    "cache",
    "tmp",
    cache_care.ASIDE,
    RECORDED,
}
_VERSIONS = ("vllm", "vllm-deep-gemm-warmup", "torch", "flashinfer-python")


def main(argv: Sequence[str]) -> int:
    """Run `vllm-deep-gemm compile ARGV`.

    0: every kernel is there; 1: some are not, and are named; 2: the command line
    cannot be followed, and nothing was written; 130: interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-deep-gemm compile",
        description="Build every DeepGEMM kernel that serving a model needs, for every "
        "rank, into a folder for DG_JIT_CACHE_DIR. Needs an nvcc, no GPU and no "
        "weights. Interrupted, the same command goes on.",
    )
    add_serving(parser, "MODEL --output DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    given, serving = read_serving(parser, argv)
    root = given.output.absolute()
    try:
        begun = _check_output(root, serving)
        needs = begun or serving.ask()
        machines = machines_for(needs, root, root / FOLDER)
        _begin(root, serving, needs)
        return _build_all(serving, needs, machines)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except (AskError, Ended, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _check_output(root: Path, serving: Serving) -> Needs | None:
    """Return what the same command has found out in this folder, if it was begun.

    Raises:
        UsageError: there is anything else in the folder.

    """
    if not os.path.lexists(root):
        return None
    if not root.is_dir():
        raise UsageError(f"--output ({root}): it is there and is no folder")
    names = {path.name for path in root.iterdir()}
    if not names:
        return None
    try:
        begun = json.loads((root / BEGUN).read_text())
        if begun["command"] == plain(asdict(serving)) and names <= _OURS:
            same = begun["versions"] == _versions()
            return Needs.from_json(begun["needs"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(
        f"--output ({root}): it is not empty, and not what the same command has "
        "begun; name another folder, and join two with `pack` and `unpack`"
    )


def _begin(root: Path, serving: Serving, needs: Needs) -> None:
    root.mkdir(parents=True, exist_ok=True)
    begun = {
        "command": plain(asdict(serving)),
        "versions": _versions(),
        "needs": needs.to_json(),
    }
    temporary = root / f"tmp.{BEGUN}"
    temporary.write_text(json.dumps(begun))
    temporary.replace(root / BEGUN)
    # What an interrupted command was building; no other command may write here.
    shutil.rmtree(root / "tmp", ignore_errors=True)
    cache_care.mend(deep_gemm(root))


def _versions() -> dict[str, str]:
    return {name: version_of(name) for name in _VERSIONS}


def _build_all(serving: Serving, needs: Needs, machines: Sequence[Config]) -> int:
    """Build share by share: each has plans of its own, and the same folder."""
    problems = [f"not registered: {line}" for line in needs.unregistered]
    planned: set[str] = set()
    built = 0
    progress = _Progress()
    for share, machine in zip(needs.shares, machines, strict=True):
        kernels, outcomes, unplanned = _build(share, machine, progress)
        planned |= kernels
        built += sum(outcome.built for outcome in outcomes.values())
        problems += unplanned
        problems += [
            f"not built ({name}): {' '.join(outcome.failure.split())}"
            for name, outcome in sorted(outcomes.items())
            if outcome.failure is not None
        ]
    machine = machines[0]
    _write_manifest(serving, needs, machine, sorted(planned))
    record(machine.root, machine.context.compiler)
    for line in problems:
        print(line, file=sys.stderr)
    print(
        f"{machine.root}: {len(planned)} kernels of {len(needs.specs)} specs for "
        f"{needs.target}, {built} built now, {len(problems)} problems"
    )
    return 1 if problems else 0


def _build(
    share: ShareNeeds, machine: Config, progress: _Progress
) -> tuple[set[str], dict[str, Outcome], list[str]]:
    """Return what was planned, what became of it, and what could not be planned."""
    with Session(machine, progress.hear) as session:
        for spec in share.specs:
            session.add_spec(spec)
        session.settle()
        plans = [(spec, session.plan_of(spec)) for spec in share.specs]
        outcomes = dict(session.outcomes)
    found = [plan for _, plan in plans if isinstance(plan, tuple)]
    return (
        {kernel.entry for plan in found for kernel in plan},
        outcomes,
        [f"not planned ({s}): {p}" for s, p in plans if not isinstance(p, tuple)],
    )


def _write_manifest(
    serving: Serving, needs: Needs, machine: Config, planned: Sequence[str]
) -> None:
    cache = deep_gemm(machine.root)
    context = machine.context
    Manifest(
        model=serving.model,
        arguments=serving.arguments,
        device=serving.device,
        target=needs.target,
        versions=_versions(),
        library=context.library,
        compiler=context.compiler,
        variables=dict(context.variables),
        specs=len(needs.specs),
        kernels={entry: _digest(cache, entry) for entry in planned},
    ).write(machine.root)


def _digest(cache: KernelCache, entry: str) -> str:
    try:
        return cubin_digest(cache, entry)
    except OSError:
        return ""  # planned and not built


class _Progress:
    """Prints how many kernels there are to build, and each tenth of them."""

    def __init__(self) -> None:
        self._done = 0
        self._missing = 0

    def hear(self, event: Mapping[str, Any]) -> None:
        if "missing" in event:
            self._missing = event["missing"]
            workers = event["workers"]
            print(f"{self._missing} kernels to build, {workers} at a time", flush=True)
        elif "kernel" in event and event["kernel"]["built"]:
            self._done += 1
            if self._done % 10 == 0:
                print(f"{self._done} kernels built", flush=True)
