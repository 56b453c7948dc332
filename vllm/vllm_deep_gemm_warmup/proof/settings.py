"""Decides what one proof is about: the command line of `prove` as a value."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEVICES = "h100, h200, h100-pcie, h20, b200, rtx-pro-6000, or a number of SMs"
REAL = "real"


# Where the requests go, and how: prove's own. With another, it would wait for an hour.
_OWN_OPTIONS = ("--host", "--port", "--uds", "--ssl-keyfile", "--ssl-certfile")


class UsageError(ValueError):
    """The command line or the model folder cannot be used; the message says why."""


@dataclass(frozen=True)
class Settings:
    """One run of one server.

    ``limit`` is ``--max-num-batched-tokens`` (rows). Beside the workload's requests go
    prompts of ``context`` tokens and ``batch`` prompts at the same time (0: none).
    Timeouts are in seconds. ``vllm`` is the command that takes ``serve MODEL_DIR ...``;
    ``extra`` is appended to it. ``environment`` are variables for the server, (name,
    value) each.
    """

    model: Path
    device: str = "h100"
    stock: bool = False
    mode: str = "eager"
    runner: str = "v2"
    kernel: str = "default"
    nvcc: str = "real"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    limit: int = 8192
    context: int = 0
    batch: int = 0
    keep_cache: Path | None = None
    other_caches: Path | None = None
    json: Path | None = None
    log: Path | None = None
    start_timeout: float = 3600.0
    request_timeout: float = 900.0
    vllm: tuple[str, ...] = (sys.executable, "-m", "vllm.entrypoints.cli.main")
    extra: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def side(self) -> str:
        """``stock`` or ``overlay``: whose warmup runs."""
        return "stock" if self.stock else "overlay"

    @property
    def ranks(self) -> int:
        """How many devices the server takes."""
        return self.tp * self.pp * self.dp

    def facts(self) -> dict[str, Any]:
        """Return the settings that decide on the result, as JSON values."""
        values = asdict(self) | {
            "model": self.model.name,
            "extra": list(self.extra),
            "environment": dict(self.environment),
        }
        dropped = (
            "keep_cache", "other_caches", "json", "log", "vllm",
            "start_timeout", "request_timeout",
        )  # fmt: skip
        return {name: values[name] for name in values if name not in dropped}


def vocab_size(folder: Path) -> int:
    """Return the vocabulary size that the folder's ``config.json`` states.

    Raises:
        UsageError: the folder or the file is missing, or states none.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"model ({folder}): no such folder; name one that exists")
    if not path.is_file():
        raise UsageError(f"model ({folder}): no config.json in it; put one there")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"model ({path}): not JSON: {error}; mend the file") from error
    if not isinstance(config, dict):
        raise UsageError(f"model ({path}): not a JSON object; mend the file")
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        value = part.get("vocab_size")
        if isinstance(value, int) and value > 0:
            return value
    raise UsageError(f"model ({path}): no vocab_size; add it")


def positive(text: str) -> int:
    """Return the number of a command line, which is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of everything before ``--``."""
    made = argparse.ArgumentParser(
        prog="vllm-deep-gemm prove",
        usage="vllm-deep-gemm prove MODEL_DIR [options] [-- vllm serve options]",
        description="Boot `vllm serve` for a folder that holds a config.json, send "
        "463 prompt sizes and concurrent batches, and count the kernels built before "
        "and after it was ready. Exit status 0: every request was answered as asked "
        "and no DeepGEMM or FlashInfer kernel was built after ready.",
        epilog="`vllm-deep-gemm prove --matrix FOLDER` runs every model folder in "
        "FOLDER in every mode and prints a table; `prove --cases FILE` runs "
        "what a file names, with stock as well.",
    )
    add = made.add_argument
    add("model", type=Path, metavar="MODEL_DIR")
    add("--device", default="h100", help=f"{DEVICES}; `{REAL}`: this machine's GPU")
    add("--stock", action="store_true", help="vLLM without this patch set")
    add("--mode", choices=("eager", "graphs"), default="eager")
    add("--runner", choices=("v2", "v1"), default="v2", help="vLLM's model runner")
    add("--kernel", choices=("default", "deep_gemm"), default="default",
        help="deep_gemm: no FlashInfer kernel for fewer than 32 rows")  # fmt: skip
    add("--nvcc", choices=("real", "fake"), default="real",
        help="fake: a declared one that answers in milliseconds")  # fmt: skip
    add("--tp", type=positive, default=1, metavar="N", help="tensor parallel size")
    add("--pp", type=positive, default=1, metavar="N", help="pipeline stages")
    add("--dp", type=positive, default=1, metavar="N", help="data parallel size")
    add("--max-num-batched-tokens", dest="limit", type=positive, default=8192,
        metavar="N", help="rows per step at most (default: %(default)s)")  # fmt: skip
    add("--context", type=positive, default=0, metavar="N",
        help="send prompts of N tokens as well; longer than a step, MLA computes the "
        "keys and values of their beginnings again")  # fmt: skip
    add("--batch", type=positive, default=0, metavar="N",
        help="send N short prompts at the same time as well; the workload's largest "
        "batch has 256")  # fmt: skip
    add("--keep-cache", type=Path, metavar="DIR", help="keep the caches, apart by side")
    add("--other-caches", type=Path, metavar="DIR",
        help="keep here what is not a DeepGEMM kernel: vLLM's and Triton's caches, and "
        "the module that FlashInfer builds once, in minutes")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the result here as well")
    add("--log", type=Path, metavar="FILE", help="keep the server's log here")
    add("--start-timeout", type=float, default=3600.0, metavar="SECONDS")
    add("--request-timeout", type=float, default=900.0, metavar="SECONDS")
    add("--vllm", type=lambda text: (text,), default=Settings.vllm, metavar="PROGRAM",
        help="the program to call `serve` of, in place of this environment's vllm"
    )  # fmt: skip
    return made


def parse(argv: Sequence[str]) -> Settings:
    """Return the settings that a command line states; exits as argparse does."""
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    values = vars(parser().parse_args(given[:at]))
    return Settings(**values, extra=serve_options(given[at + 1 :]))


def serve_options(words: Sequence[str]) -> tuple[str, ...]:
    """Return the options for `vllm serve`.

    Raises:
        UsageError: one of them is not to be chosen.
    """
    for word in words:
        if word.partition("=")[0].replace("_", "-") in _OWN_OPTIONS:
            raise UsageError(
                f"vllm serve option ({word}): the server would not be found; leave "
                "its address to this command"
            )
    return tuple(words)
