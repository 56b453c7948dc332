"""Decides how kernels come to be there before they are called: planned, then built.

A full cache needs no process at all. Otherwise every rank has a coordinator of its own
beside it, and those share the work of the node: each kernel is built once, and a rank
goes on when no rank of its engine builds any more. That is where ranks meet before
their next collective: it waits for locks, which dead ranks give back, so that no rank
waits for one that has failed. There is no collective in it.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from vllm_deep_gemm_warmup import kernel_caches
from vllm_deep_gemm_warmup.compiling.building import Outcome
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.locks import wait_for_group
from vllm_deep_gemm_warmup.compiling.publish import is_whole
from vllm_deep_gemm_warmup.compiling.session import Ended
from vllm_deep_gemm_warmup.compiling.store import PlanStore

from .kernels import Kernel, KernelPlan, json_of, plan_from_session
from .spec import Spec
from .work import Work


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

    def seconds(self, entry: str) -> float:
        """Return how long an entry's compiler ran here; 0.0 where it did not."""
        outcome = self.outcomes.get(entry)
        return 0.0 if outcome is None else outcome.seconds

    @property
    def failures(self) -> dict[str, str]:
        """Entry -> why its compiler failed."""
        return {
            name: outcome.failure
            for name, outcome in self.outcomes.items()
            if outcome.failure is not None and outcome.final
        }


def stored_plan(spec: Spec, config: Config) -> tuple[Kernel, ...]:
    """Return the kernels of a spec that was planned, or () where it was not."""
    store = PlanStore(config.work, config.context)
    return store.load(json_of(spec)) or ()


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
    plan = KernelPlan(found, {})
    if not all(is_whole(cache, entry) for entry in plan.entries):
        return None
    return Ready(plan)


def describe_doubt(specs: Iterable[Spec], config: Config) -> str | None:
    """Return why the first spec without a plan has none, or None.

    None as well where nothing was kept, and where all have one: then kernels are
    missing, of which more is said.
    """
    store = PlanStore(config.work, config.context)
    for spec in specs:
        if store.load(json_of(spec)) is not None:
            continue
        doubt = store.doubt(json_of(spec))
        if doubt is None and kernel_caches.deep_gemm(config.root).entries():
            doubt = f"no plan of it is kept in {config.work}"
        return doubt and f"{spec}: {doubt}"
    return None


def make_ready(specs: Iterable[Spec], work: Work) -> Ready:
    """Have the kernels of all specs built, each once a node, and wait for them.

    Args:
        specs: Of entry points whose kernels are in DeepGEMM's cache.
        work: This process's, which may have begun.

    Raises:
        OSError: No process can be started.

    """
    wanted = list(specs)
    if work.session is None:
        full = find_full(wanted, work.config)
        if full is not None:
            wait_for_group(work.config.locks, work.config.group)
            return full
    session, problem = work.begin(describe_doubt(wanted, work.config)), None
    try:
        for spec in wanted:
            session.add_spec(json_of(spec))
        session.settle()
        session.meet()
    except Ended as error:
        problem = str(error)
    plan = plan_from_session(wanted, session)
    return Ready(plan, dict(session.outcomes), problem)
