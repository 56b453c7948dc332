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
from ..compiling import children
from ..compiling.coordinator import Config
from ..proof import fake_nvcc
from ..proof.settings import UsageError
from ..settings import WORKERS

_PROGRAM = "vllm.model_executor.warmup.deep_gemm_jit.offline"
# As many as it can pose as: what a rank runs does not depend on how many more there
# are than its engine has.
_DEVICES = 16
_LINES = 15


class AskError(RuntimeError):
    """vLLM failed while it was asked; the message ends with what it said."""


@dataclass(frozen=True)
class ShareNeeds:
    """What an engine runs on as many SMs as DeepGEMM may use at a time.

    Attributes:
        target: such as `sm90-132sm`.
        machine: what planning kernels for it takes, but for the compiler.
        specs: every distinct one of all ranks and hosts that has kernels in
            DeepGEMM's cache, as JSON values.

    """

    target: str
    machine: Config
    specs: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "target": self.target,
            "machine": self.machine.to_json(),
            "specs": list(self.specs),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: a field is missing or is no field.

        """
        machine = Config.from_json(value["machine"])
        return cls(**{**value, "specs": tuple(value["specs"]), "machine": machine})


@dataclass(frozen=True)
class Needs:
    """What an engine of a model will run.

    Attributes:
        shares: one for each number of SMs, the whole GPU first; none where nothing
            runs on DeepGEMM.
        elsewhere: specs of FlashInfer, which builds its own on the host, in words.
        unconfirmed: specs that an engine has built ahead and no layer has, in words.
        ranks: how many were asked, of all hosts.
        max_tokens: most tokens of one step.
        unregistered: layers that run on DeepGEMM and did not say what they run.
        skipped: why block-FP8 layers are left out.

    """

    shares: tuple[ShareNeeds, ...]
    elsewhere: tuple[str, ...]
    unconfirmed: tuple[str, ...]
    ranks: int
    max_tokens: int
    unregistered: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[Mapping[str, Any], ...]:
        """Those of every share; one that two have stands there twice."""
        return tuple(spec for share in self.shares for spec in share.specs)

    @property
    def target(self) -> str:
        """For what kernels are needed, in a word or two; `none`: for nothing."""
        return " and ".join(share.target for share in self.shares) or "none"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"shares": [share.to_json() for share in self.shares]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: a field is missing or is no field.

        """
        lists = {name: tuple(v) for name, v in value.items() if isinstance(v, list)}
        shares = tuple(map(ShareNeeds.from_json, value["shares"]))
        return cls(**{**value, **lists, "shares": shares})


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
    command = [sys.executable, "-m", _PROGRAM, *words]
    child = children.start(command, output=subprocess.PIPE, errors=log, environ=environ)
    with child:
        try:
            said, _ = child.communicate()
        # It has a process group of its own, which Ctrl-C does not reach.
        except BaseException:
            children.end(child)
            raise
    if child.returncode:
        log.seek(0)
        tail = log.read().decode(errors="replace").splitlines()[-_LINES:]
        end = "\n".join(tail)
        raise AskError(
            f"vllm serve {shlex.join(words)}: it could not be planned\n{end}"
        )
    loaded: dict[str, Any] = json.loads(said)
    return loaded


def _needs(ranks: Sequence[Mapping[str, Any]]) -> Needs:
    shares: dict[str, ShareNeeds] = {}
    for share in (share for rank in ranks for share in rank["shares"]):
        known = shares.get(share["target"])
        before = known.specs if known else ()
        ours = [item["spec"] for item in share["specs"] if item["in_deep_gemm_cache"]]
        specs = {json.dumps(spec): spec for spec in (*before, *ours)}
        machine = known.machine if known else Config.from_json(share["config"])
        shares[share["target"]] = ShareNeeds(
            share["target"], machine, tuple(specs.values())
        )
    every = [
        item for rank in ranks for share in rank["shares"] for item in share["specs"]
    ]
    others = {item["text"] for item in every if not item["in_deep_gemm_cache"]}
    confirmed = {item["text"] for item in every if not item["unconfirmed"]}
    unconfirmed = {
        f"{item['text']}: {item['unconfirmed']}"
        for item in every
        if item["unconfirmed"] and item["text"] not in confirmed
    }
    return Needs(
        shares=tuple(shares.values()),
        elsewhere=tuple(sorted(others)),
        unconfirmed=tuple(sorted(unconfirmed)),
        ranks=len(ranks),
        max_tokens=max(rank["max_tokens"] for rank in ranks),
        unregistered=_distinct(ranks, "unregistered"),
        skipped=_distinct(ranks, "skipped"),
    )


def _distinct(ranks: Sequence[Mapping[str, Any]], key: str) -> tuple[str, ...]:
    return tuple(sorted({line for rank in ranks for line in rank[key]}))
