"""Decides what is said about a warmup: one line when all is well, JSON on request."""

import dataclasses
import json
import pathlib
import secrets
from collections.abc import Sequence
from typing import Any

from .calls import Call
from .plan import Plan, Registered, Skipped, Unregistered
from .spec import Spec, Target

_VERSION = 1
# Layers of one kind are many and alike: a line names the first few.
_NAMES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class SpecResult:
    """What was done for one spec.

    Attributes:
        spec: Which.
        layers: Names of the layers that have it.
        calls: Those made.
        left: Row counts of those that were not made, after so many had failed.
        target: What its kernels were built for; None: what the report's were.

    """

    spec: Spec
    layers: tuple[str, ...]
    calls: tuple[Call, ...]
    left: tuple[int, ...] = ()
    target: Target | None = None

    @property
    def built(self) -> tuple[str, ...]:
        """Cache entries that this spec's calls built."""
        return tuple(name for call in self.calls for name in call.built)

    @property
    def failures(self) -> tuple[Call, ...]:
        """The calls that failed."""
        return tuple(call for call in self.calls if call.failure is not None)

    @property
    def extent(self) -> str:
        """How much of it failed."""
        if len(self.failures) == len(self.calls):
            extent = f"not warmed, all of {len(self.calls)} calls failed"
        else:
            extent = f"{len(self.failures)} of {len(self.calls)} calls failed"
        return f"{extent}, {len(self.left)} were not made" if self.left else extent

    @property
    def seconds(self) -> float:
        """Wall time of its calls, the compiles among them."""
        return sum(call.seconds for call in self.calls)


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that a warmup did and left out.

    Attributes:
        plan: What was to be done.
        results: One for each spec.
        max_tokens: The limit that the plan was made for.
        mode: ``relax`` or ``full``.
        target: What the kernels were built for; None where nothing was to build.
        seconds: Wall time of planning and building.

    """

    plan: Plan
    results: tuple[SpecResult, ...]
    max_tokens: int
    mode: str
    target: Target | None
    seconds: float

    @property
    def built(self) -> frozenset[str]:
        """Every cache entry that the warmup built."""
        return frozenset(name for result in self.results for name in result.built)

    @property
    def shapes(self) -> frozenset[tuple[str, str]]:
        """Distinct entry points with a shape."""
        return frozenset(
            (result.spec.entry_point, result.spec.shape) for result in self.results
        )

    def problems(self) -> list[str]:
        """Return one line for each failed spec and each kind of unheard layer."""
        lines = [
            f"DeepGEMM warmup ({result.spec}{self._on(result)}): {result.extent}, "
            f"first at "
            f"M={result.failures[0].rows}: "
            f"{_one_line(result.failures[0].failure)}; a request of that size will "
            "compile, or fail, in its turn"
            for result in self.results
            if result.failures
        ]
        unheard: dict[str, list[str]] = {}
        for outcome in self.plan.select(Unregistered):
            unheard.setdefault(outcome.reason, []).append(outcome.name)
        lines.extend(
            f"DeepGEMM warmup ({_names(names)}): not registered: {reason}; their "
            "kernels will be compiled in front of requests"
            for reason, names in unheard.items()
        )
        return lines

    def _on(self, result: SpecResult) -> str:
        """Return the SM count of a spec that had not the whole GPU."""
        target = result.target
        if target is None or target == self.target:
            return ""
        return f" on {target.sm_count} SMs"

    @property
    def sm_counts(self) -> tuple[int, ...]:
        """SM counts that kernels were built for, in the order of building."""
        targets = (result.target for result in self.results)
        return tuple(dict.fromkeys(t.sm_count for t in targets if t is not None))

    def notices(self) -> list[str]:
        """Return what is worth a look and may be right."""
        return self._bypassed() + self._nothing()

    def _bypassed(self) -> list[str]:
        found: dict[str, list[str]] = {}
        for layer in self.plan.select(Registered):
            if layer.bypassed is not None:
                found.setdefault(layer.bypassed, []).append(layer.name)
        return [
            f"DeepGEMM warmup ({_names(names)}): not registered: {reason}; they are "
            "warmed by what that kernel says of them"
            for reason, names in found.items()
        ]

    def _nothing(self) -> list[str]:
        skipped = self.plan.select(Skipped)
        if not skipped or len(skipped) < len(self.plan.outcomes):
            return []
        reasons = sorted({outcome.reason for outcome in skipped})
        line = (
            f"DeepGEMM warmup ({len(skipped)} block-FP8 layers): none is "
            f"registered: {'; '.join(reasons)}; nothing was warmed"
        )
        return [line]

    def summary(self) -> str:
        """Return the line for a start at which all went well."""
        built = len(self.built)
        kernels = (
            f"{built} kernels built" if built else "all kernels found in the cache"
        )
        counts = self.sm_counts
        sms = f"{' and '.join(map(str, counts))} SMs, " if len(counts) > 1 else ""
        return (
            f"DeepGEMM warmup: {len(self.plan.select(Registered))} layers, "
            f"{len(self.shapes)} shapes, {sms}{kernels}, {self.seconds:.1f} s"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values; ``version`` counts changes that a reader must know."""
        return {
            "version": _VERSION,
            "mode": self.mode,
            "max_tokens": self.max_tokens,
            "target": None if self.target is None else str(self.target),
            "seconds": round(self.seconds, 3),
            "layers": {
                "registered": len(self.plan.select(Registered)),
                "bypassed": [
                    layer.name
                    for layer in self.plan.select(Registered)
                    if layer.bypassed is not None
                ],
                "skipped": [dataclasses.asdict(o) for o in self.plan.select(Skipped)],
                "unregistered": [
                    dataclasses.asdict(o) for o in self.plan.select(Unregistered)
                ],
            },
            "kernels": {
                "built": len(self.built),
                "failed": sum(len(result.failures) for result in self.results),
            },
            "specs": [
                {
                    **result.spec.to_json(),
                    "target": None if result.target is None else str(result.target),
                    "layers": list(result.layers),
                    "calls": len(result.calls),
                    "built": [
                        {"kernel": name, "rows": call.rows, "seconds": call.seconds}
                        for call in result.calls
                        for name in call.built
                    ],
                    "failed": [
                        {"rows": call.rows, "reason": call.failure}
                        for call in result.failures
                    ],
                    "left": list(result.left),
                    "seconds": round(result.seconds, 3),
                }
                for result in self.results
            ],
        }


def write_json(report: Report, path: pathlib.Path) -> None:
    """Write the report to ``path``, whole or not at all.

    Raises:
        OSError: The folder cannot be written, or ``path`` is there and no file:
            a rename by root would take the place of a device as well.

    """
    # What a link leads to is written, and the link stays.
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError("it is there and is not a regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files are their owner's alone: a monitor reads reports.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x") as file:
            json.dump(report.to_json(), file, indent=1)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
