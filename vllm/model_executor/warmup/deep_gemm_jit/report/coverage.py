"""Decides how a report is summed up: by entry point, and by family of layers."""

import dataclasses
from collections.abc import Iterable, Sequence

from ..plan import Registered, Skipped, Unregistered
from ..spec import EntryPoint
from .values import Report, SpecResult


@dataclasses.dataclass(frozen=True)
class Tally:
    """What became of the calls of some specs.

    A call stands for a class of rows that take one kernel. Every planned call is
    one of ``hit``, ``built``, ``failed`` and ``left``.

    Attributes:
        planned: Calls that were to be made.
        hit: Found their kernel ready: in the cache, or loaded by a call before.
        built: Built one or more kernels.
        failed: Failed.
        left: Were not made, after so many had failed.
        kernels: Distinct kernels built.
        seconds: Wall time of all.

    """

    planned: int
    hit: int
    built: int
    failed: int
    left: int
    kernels: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Family:
    """Layers whose names differ in numbers only, at one entry point.

    Attributes:
        name: With ``*`` for each number.
        layers: How many.
        by_adapter: The code that runs them does not register itself.
        tally: Of their specs; one that families share counts for each.

    """

    name: str
    layers: int
    by_adapter: bool
    tally: Tally


@dataclasses.dataclass(frozen=True)
class EntryPointRow:
    """What was done for one entry point.

    Attributes:
        entry_point: Which.
        shapes: Distinct shapes.
        tally: Of all its specs, each once.
        families: The layers that have them.

    """

    entry_point: EntryPoint
    shapes: int
    tally: Tally
    families: tuple[Family, ...]


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Layers of one family that have no kernels in the plan, for one reason.

    Attributes:
        family: With ``*`` for each number.
        layers: How many.
        reason: Why.
        entry_points: What they run, as far as that is known.

    """

    family: str
    layers: int
    reason: str
    entry_points: tuple[EntryPoint, ...] = ()


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The report, summed up.

    Attributes:
        entry_points: Those that the model reaches.
        rejected: Layers left out for a good reason.
        unregistered: Layers that should have registered and did not.
        unreached: Entry points that no layer of the model is known to run, be it
            planned or not.

    """

    entry_points: tuple[EntryPointRow, ...]
    rejected: tuple[LeftOut, ...]
    unregistered: tuple[LeftOut, ...]
    unreached: tuple[EntryPoint, ...]


def family_of(name: str) -> str:
    """Return ``name`` with ``*`` for each part that is a number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def summarize(report: Report) -> Coverage:
    """Sum up ``report``."""
    by_entry_point: dict[EntryPoint, list[SpecResult]] = {}
    for result in report.results:
        by_entry_point.setdefault(result.spec.entry_point, []).append(result)
    registered = report.plan.select(Registered)
    adapted = frozenset(layer.name for layer in registered if layer.adapter)
    rejected = _left_out(report.plan.select(Skipped))
    unregistered = _left_out(report.plan.select(Unregistered))
    reached = by_entry_point.keys() | {
        each for group in (*rejected, *unregistered) for each in group.entry_points
    }
    return Coverage(
        tuple(
            _entry_point_row(entry_point, results, adapted)
            for entry_point, results in by_entry_point.items()
        ),
        rejected,
        unregistered,
        tuple(each for each in EntryPoint if each not in reached),
    )


def _entry_point_row(
    entry_point: EntryPoint, results: Sequence[SpecResult], adapted: frozenset[str]
) -> EntryPointRow:
    families: dict[str, dict[str, None]] = {}
    for result in results:
        for name in result.layers:
            families.setdefault(family_of(name), {})[name] = None
    return EntryPointRow(
        entry_point,
        len({result.spec.shape for result in results}),
        _tally(results),
        tuple(
            _family(name, frozenset(layers), results, adapted)
            for name, layers in families.items()
        ),
    )


def _family(
    name: str,
    layers: frozenset[str],
    results: Sequence[SpecResult],
    adapted: frozenset[str],
) -> Family:
    of_layers = [result for result in results if layers.intersection(result.layers)]
    return Family(name, len(layers), bool(layers & adapted), _tally(of_layers))


def _tally(results: Sequence[SpecResult]) -> Tally:
    calls = [call for result in results for call in result.calls]
    left = sum(len(result.left) for result in results)
    failed = sum(call.failure is not None for call in calls)
    built = sum(bool(call.built) and call.failure is None for call in calls)
    return Tally(
        planned=len(calls) + left,
        hit=len(calls) - failed - built,
        built=built,
        failed=failed,
        left=left,
        kernels=len({name for call in calls for name in call.built}),
        seconds=sum(call.seconds for call in calls),
    )


def _left_out(outcomes: Iterable[Skipped | Unregistered]) -> tuple[LeftOut, ...]:
    found: dict[tuple[str, str, tuple[EntryPoint, ...]], int] = {}
    for outcome in outcomes:
        key = family_of(outcome.name), outcome.reason, outcome.entry_points
        found[key] = found.get(key, 0) + 1
    return tuple(
        LeftOut(family, layers, reason, entry_points)
        for (family, reason, entry_points), layers in found.items()
    )
