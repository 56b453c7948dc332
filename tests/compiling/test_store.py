"""A stored plan counts for what it was made for; any doubt is no plan."""

import dataclasses
import json
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.compiling.store import Context, PlanStore

from .conftest import CONTEXT, make_kernel

SPEC = {"entry_point": "fp8_gemm_nt", "n": 576, "rows": {"first": 1, "last": 8192}}
KERNELS = (make_kernel("k0"), make_kernel("k1"))
# How the part of a context that differs is said.
DOUBTS = {
    "sm_count": "planned for sm_count 132, and this is 114",
    "major": "planned for major 9, and this is 10",
    "library": "planned for another library",
    "compiler": "planned for another compiler",
    "variables": "planned for DG_JIT_PTXAS_VERBOSE unset, and this is 1",
    "every_row": "planned for every_row False, and this is True",
}


def test_a_plan_is_found_again(tmp_path: Path) -> None:
    PlanStore(tmp_path, CONTEXT).save(SPEC, KERNELS)
    assert PlanStore(tmp_path, CONTEXT).load(SPEC) == KERNELS


@pytest.mark.parametrize(
    "other",
    [
        {"sm_count": 114},
        {"major": 10},
        {"library": "another"},
        {"compiler": "another"},
        {"variables": (("DG_JIT_PTXAS_VERBOSE", "1"),)},
        {"every_row": True},
    ],
)
def test_one_of_another_context_is_not(
    tmp_path: Path, other: dict[str, object]
) -> None:
    """G36, G54: SM count, library, compiler, a variable that changes the key."""
    PlanStore(tmp_path, CONTEXT).save(SPEC, KERNELS)
    context: Context = dataclasses.replace(CONTEXT, **other)
    store = PlanStore(tmp_path, context)
    assert store.load(SPEC) is None
    doubt = store.doubt(SPEC)
    assert doubt is not None
    assert DOUBTS[next(iter(other))] in doubt


def test_one_of_other_rows_is_not(tmp_path: Path) -> None:
    PlanStore(tmp_path, CONTEXT).save(SPEC, KERNELS)
    store = PlanStore(tmp_path, CONTEXT)
    other = {**SPEC, "rows": {"first": 1, "last": 4096}}
    assert store.load(other) is None
    assert store.doubt(other) == "it was planned for other rows"
    assert store.doubt({**SPEC, "n": 640}) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"spec": 1}', "null"])
def test_one_that_cannot_be_read_is_not(tmp_path: Path, damage: str) -> None:
    """G54: missing, truncated JSON."""
    store = PlanStore(tmp_path, CONTEXT)
    store.save(SPEC, KERNELS)
    (path,) = (p for p in tmp_path.glob("plans/*/*.json") if p.stem != "context")
    path.write_text(damage)
    assert store.load(SPEC) is None
    assert store.doubt(SPEC) == f"the plan {path} cannot be read"
    whole = {"spec": SPEC, "kernels": [{"entry": "gemm.k0"}]}
    path.write_text(json.dumps(whole))
    assert store.load(SPEC) is None
    store.save(SPEC, KERNELS)
    assert store.load(SPEC) == KERNELS


def test_wishes_of_one_context_are_seen_until_they_are_met(tmp_path: Path) -> None:
    store = PlanStore(tmp_path, CONTEXT)
    store.wish(SPEC)
    other = PlanStore(tmp_path, dataclasses.replace(CONTEXT, sm_count=78))
    assert list(other.wishes()) == []
    assert list(PlanStore(tmp_path, CONTEXT).wishes()) == [SPEC]
    store.save(SPEC, KERNELS)
    assert list(store.wishes()) == []


def test_why_there_is_no_plan_is_told_until_there_is_one(tmp_path: Path) -> None:
    store = PlanStore(tmp_path, CONTEXT)
    store.wish(SPEC)
    store.refuse(SPEC, "it cannot be")
    first = PlanStore(tmp_path, CONTEXT).refusal(SPEC)
    assert first is not None
    assert first.reason == "it cannot be"
    assert list(store.wishes()) == []
    store.refuse(SPEC, "it cannot be")
    # Who waits since the first one is told of the second.
    assert store.refusal(SPEC) != first
    assert store.refusal(None) is None
    store.save(SPEC, KERNELS)
    assert store.refusal(SPEC) is None
