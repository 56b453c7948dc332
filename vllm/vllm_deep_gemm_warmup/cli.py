"""Decides which verb of `vllm-deep-gemm` runs, and nothing else.

A verb's module is imported when the verb is used: `--help` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

PROGRAM = "vllm-deep-gemm"


@dataclass(frozen=True)
class Verb:
    """One subcommand: `module:function(argv) -> exit status or None`."""

    name: str
    module: str
    help: str
    function: str = "main"


VERBS = (
    Verb(
        "prove",
        "vllm_deep_gemm_warmup.proof.run",
        "boot `vllm serve` on the stand-in GPU and count kernels built after ready",
    ),
    Verb(
        "standin",
        "vllm_deep_gemm_warmup.standin.launcher",
        "run a command on a Hopper GPU that is not there",
    ),
    Verb(
        "plan",
        "vllm_deep_gemm_warmup.offline.plan",
        "count the kernels that serving a model needs; compile nothing",
    ),
    Verb(
        "compile",
        "vllm_deep_gemm_warmup.offline.build",
        "build every kernel that serving a model needs, without a GPU or weights",
    ),
    Verb(
        "verify",
        "vllm_deep_gemm_warmup.offline.verify",
        "boot the engine on the stand-in GPU with a folder of kernels and count builds",
    ),
    Verb(
        "status",
        "vllm_deep_gemm_warmup.offline.status",
        "say what is in a folder of kernels",
    ),
    Verb(
        "pack",
        "vllm_deep_gemm_warmup.offline.packing",
        "make one file of a folder of kernels",
        "pack",
    ),
    Verb(
        "unpack",
        "vllm_deep_gemm_warmup.offline.packing",
        "put the kernels of such a file into a folder",
        "unpack",
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the verb alone."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="DeepGEMM kernels built before the first request."
    )
    commands = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        # The verb's own parser answers --help, so this one must not.
        command = commands.add_parser(verb.name, help=verb.help, add_help=False)
        command.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb with the arguments after it; its exit status.

    Everything after the verb is handed on as it is, `--` included.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    # argparse eats a leading `--` of the rest, so it sees the verb alone.
    chosen = build_parser().parse_args(given[:1])
    verb = next(v for v in VERBS if v.name == chosen.verb)
    run = getattr(importlib.import_module(verb.module), verb.function)
    status = run(given[1:])
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(main())
