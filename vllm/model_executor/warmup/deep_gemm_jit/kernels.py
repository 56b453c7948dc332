"""Decides what a plan of kernels is: those of every spec, each with a call for it."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.compiling.store import plain

from .spec import Spec

__all__ = ["Kernel", "KernelPlan", "json_of", "plan_from_session"]


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """All kernels of some specs.

    Attributes:
        kernels: Of each spec that has a plan, in the order of its calls. The same
            kernel can be in several.
        problems: Why each of the others has none.

    """

    kernels: Mapping[Spec, tuple[Kernel, ...]]
    problems: Mapping[Spec, str]

    @property
    def entries(self) -> dict[str, Kernel]:
        """Every distinct kernel by its name in the cache."""
        return {
            kernel.entry: kernel
            for kernels in self.kernels.values()
            for kernel in kernels
        }


def plan_from_session(specs: Iterable[Spec], session: Session) -> KernelPlan:
    """Return what a session knows of specs that were added to it."""
    found = {spec: session.plan_of(json_of(spec)) for spec in specs}
    return KernelPlan(
        {
            spec: kernels
            for spec, kernels in found.items()
            if isinstance(kernels, tuple)
        },
        {
            spec: answer or "there was no time to plan it"
            for spec, answer in found.items()
            if not isinstance(answer, tuple)
        },
    )


def json_of(spec: Spec) -> dict[str, Any]:
    """Return the spec as every process that hears of it has it: lists, no tuples."""
    value: dict[str, Any] = plain(spec.to_json())
    return value
