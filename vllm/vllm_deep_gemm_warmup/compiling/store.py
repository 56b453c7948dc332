"""Decides where plans are kept: one file for each spec, under what decides it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .kernel import Kernel

# Counts changes of the files' format and of what our own code plans for a spec.
_VERSION = 1
_SpecJson = Mapping[str, Any]


@dataclass(frozen=True)
class Context:
    """What decides, beside a spec, which kernels it takes and what they are called.

    Attributes:
        major: compute capability, major.
        minor: compute capability, minor.
        sm_count: SMs that DeepGEMM may use.
        library: digest of DeepGEMM's compiled part.
        compiler: what `nvcc --version` answers, whole.
        variables: (name, value) of those that DeepGEMM or vLLM's choice read.
        every_row: calls with every row count were asked for, not samples.

    """

    major: int
    minor: int
    sm_count: int
    library: str
    compiler: str
    variables: tuple[tuple[str, str], ...]
    every_row: bool

    @property
    def key(self) -> str:
        """Names the folder of its plans."""
        return _digest({"version": _VERSION, **asdict(self)})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Context:
        """Inverse of ``to_json``."""
        pairs = tuple((name, text) for name, text in value["variables"])
        return cls(**{**value, "variables": pairs})


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan.

    Attributes:
        reason: in words.
        mark: tells it from an older one; clocks of two nodes need not agree.

    """

    reason: str
    mark: str


class PlanStore:
    """Plans and wishes for plans of one context, in a folder that processes share.

    Beside them notes of why there is no plan: of a spec, or of any, where the planner
    itself has failed. One counts for who was there before it; another start plans anew.

    Args:
        folder: beside the cache's entries, or a private one.
        context: the plans of another one are not seen.

    """

    def __init__(self, folder: Path, context: Context) -> None:
        self._context = context
        self._plans = folder / "plans" / context.key
        self._wishes = folder / "wishes" / context.key
        self._refused = folder / "refused" / context.key

    def load(self, spec: _SpecJson) -> tuple[Kernel, ...] | None:
        """The kernels of a spec, or None where there is no plan that can be read."""
        try:
            found = json.loads((self._plans / _name(spec)).read_text())
            if found["spec"] != plain(spec):
                return None
            return tuple(map(Kernel.from_json, found["kernels"]))
        # Missing, cut off, or not what we write: it is planned anew.
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def doubt(self, spec: _SpecJson) -> str | None:
        """Why a spec that ``load`` does not find has a plan that does not count.

        None: it has none, of another context and of other rows neither.
        """
        path = self._plans / _name(spec)
        if path.exists():
            return f"the plan {path} cannot be read"
        for context in sorted(self._plans.parent.glob("*/context.json")):
            if (context.parent / path.name).exists():
                return f"it was planned for {_difference(context, self._context)}"
        others = map(_read_spec, self._plans.glob("*.json"))
        if any(_shape(other) == _shape(plain(spec)) for other in others):
            return "it was planned for other rows"
        return None

    def save(self, spec: _SpecJson, kernels: tuple[Kernel, ...]) -> None:
        """Keep the kernels of a spec.

        Raises:
            OSError: the folder cannot be written.

        """
        self._plans.mkdir(parents=True, exist_ok=True)
        context = self._plans / "context.json"
        if not context.exists():
            _write(context, self._context.to_json())
        plan = {"spec": spec, "kernels": [kernel.to_json() for kernel in kernels]}
        _write(self._plans / _name(spec), plan)
        (self._refused / _name(spec)).unlink(missing_ok=True)
        self.unwish(spec)

    def refuse(self, spec: _SpecJson | None, reason: str) -> None:
        """Tell who waits for a plan that it does not come; None: no plan does.

        Raises:
            OSError: the folder cannot be written.

        """
        self._refused.mkdir(parents=True, exist_ok=True)
        note = {"reason": reason, "mark": secrets.token_hex(8)}
        _write(self._refused / _name(spec), note)
        if spec is not None:
            self.unwish(spec)

    def refusal(self, spec: _SpecJson | None) -> Refusal | None:
        """Return the last note of a spec, or of the planner itself."""
        try:
            found = json.loads((self._refused / _name(spec)).read_text())
            return Refusal(found["reason"], found["mark"])
        # None, or not what we write: there is a planner to ask.
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def wish(self, spec: _SpecJson) -> None:
        """Ask whoever plans on this node for a spec; nothing if that is asked for.

        Raises:
            OSError: the folder cannot be written.

        """
        self._wishes.mkdir(parents=True, exist_ok=True)
        # Others unwish what they have done with too.
        if not (self._wishes / _name(spec)).exists():
            _write(self._wishes / _name(spec), spec)

    def unwish(self, spec: _SpecJson) -> None:
        """Take the wish back."""
        (self._wishes / _name(spec)).unlink(missing_ok=True)

    def wishes(self) -> Iterator[dict[str, Any]]:
        """What processes of this node ask for."""
        try:
            names = sorted(self._wishes.glob("*.json"))
        except OSError:
            return
        for path in names:
            try:
                wish: dict[str, Any] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            yield wish


def _difference(path: Path, context: Context) -> str:
    """Name what another context has that this one has not."""
    try:
        other = Context.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return "something that cannot be read"
    theirs, ours = dict(other.variables), dict(context.variables)
    parts = [
        f"{name} {theirs.get(name, 'unset')}, and this is {ours.get(name, 'unset')}"
        for name in sorted({**theirs, **ours})
        if theirs.get(name) != ours.get(name)
    ]
    parts += [
        f"another {n}" for n in _TEXTS if getattr(other, n) != getattr(context, n)
    ]
    parts += [
        f"{name} {getattr(other, name)}, and this is {getattr(context, name)}"
        for name in _NUMBERS
        if getattr(other, name) != getattr(context, name)
    ]
    return "; ".join(parts) or "another version of this package"


_TEXTS = ("library", "compiler")
_NUMBERS = ("major", "minor", "sm_count", "every_row")


def _read_spec(path: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(path.read_text())["spec"])
    # The context of the plans is among the files.
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _shape(spec: _SpecJson) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if name != "rows"}


def _name(spec: _SpecJson | None) -> str:
    return f"{_digest(spec)}.json"


def spec_key(spec: _SpecJson) -> str:
    """A short name of a spec, the same in every process."""
    return _digest(spec)


def plain(value: Any) -> Any:
    """As JSON gives it back: lists in place of tuples."""
    return json.loads(json.dumps(value))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(path: Path, value: Any) -> None:
    """Write whole or not at all, whoever else writes the same file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
