"""Decides what the log says of a warmup: one line when all is well, a screen if not."""

from collections.abc import Iterator, Sequence

from ..left_out import by_reason
from ..plan import Registered, Skipped, Unregistered
from .coverage import EntryPointRow, LeftOut, Tally, summarize
from .values import Report, SpecResult

# Layers of one kind are many and alike: a line names the first few.
_NAMES_SHOWN = 3
# A terminal of 24 lines, less the two of the shell's prompt.
_SCREEN_LINES = 22
_WIDTH = 100
_NAME_WIDTH = 44
_COLUMNS = ("planned", "hit", "built", "failed", "left", "kernels", "seconds")


def problems(report: Report) -> list[str]:
    """Return one line for each failed spec and each kind of unheard layer."""
    lines = [
        f"DeepGEMM warmup ({result.spec}{_on(result, report)}): {result.extent}, "
        f"first at M={result.failures[0].rows}: "
        f"{_one_line(result.failures[0].failure)}; a request of that size will "
        "compile, or fail, in its turn"
        for result in report.confirmed
        if result.failures
    ]
    unheard: dict[str, list[str]] = {}
    for outcome in report.plan.select(Unregistered):
        unheard.setdefault(outcome.reason, []).append(outcome.name)
    lines.extend(
        f"DeepGEMM warmup ({_names(names)}): not registered: {reason}; their "
        "kernels will be compiled in front of requests"
        for reason, names in unheard.items()
    )
    return lines


def _on(result: SpecResult, report: Report) -> str:
    """Return the SM count of a spec that had not the whole GPU."""
    if result.target is None or result.target == report.target:
        return ""
    return f" on {result.target.sm_count} SMs"


def notices(report: Report) -> list[str]:
    """Return what is worth a look and may be right."""
    return _bypassed(report) + _nothing(report)


def _bypassed(report: Report) -> list[str]:
    found: dict[str, list[str]] = {}
    for layer in report.plan.select(Registered):
        if layer.bypassed is not None:
            found.setdefault(layer.bypassed, []).append(layer.name)
    return [
        f"DeepGEMM warmup ({_names(names)}): not registered: {reason}; they are "
        "warmed by what that kernel says of them"
        for reason, names in found.items()
    ]


def _nothing(report: Report) -> list[str]:
    skipped = report.plan.select(Skipped)
    if not skipped or len(skipped) < len(report.plan.outcomes):
        return []
    reasons = sorted({outcome.reason for outcome in skipped})
    line = (
        f"DeepGEMM warmup ({len(skipped)} block-FP8 layers): none is "
        f"registered: {'; '.join(reasons)}; nothing was warmed"
    )
    return [line]


def summary(report: Report) -> str:
    """Return the closing line."""
    built = len(report.built)
    failed = sum(len(result.failures) for result in report.confirmed)
    kernels = f"{built} kernels built" if built else "0 kernels built, all were there"
    if failed:
        kernels = f"{built} kernels built, {failed} calls failed"
    for_no_layer = sum(len(result.built) for result in report.unconfirmed)
    if for_no_layer:
        kernels += f", {for_no_layer} of them for no layer"
    counts = report.sm_counts
    sms = f", {' and '.join(map(str, counts))} SMs" if len(counts) > 1 else ""
    return (
        f"DeepGEMM warmup complete, {kernels}, {report.seconds:.1f} s "
        f"({len(report.plan.select(Registered))} layers, {len(report.shapes)} shapes"
        f"{sms})"
    )


def screen(report: Report) -> str:
    """Return the coverage as a table that one screen holds."""
    coverage = summarize(report)
    target = "no device" if report.target is None else str(report.target)
    title = (
        f"DeepGEMM warmup coverage ({target}, {report.mode}, "
        f"limit {report.max_tokens} tokens); a call stands for a class of rows"
    )
    head = [title, _row("entry point, layers", *_COLUMNS)]
    tail = [
        *_unconfirmed(report.unconfirmed),
        *_left_out("not registered", coverage.unregistered),
        *_left_out("left out", coverage.rejected),
        *_unreached(coverage.unreached),
        _knowingly_left_out(),
    ]
    body = [line for row in coverage.entry_points for line in _entry_point(row)]
    return "\n".join(_fit(head, body, tail))


def _fit(head: list[str], body: list[str], tail: list[str]) -> list[str]:
    """Cut the middle, then the end, to what a screen holds."""
    room = _SCREEN_LINES - len(head)
    tail = _cut(tail, room // 2)
    return [*head, *_cut(body, room - len(tail)), *tail]


def _cut(lines: list[str], room: int) -> list[str]:
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], f"  and {len(lines) - room + 1} lines more"]


def _entry_point(row: EntryPointRow) -> Iterator[str]:
    yield _row(f"{row.entry_point}, {row.shapes} shapes", *_figures(row.tally))
    for family in row.families:
        by = " (adapter)" if family.by_adapter else ""
        name = f"  {family.layers} x {family.name}{by}"
        yield _row(name, *_figures(family.tally))


def _figures(tally: Tally) -> tuple[str, ...]:
    counts = (tally.planned, tally.hit, tally.built, tally.failed, tally.left)
    return (*map(str, counts), str(tally.kernels), f"{tally.seconds:.1f}")


def _row(name: str, *figures: str) -> str:
    if len(name) > _NAME_WIDTH:
        name = f"...{name[3 - _NAME_WIDTH :]}"
    return f"{name:<{_NAME_WIDTH}}" + "".join(f"{each:>8}" for each in figures)


def _left_out(title: str, groups: Sequence[LeftOut]) -> list[str]:
    return [
        _short(f"{title}: {group.layers} x {group.family}: {_one_line(group.reason)}")
        for group in groups
    ]


def _unconfirmed(results: Sequence[SpecResult]) -> list[str]:
    return [
        _short(
            f"for no layer: {result.spec}: {len(result.calls)} kernels, "
            f"{len(result.built)} built: {result.unconfirmed}"
        )
        for result in results
    ]


def _unreached(entry_points: Sequence[str]) -> list[str]:
    if not entry_points:
        return []
    return [_short(f"not reached by this model: {', '.join(entry_points)}")]


def _knowingly_left_out() -> str:
    counts = (f"{len(names)} {reason}" for reason, names in by_reason().items())
    return _short(f"knowingly left out: {', '.join(counts)}")


def _short(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
