"""Decides what the JSON report holds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..left_out import LEFT_OUT
from ..plan import Registered, Skipped, Unregistered
from .coverage import summarize
from .values import KernelState, Report, SpecResult

_VERSION = 1


def to_json(report: Report) -> dict[str, Any]:
    """Return plain values; ``version`` counts changes that a reader must know."""
    plan = report.plan
    return {
        "version": _VERSION,
        "mode": report.mode,
        "max_tokens": report.max_tokens,
        "target": None if report.target is None else str(report.target),
        "seconds": round(report.seconds, 3),
        "layers": {
            "registered": len(plan.select(Registered)),
            "bypassed": [
                layer.name
                for layer in plan.select(Registered)
                if layer.bypassed is not None
            ],
            "skipped": _named(plan.select(Skipped)),
            "unregistered": _named(plan.select(Unregistered)),
        },
        "kernels": {
            "built": len(report.built),
            "failed": sum(len(result.failures) for result in report.confirmed),
            "unconfirmed": sum(len(result.built) for result in report.unconfirmed),
        },
        "left_out": dict(LEFT_OUT),
        "coverage": dataclasses.asdict(summarize(report)),
        "specs": [_spec(result) for result in report.results],
    }


def _named(outcomes: Sequence[Skipped | Unregistered]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in outcomes]


def _spec(result: SpecResult) -> dict[str, Any]:
    kernels = result.kernels
    return {
        "spec": str(result.spec),
        **result.spec.to_json(),
        "target": None if result.target is None else str(result.target),
        "layers": list(result.layers),
        "unconfirmed": result.unconfirmed,
        "calls": len(result.calls),
        "built": [
            {"kernel": each.name, "rows": each.rows, "seconds": each.seconds}
            for each in kernels
            if each.state is KernelState.BUILT
        ],
        "hit": [each.rows for each in kernels if each.state is KernelState.HIT],
        "failed": [
            {"rows": each.rows, "reason": each.reason}
            for each in kernels
            if each.state is KernelState.FAILED
        ],
        "left": list(result.left),
        "seconds": round(result.seconds, 3),
    }
