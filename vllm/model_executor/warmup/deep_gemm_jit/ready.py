"""Decides how kernels come to be there before they are called: planned, then built.

A full cache needs no process at all. Otherwise every rank has a coordinator of its own
beside it, and those share the work of the node: each kernel is built once, and a rank
goes on when no rank of its engine builds any more. That is where ranks meet before
their next collective: it waits for locks, which dead ranks give back, so that no rank
waits for one that has failed. There is no collective in it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_deep_gemm_warmup import kernel_caches
from vllm_deep_gemm_warmup.compiling.building import Outcome
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.locks import wait_for_group
from vllm_deep_gemm_warmup.compiling.publish import is_whole
from vllm_deep_gemm_warmup.compiling.session import Ended, Session
from vllm_deep_gemm_warmup.compiling.store import PlanStore

from .kernels import KernelPlan, json_of, plan_from_session
from .spec import Spec

# What a kernel takes on a server's CPU: 2.1 to 2.6 s (DeepGEMM #94), none to none.
_SECONDS_A_KERNEL = 2.5
_Event = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Ready:
    """What is there to be loaded.

    Attributes:
        plan: The kernels of every spec that could be planned.
        outcomes: What became of kernels that were looked for; empty for a full
            cache.
        problem: What ended the building before it was done, or None.

    """

    plan: KernelPlan
    outcomes: Mapping[str, Outcome] = dataclasses.field(default_factory=dict)
    problem: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why kernels are left for the library to build."""
        own = () if self.problem is None else (self.problem,)
        unbuilt = {
            outcome.failure
            for outcome in self.outcomes.values()
            if outcome.failure is not None and not outcome.final
        }
        return (*own, *sorted(unbuilt), *self.plan.problems.values())

    @property
    def built(self) -> frozenset[str]:
        """Entries that were built for this start."""
        return frozenset(name for name, it in self.outcomes.items() if it.built)

    @property
    def failures(self) -> dict[str, str]:
        """Entry -> why its compiler failed."""
        return {
            name: outcome.failure
            for name, outcome in self.outcomes.items()
            if outcome.failure is not None and outcome.final
        }


def find_full(specs: Iterable[Spec], config: Config) -> Ready | None:
    """Return the stored plan of all specs if every kernel of it is in the cache."""
    store = PlanStore(config.work, config.context)
    cache = kernel_caches.deep_gemm(config.root)
    found = {}
    for spec in specs:
        kernels = store.load(json_of(spec))
        if kernels is None:
            return None
        found[spec] = kernels
    plan = KernelPlan(config.context, found, {})
    if not all(is_whole(cache, entry) for entry in plan.entries):
        return None
    return Ready(plan)


def make_ready(
    specs: Iterable[Spec],
    config: Config,
    begun: Session | None,
    open_session: Callable[[], Session],
) -> Ready:
    """Have the kernels of all specs built, each once a node, and wait for them.

    Args:
        specs: Of entry points whose kernels are in DeepGEMM's cache.
        config: This process's.
        begun: One that was begun earlier; it is ended, and what it built counts.
        open_session: Returns a new one.

    Raises:
        OSError: No process can be started.

    """
    wanted = list(specs)
    full = find_full(wanted, config) if begun is None else None
    if full is not None:
        wait_for_group(config.locks, config.group)
        return full
    with begun or open_session() as session:
        problem = None
        try:
            for spec in wanted:
                session.add_spec(json_of(spec))
            session.settle()
            session.meet()
        except Ended as error:
            problem = str(error)
        plan = plan_from_session(wanted, config.context, session)
        return Ready(plan, dict(session.outcomes), problem)


def describe_work(event: _Event, timeout: float) -> tuple[str, bool] | None:
    """Return what is to be logged before the first build, and whether it warns.

    Args:
        event: A session's.
        timeout: Seconds after which vLLM gives up on an engine that is not ready.

    """
    if "missing" not in event:
        return None
    missing, workers = event["missing"], event["workers"]
    seconds = _SECONDS_A_KERNEL * -(-missing // workers)
    line = (
        f"DeepGEMM warmup: {missing} kernels to build, {workers} at a time, about "
        f"{seconds:.0f} s"
    )
    if seconds <= timeout:
        return line, False
    return (
        f"{line}; vLLM gives up on an engine after {timeout:.0f} s "
        f"(VLLM_ENGINE_READY_TIMEOUT_S): raise it, or build the cache beforehand"
    ), True
