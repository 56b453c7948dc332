"""One planner a node serves all who ask; one that fails is named."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.locks import Locks
from vllm_deep_gemm_warmup.compiling.planning import Answer, Planning
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.compiling.store import PlanStore

from .conftest import CONTEXT, make_kernel

# Stands in for the module that calls DeepGEMM, in a `vllm` that holds nothing else.
PLANNER = """
import json, os, pathlib, sys, time
log = pathlib.Path({log!r})
with log.open("a") as file:
    print(os.getpid(), file=file)
kernels = json.loads({kernels!r})
for line in sys.stdin:
    spec = json.loads(line)
    {line}
    found = {{"kernels": kernels[spec["name"]]}} if spec["name"] in kernels else {{
        "problem": "no such kernel"}}
    print(json.dumps({{"spec": spec, **found}}), flush=True)
"""
KERNELS = {"a": ["k0", "k1"], "b": ["k1", "k2"], "c": ["k3"]}


@pytest.fixture
def planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Callable[[], list[int]]]:
    """Puts a planner in place, with a line for each spec; the pids of its starts."""

    def make(line: str = "pass") -> Callable[[], list[int]]:
        module = tmp_path / "path/vllm/model_executor/warmup/deep_gemm_jit/planner.py"
        module.parent.mkdir(parents=True)
        log = tmp_path / "planners"
        made = {k: [make_kernel(n).to_json() for n in v] for k, v in KERNELS.items()}
        module.write_text(
            PLANNER.format(log=str(log), kernels=json.dumps(made), line=line)
        )
        for folder in list(module.parents)[:4]:
            (folder / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
        return lambda: [int(pid) for pid in log.read_text().split()]

    return make


Open = Callable[[], list[Session]]


@pytest.fixture
def open_sessions(config: Callable[..., Config]) -> Iterator[Open]:
    """Starts three ranks of a node."""
    made = config()
    with contextlib.ExitStack() as stack:
        yield lambda: [stack.enter_context(Session(made)) for _ in range(3)]


def spec(name: str) -> dict[str, Any]:
    return {"name": name}


def settle(*sessions: Session) -> None:
    """Have all of them settle; one that would wait for ever fails."""
    waiting = [threading.Thread(target=s.settle, daemon=True) for s in sessions]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(60.0)
        assert not thread.is_alive()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def entries(session: Session, name: str) -> list[str]:
    kernels = session.plan_of(spec(name))
    assert isinstance(kernels, tuple), kernels
    return [kernel.entry.removeprefix("gemm.") for kernel in kernels]


def test_ranks_that_want_different_things_share_a_planner(
    planner: Callable[..., Any],
    open_sessions: Open,
    compiled: Callable[[], list[str]],
    config: Callable[..., Config],
) -> None:
    """G43, G58: stages overlap; each kernel of the union is built once."""
    starts = planner("time.sleep(0.2)")
    sessions = open_sessions()
    for session, names in zip(sessions, ("ab", "bc", "a"), strict=True):
        for name in names:
            session.add_spec(spec(name))
    for session, names in zip(sessions, ("ab", "bc", "a"), strict=True):
        session.settle()
        for name in names:
            assert entries(session, name) == KERNELS[name]
    assert len(starts()) == 1
    assert sorted(compiled()) == ["k0", "k1", "k2", "k3"]
    assert set(sessions[2].outcomes) == {"gemm.k0", "gemm.k1"}
    # Another start reads the plans.
    with Session(config()) as later:
        later.add_spec(spec("c"))
        later.settle()
        assert entries(later, "c") == ["k3"]
    assert len(starts()) == 1


def test_finding_builds_nothing(
    planner: Callable[..., Any],
    open_sessions: Open,
    compiled: Callable[[], list[str]],
) -> None:
    planner()
    sessions = open_sessions()
    sessions[0].add_spec(spec("a"), build=False)
    sessions[0].settle()
    assert entries(sessions[0], "a") == KERNELS["a"]
    assert compiled() == []


def test_a_spec_that_cannot_be_planned_is_named_and_the_others_are_built(
    planner: Callable[..., Any], open_sessions: Open
) -> None:
    planner()
    sessions = open_sessions()
    for name in "xa":
        sessions[0].add_spec(spec(name))
    sessions[0].settle()
    assert sessions[0].plan_of(spec("x")) == "no such kernel"
    assert sessions[0].outcomes["gemm.k0"].built


def test_who_waits_for_another_rank_s_planner_is_told_that_there_is_no_plan(
    planner: Callable[..., Any], open_sessions: Open, tmp_path: Path
) -> None:
    """The rank that plans goes on to a collective, and serves until it ends."""
    gate = tmp_path / "go"
    starts = planner(f"while not os.path.exists({str(gate)!r}): time.sleep(0.02)")
    sessions = open_sessions()
    sessions[0].add_spec(spec("x"))
    wait_for(tmp_path / "planners")
    for session in sessions[1:]:
        session.add_spec(spec("x"))
    gate.touch()
    settle(*sessions)
    assert {s.plan_of(spec("x")) for s in sessions} == {"no such kernel"}
    assert len(starts()) == 1
    # The planner still serves.
    sessions[1].add_spec(spec("a"))
    settle(sessions[1])
    assert entries(sessions[1], "a") == KERNELS["a"]


def test_another_context_s_planner_is_not_waited_for(
    planner: Callable[..., Any], config: Callable[..., Config], tmp_path: Path
) -> None:
    """Two engines with one cache, and not with one SM count."""
    planner('json.loads(sys.argv[1])["target"][2] == 132 and time.sleep(600)')
    other = dataclasses.replace(CONTEXT, sm_count=114)
    with Session(config()) as slow, Session(config(context=other)) as session:
        slow.add_spec(spec("a"))
        wait_for(tmp_path / "planners")
        session.add_spec(spec("a"))
        settle(session)
        assert entries(session, "a") == KERNELS["a"]


@pytest.fixture
def plan_here(
    config: Callable[..., Config],
) -> Iterator[Callable[..., Planning]]:
    """Makes what a coordinator has, in this process; ``limit`` and ``linger``."""
    made = config()
    made.work.mkdir(parents=True)
    locks = Locks(made.locks)
    with contextlib.ExitStack() as stack:

        def make(**seconds: float) -> Planning:
            planning = Planning(
                CONTEXT,
                PlanStore(made.work, CONTEXT),
                locks,
                made.library,
                os.environ,
                **{"limit": 60.0, "linger": 60.0, **seconds},
            )
            stack.callback(planning.stop)
            return planning

        yield make
    locks.close()


def answers(planning: Planning) -> list[Answer]:
    """Step until it is done."""
    found: list[Answer] = []
    while planning.busy:
        ready = planning.descriptor is not None and select_now(planning.descriptor)
        found += planning.step(ready)
    return found


def select_now(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0.05)[0])


def test_a_planner_with_nothing_to_do_ends_and_another_rank_may_start_one(
    planner: Callable[..., Any],
    plan_here: Callable[..., Planning],
    config: Callable[..., Config],
) -> None:
    starts = planner()
    planning = plan_here(linger=0.0)
    planning.add(spec("a"))
    (answer,) = answers(planning)
    assert answer.kernels is not None
    list(planning.step(readable=False))
    assert planning.descriptor is None
    with Session(config()) as session:
        session.add_spec(spec("c"))
        settle(session)
        assert entries(session, "c") == KERNELS["c"]
    assert len(starts()) == 2
    planning.add(spec("b"))
    (answer,) = answers(planning)
    assert answer.kernels is not None
    assert len(starts()) == 3


def test_a_planner_that_hangs_is_not_tried_by_rank_after_rank(
    planner: Callable[..., Any], plan_here: Callable[..., Planning]
) -> None:
    planner("time.sleep(600)")
    first, second = plan_here(limit=0.0), plan_here()
    for planning in (first, second):
        planning.add(spec("a"))
        (answer,) = answers(planning)
        assert answer.problem == "the planner was silent for 0 s"
    # Another start tries it again.
    later = plan_here()
    later.add(spec("a"))
    assert list(later.step(readable=False)) == []
    assert later.descriptor is not None


def test_a_planner_that_ends_is_named_with_its_last_words(
    planner: Callable[..., Any], open_sessions: Open
) -> None:
    planner('sys.exit("no such device")')
    sessions = open_sessions()
    sessions[0].add_spec(spec("a"))
    sessions[0].settle()
    assert sessions[0].plan_of(spec("a")) == "the planner ended with 1: no such device"


def test_a_planner_that_says_something_else_is_named(
    planner: Callable[..., Any], open_sessions: Open
) -> None:
    planner('print("hello", flush=True)')
    sessions = open_sessions()
    sessions[0].add_spec(spec("a"))
    sessions[0].settle()
    assert "cannot be read" in str(sessions[0].plan_of(spec("a")))


def test_when_a_rank_is_killed_another_one_plans(
    planner: Callable[..., Any], open_sessions: Open, tmp_path: Path
) -> None:
    starts = planner(f"os.path.exists({str(tmp_path / 'go')!r}) or time.sleep(600)")
    sessions = open_sessions()
    for session in sessions[:2]:
        session.add_spec(spec("a"))
    wait_for(tmp_path / "planners")
    (first,) = starts()
    (tmp_path / "go").touch()
    owner = _parent(first)
    os.kill(owner, signal.SIGKILL)
    survivor = next(s for s in sessions[:2] if s._child.pid != owner)
    survivor.settle()
    assert entries(survivor, "a") == KERNELS["a"]
    assert not Path(f"/proc/{first}").exists() or _parent(first) != owner


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("PPid:")[1].split()[0])


def test_without_a_c_compiler_it_says_so(
    planner: Callable[..., Any],
    config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with Session(config()) as session:
        session.add_spec(spec("a"))
        session.settle()
        assert "no C compiler (cc) on PATH" in str(session.plan_of(spec("a")))
    assert PlanStore(config().work, CONTEXT).load(spec("a")) is None
