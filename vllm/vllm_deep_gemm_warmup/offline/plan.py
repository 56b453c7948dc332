"""Decides what `plan MODEL ...` says: kernels, and how long they would take."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..compiling.building import building_seconds
from ..compiling.coordinator import Config
from ..compiling.kernel import Kernel
from ..compiling.session import Ended, Session
from ..proof.settings import UsageError
from .arguments import add_serving, machines_for, read_serving
from .ask import AskError, Needs, ShareNeeds


def main(argv: Sequence[str]) -> int:
    """Run `vllm-deep-gemm plan ARGV`.

    0; 1: something could not be planned; 2: the command line cannot be followed.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-deep-gemm plan",
        description="Count the DeepGEMM kernels that serving a model needs, for every "
        "rank. Needs no GPU and no weights and compiles nothing.",
    )
    add_serving(parser)
    parser.add_argument("--every-rank", action="store_true",
        help="ask ranks that are alike as well")  # fmt: skip
    given, serving = read_serving(parser, argv)
    try:
        needs = serving.ask(given.every_rank)
        with tempfile.TemporaryDirectory(prefix="deep-gemm-plan-") as name:
            machines = machines_for(needs, Path(name), Path(name) / "work")
            kernels: dict[str, Kernel] = {}
            problems: list[str] = []
            for share, machine in zip(needs.shares, machines, strict=True):
                found, unplanned = find(share, machine)
                kernels |= found
                problems += unplanned
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except (AskError, Ended, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(describe(needs, kernels, machines[0].workers)))
    problems += [f"not registered: {line}" for line in needs.unregistered]
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


def find(share: ShareNeeds, machine: Config) -> tuple[dict[str, Kernel], list[str]]:
    """Return every kernel by its entry, and what could not be planned.

    Raises:
        Ended, OSError: the planning process was killed, or cannot be started.

    """
    with Session(machine) as session:
        for spec in share.specs:
            session.add_spec(spec, build=False)
        session.settle()
        plans = [(spec, session.plan_of(spec)) for spec in share.specs]
    found = [plan for _, plan in plans if isinstance(plan, tuple)]
    return {kernel.entry: kernel for plan in found for kernel in plan}, [
        f"not planned ({spec}): {plan}"
        for spec, plan in plans
        if not isinstance(plan, tuple)
    ]


def describe(needs: Needs, kernels: dict[str, Kernel], workers: int) -> list[str]:
    """Return the lines of a plan."""
    counts: dict[str, int] = {}
    for entry in kernels:
        name = entry.partition(".")[0]
        counts[name] = counts.get(name, 0) + 1
    seconds = building_seconds(len(kernels), workers)
    total = f"{len(kernels)} kernels of {len(needs.specs)} specs on {needs.target}"
    return [
        f"{total}, up to {needs.max_tokens} tokens a step, {needs.ranks} ranks asked",
        *(f"  {count:4} {name}" for name, count in sorted(counts.items())),
        f"about {seconds:.0f} s with {workers} compilers at a time",
        *(f"for no layer: {line}" for line in needs.unconfirmed),
        *(f"built on the host by FlashInfer: {line}" for line in needs.elsewhere),
    ]
