"""Decides how verbs read a command line that ends with arguments of `vllm serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import toolchain
from ..compiling.coordinator import Config
from ..compiling.cpus import available_cpus
from ..compiling.environment import Unplannable, compiler_text
from ..proof.settings import DEVICES, UsageError
from ..settings import read_settings
from .ask import Needs, ask


@dataclass(frozen=True)
class Serving:
    """A model and how it will be served.

    Attributes:
        model: as `vllm serve` takes it.
        device: what the stand-in poses as.
        arguments: for `vllm serve`, after the model.

    """

    model: str
    device: str
    arguments: tuple[str, ...]

    def ask(self, every_rank: bool = False) -> Needs:
        """What it needs; there is something.

        Raises:
            UsageError: nothing of it runs on DeepGEMM, or as `ask`.
            AskError: as `ask`.

        """
        needs = ask(self.model, self.arguments, self.device, every_rank=every_rank)
        if not needs.specs:
            why = "; ".join(needs.skipped) or "no layer has block-FP8 weights"
            raise UsageError(f"{self.model}: nothing of it runs on DeepGEMM: {why}")
        return needs


def add_serving(parser: argparse.ArgumentParser, own: str = "MODEL") -> None:
    """Add MODEL and --device; other options are `vllm serve`'s.

    Args:
        parser: Of a verb.
        own: What the verb must be given, as its usage shows it.

    """
    parser.usage = f"{parser.prog} {own} [options] [vllm serve options]"
    parser.add_argument("model", metavar="MODEL", help="as for `vllm serve`: a folder "
        "with a config.json suffices")  # fmt: skip
    parser.add_argument("--device", default="h100",
        help=f"{DEVICES} (default: %(default)s)")  # fmt: skip


def read_serving(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, Serving]:
    """Return our own options, and what to serve with the rest of them."""
    parser.allow_abbrev = False
    given, rest = parser.parse_known_args(argv)
    arguments = tuple(word for word in rest if word != "--")
    return given, Serving(given.model, given.device, arguments)


def machines_for(needs: Needs, root: Path, work: Path) -> list[Config]:
    """What planning and building each share in `root` takes, with this host's compiler.

    Sets the variables by which DeepGEMM finds that compiler, as the plugin does.

    Raises:
        UsageError: there is no compiler that works.

    """
    os.environ.update(toolchain.variables(toolchain.read_facts()))
    compiler = toolchain.describe_current()
    if isinstance(compiler, toolchain.Unusable):
        raise UsageError(str(compiler))
    if toolchain.breaks_shell(root):
        raise UsageError(f"folder ({root}): a character in it means something to a "
                         "shell; name another")  # fmt: skip
    try:
        text = compiler_text(compiler.nvcc)
    except Unplannable as error:
        raise UsageError(str(error)) from error
    settings = read_settings()
    return [
        replace(
            share.machine,
            context=replace(share.machine.context, compiler=text),
            root=root,
            work=work,
            nvcc=compiler.nvcc,
            workers=settings.workers or available_cpus(),
            limit=float(settings.nvcc_limit),
            group=f"offline {os.getpid()}",
        )
        for share in needs.shares
    ]
