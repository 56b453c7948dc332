"""Decides what a model needs, by asking the real vLLM on a GPU that is not there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Self

from .. import standin
from ..compiling.coordinator import Config
from ..proof import fake_nvcc
from ..settings import WORKERS

_PROGRAM = "vllm.model_executor.warmup.deep_gemm_jit.offline"
# As many as it can pose as: what a rank runs does not depend on how many more there
# are than its engine has.
_DEVICES = 16
_LINES = 15


class UsageError(ValueError):
    """The command line cannot be followed; the message is one line."""


class AskError(RuntimeError):
    """vLLM failed while it was asked; the message ends with what it said."""


@dataclass(frozen=True)
class Needs:
    """What an engine of a model will run.

    Attributes:
        specs: every distinct one of all ranks and hosts that has kernels in
            DeepGEMM's cache, as JSON values.
        elsewhere: those of FlashInfer, which builds its own on the host, in words.
        machine: what planning their kernels takes, but for the compiler; None where
            nothing runs on DeepGEMM.
        target: the same in a word, such as `sm90-132sm`.
        ranks: how many were asked, of all hosts.
        max_tokens: most tokens of one step.
        unregistered: layers that run on DeepGEMM and did not say what they run.
        skipped: why block-FP8 layers are left out.

    """

    specs: tuple[Mapping[str, Any], ...]
    elsewhere: tuple[str, ...]
    machine: Config | None
    target: str
    ranks: int
    max_tokens: int
    unregistered: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        machine = None if self.machine is None else self.machine.to_json()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"machine": machine}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: a field is missing or is no field.

        """
        lists = {name: tuple(v) for name, v in value.items() if isinstance(v, list)}
        machine = value["machine"] and Config.from_json(value["machine"])
        return cls(**{**value, **lists, "machine": machine})


def ask(
    model: str,
    arguments: Sequence[str],
    device: str,
    environ: Mapping[str, str] | None = None,
    *,
    every_rank: bool = False,
) -> Needs:
    """Have vLLM plan an engine of `vllm serve model arguments` on `device`.

    Loads nothing but `config.json`, builds no kernel and needs no `nvcc`. Hosts with
    an `nvcc` and without one are both asked for: vLLM leaves FlashInfer out on the
    latter, and DeepGEMM then runs more.

    Raises:
        UsageError: no such device, or vLLM refuses.
        AskError: vLLM failed in another way.

    """
    words = [*(["--every-rank"] if every_rank else []), model, *arguments]
    with tempfile.TemporaryDirectory(prefix="deep-gemm-plan-") as name:
        return ask_in(Path(name), words, device, environ)


def ask_in(
    scratch: Path,
    words: Sequence[str],
    device: str,
    environ: Mapping[str, str] | None = None,
) -> Needs:
    """As `ask`, with every file that is written in an empty folder that stays."""
    ranks: list[Mapping[str, Any]] = []
    standing_in = _environment(device, environ, scratch)
    for host in _hosts(scratch):
        with (scratch / "log").open("w+b") as log:
            answer = _run(words, standing_in | host, log)
        if "refused" in answer:
            reason = " ".join(answer["refused"].split())
            raise UsageError(f"vllm serve {shlex.join(words)}: {reason}")
        ranks += answer["ranks"]
    return _needs(ranks)


def _hosts(scratch: Path) -> tuple[dict[str, str], ...]:
    """Nothing is compiled: a declared fake answers where a host has a compiler."""
    program = fake_nvcc.install(scratch / "cuda" / "bin")
    (scratch / "bare").mkdir()
    return tuple(
        {"CUDA_HOME": str(scratch / home), "DG_JIT_NVCC_COMPILER": str(program)}
        for home in ("cuda", "bare")
    )


def _environment(
    device: str, environ: Mapping[str, str] | None, scratch: Path
) -> dict[str, str]:
    base = dict(os.environ if environ is None else environ)
    try:
        standing_in = standin.environment(
            device, _DEVICES, scratch / "caches", base, over_real_driver=True
        )
    # An unknown device, no C compiler: the message says which.
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    # A layer that is constructed to be asked has nothing built for it.
    return standing_in | {WORKERS: "0"}


def _run(
    words: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", _PROGRAM, *words],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        check=False,
    )
    if done.returncode:
        log.seek(0)
        tail = log.read().decode(errors="replace").splitlines()[-_LINES:]
        said = "\n".join(tail)
        raise AskError(
            f"vllm serve {shlex.join(words)}: it could not be planned\n{said}"
        )
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def _needs(ranks: Sequence[Mapping[str, Any]]) -> Needs:
    every = [item for rank in ranks for item in rank["specs"]]
    ours = [item["spec"] for item in every if item["in_deep_gemm_cache"]]
    others = {item["text"] for item in every if not item["in_deep_gemm_cache"]}
    machine = next((rank["machine"] for rank in ranks if rank["machine"]), None)
    return Needs(
        specs=tuple({json.dumps(spec): spec for spec in ours}.values()),
        elsewhere=tuple(sorted(others)),
        machine=Config.from_json(machine["config"]) if machine else None,
        target=machine["target"] if machine else "none",
        ranks=len(ranks),
        max_tokens=max(rank["max_tokens"] for rank in ranks),
        unregistered=_distinct(ranks, "unregistered"),
        skipped=_distinct(ranks, "skipped"),
    )


def _distinct(ranks: Sequence[Mapping[str, Any]], key: str) -> tuple[str, ...]:
    return tuple(sorted({line for rank in ranks for line in rank[key]}))
