"""Decides what a plan of kernels is: those of every spec, each with a call for it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.compiling.store import Context, plain

from .spec import Spec, spec_from_json

__all__ = ["Kernel", "KernelPlan", "find_kernels", "plan_from_session"]


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """All kernels of some specs.

    Attributes:
        context: What they are for and are built with.
        kernels: Of each spec that has a plan, in the order of its calls. The same
            kernel can be in several.
        problems: Why each of the others has none.

    """

    context: Context
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

    def to_json(self) -> dict[str, Any]:
        """Return plain values that ``from_json`` turns into an equal plan."""
        return {
            "context": self.context.to_json(),
            "specs": [
                {
                    "spec": spec.to_json(),
                    "kernels": [kernel.to_json() for kernel in kernels],
                }
                for spec, kernels in self.kernels.items()
            ],
            "problems": [
                {"spec": spec.to_json(), "reason": reason}
                for spec, reason in self.problems.items()
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "KernelPlan":
        """Inverse of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: A field is missing or is no plan's.

        """
        return cls(
            Context.from_json(value["context"]),
            {
                spec_from_json(item["spec"]): tuple(
                    map(Kernel.from_json, item["kernels"])
                )
                for item in value["specs"]
            },
            {
                spec_from_json(item["spec"]): item["reason"]
                for item in value["problems"]
            },
        )


def find_kernels(
    specs: Iterable[Spec],
    config: Config,
    listener: Callable[[Mapping[str, Any]], None] = lambda event: None,
) -> KernelPlan:
    """Find the kernels of specs without building any; stored plans are used.

    Args:
        specs: Of entry points whose kernels are in DeepGEMM's cache.
        config: ``machine.read_config`` makes it.
        listener: Told of each spec that is done.

    Raises:
        Ended: The process that plans was killed.
        OSError: None can be started.

    """
    wanted = list(specs)
    with Session(config, listener) as session:
        for spec in wanted:
            session.add_spec(json_of(spec), build=False)
        session.settle()
        return plan_from_session(wanted, config.context, session)


def plan_from_session(
    specs: Iterable[Spec], context: Context, session: Session
) -> KernelPlan:
    """Return what a session knows of specs that were added to it."""
    found = {spec: session.plan_of(json_of(spec)) for spec in specs}
    return KernelPlan(
        context,
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
