"""Decides what is remembered of a warmup once it is over."""

import dataclasses
import enum

from ..calls import Call
from ..plan import Plan
from ..spec import Spec, Target


class KernelState(enum.StrEnum):
    """How a kernel came to be there, or did not."""

    BUILT = "built"
    HIT = "hit"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class TakenKernel:
    """A kernel that a spec needs.

    Attributes:
        name: Its cache entry; None where it is not known: of one that was there
            already, or that could not be built, DeepGEMM says nothing.
        state: How it came to be there.
        rows: Rows M of the call that took it.
        seconds: Wall time of that call, with the compile if there was one.
        reason: Why it failed, or None.

    """

    name: str | None
    state: KernelState
    rows: int
    seconds: float
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class SpecResult:
    """What was done for one spec.

    Attributes:
        spec: Which.
        layers: Names of the layers that have it.
        calls: Those made.
        left: Row counts of those that were not made, after so many had failed.
        target: What its kernels were built for; None: what the report's were.
        unconfirmed: Why it is here though no layer has it, or None. Its calls were
            not made: each stands for a kernel that no other spec takes, built or
            found.

    """

    spec: Spec
    layers: tuple[str, ...]
    calls: tuple[Call, ...]
    left: tuple[int, ...] = ()
    target: Target | None = None
    unconfirmed: str | None = None

    @property
    def built(self) -> tuple[str, ...]:
        """Cache entries that this spec's calls built."""
        return tuple(name for call in self.calls for name in call.built)

    @property
    def kernels(self) -> tuple[TakenKernel, ...]:
        """What its calls took, in their order."""
        return tuple(kernel for call in self.calls for kernel in _kernels_of(call))

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
        results: One for each spec, and for each that was begun with for no layer.
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
    def confirmed(self) -> tuple[SpecResult, ...]:
        """Those that layers have."""
        return tuple(r for r in self.results if r.unconfirmed is None)

    @property
    def unconfirmed(self) -> tuple[SpecResult, ...]:
        """The others."""
        return tuple(r for r in self.results if r.unconfirmed is not None)

    @property
    def shapes(self) -> frozenset[tuple[str, str]]:
        """Distinct entry points with a shape, of layers."""
        return frozenset(
            (result.spec.entry_point, result.spec.shape) for result in self.confirmed
        )

    @property
    def sm_counts(self) -> tuple[int, ...]:
        """SM counts that kernels were built for, in the order of building."""
        targets = (result.target for result in self.results)
        return tuple(dict.fromkeys(t.sm_count for t in targets if t is not None))


def _kernels_of(call: Call) -> list[TakenKernel]:
    """Return what ``call`` built; else the one that it found, or that failed."""
    kernels = [
        TakenKernel(name, KernelState.BUILT, call.rows, call.seconds)
        for name in call.built
    ]
    if call.failure is not None:
        state = KernelState.FAILED
    elif not kernels:
        state = KernelState.HIT
    else:
        return kernels
    return [*kernels, TakenKernel(None, state, call.rows, call.seconds, call.failure)]
