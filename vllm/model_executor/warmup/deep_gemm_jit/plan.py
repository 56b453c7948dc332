"""Decides what a model needs: the one walk over its layers, and its specs."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .adapters import adapt
from .provider import PROVIDER_ATTRIBUTE, Rejected, WarmupProvider, Weights
from .spec import Spec

# A kernel lies at quant_method, scheme, or in an object that one of them holds
# (INC wraps Fp8LinearMethod): three steps reach all of them.
_HOLDERS = ("quant_method", "scheme")
_SEARCH_DEPTH = 3


@dataclasses.dataclass(frozen=True)
class Registered:
    """A layer whose kernel said what it runs.

    Attributes:
        name: Its path in the model.
        specs: What it runs.
        adapter: The code that runs it does not register itself; one of
            ``adapters`` spoke for it.

    """

    name: str
    specs: tuple[Spec, ...]
    adapter: bool = False


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A block-FP8 layer that is left out for a good reason."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Unregistered:
    """A layer that runs on DeepGEMM and whose kernel did not say what it runs."""

    name: str
    reason: str


Outcome = Registered | Skipped | Unregistered
_OutcomeT = TypeVar("_OutcomeT", Registered, Skipped, Unregistered)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a model needs.

    Attributes:
        outcomes: One for every layer that is block-FP8 or runs on DeepGEMM.
        weights: For every spec, what the first layer that has it holds of its
            operands.

    """

    outcomes: tuple[Outcome, ...]
    weights: Mapping[Spec, Weights | None]

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Every distinct spec, in the order of the model's layers."""
        return tuple(self.weights)

    def select(self, kind: type[_OutcomeT]) -> list[_OutcomeT]:
        """Return the outcomes of one kind."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, kind)]

    def layers_of(self, spec: Spec) -> tuple[str, ...]:
        """Return the names of the layers that have ``spec``."""
        return tuple(
            layer.name for layer in self.select(Registered) if spec in layer.specs
        )


def make_plan(model: torch.nn.Module, max_tokens: int) -> Plan:
    """Ask every layer of ``model`` what it will run.

    Args:
        model: Its weights are loaded.
        max_tokens: Most rows that one step can send.

    """
    return plan_layers(model.named_modules(), max_tokens)


def plan_layers(layers: Iterable[tuple[str, torch.nn.Module]], max_tokens: int) -> Plan:
    """Ask these layers, each with its name, what they will run."""
    outcomes: list[Outcome] = []
    weights: dict[Spec, Weights | None] = {}
    for name, module in layers:
        try:
            providers, adapted = _providers_of(module)
            silent = None if providers else _describe_silent(name, module)
        # Engine start: one module that is not what this walk expects.
        except Exception as error:
            outcomes.append(Unregistered(name, _describe(module, error)))
            continue
        if providers:
            for provider in providers:
                outcome, operands = _ask(provider, name, module, max_tokens, adapted)
                outcomes.append(outcome)
                if isinstance(outcome, Registered):
                    for spec in outcome.specs:
                        weights.setdefault(spec, operands)
        elif silent is not None:
            outcomes.append(silent)
    return Plan(tuple(outcomes), weights)


def _providers_of(
    module: torch.nn.Module,
) -> tuple[Sequence[WarmupProvider], bool]:
    """Return who speaks for ``module``, and whether an adapter does."""
    stamped = getattr(module, PROVIDER_ATTRIBUTE, None)
    if stamped is not None and not _is_stale(stamped, module):
        return [stamped], False
    return adapt(module), True


def _is_stale(stamped: WarmupProvider, module: torch.nn.Module) -> bool:
    """Whether a reload gave the layer another kernel that left the stamp."""
    kernels = linear_kernels(module)
    deep_gemm = [_deep_gemm_kernel(kernel) for kernel in kernels]
    return bool(kernels) and stamped not in deep_gemm


def _ask(
    provider: WarmupProvider,
    name: str,
    module: torch.nn.Module,
    max_tokens: int,
    adapted: bool,
) -> tuple[Outcome, Weights | None]:
    if not isinstance(provider, WarmupProvider):
        return Unregistered(
            name, f"{type(provider).__name__} stamped itself and is no provider"
        ), None
    try:
        answer = provider.get_deep_gemm_warmup_specs(module, max_tokens)
        if isinstance(answer, Rejected):
            return Skipped(name, answer.reason), None
        # A generator raises here.
        specs = tuple(answer)
        operands = provider.get_deep_gemm_warmup_weights(module)
    # Engine start: a provider may raise anything; the other layers go on.
    except Exception as error:
        return Unregistered(name, _describe(provider, error)), None
    problem = _specs_problem(specs)
    if problem is not None:
        return Unregistered(name, f"{type(provider).__name__} {problem}"), None
    return Registered(name, specs, adapted), operands


def _specs_problem(specs: tuple[Any, ...]) -> str | None:
    """Return why nothing can be built from what a provider answered, or None."""
    if not specs:
        return "named nothing that it runs; one that runs nothing answers Rejected"
    for spec in specs:
        if not isinstance(spec, Spec):
            return f"named a {type(spec).__name__} in place of a Spec"
        problem = spec.problem()
        if problem is not None:
            return f"named {problem}"
    return None


def _describe(speaker: object, error: Exception) -> str:
    return f"{type(speaker).__name__} raised {type(error).__name__}: {error}"


def _describe_silent(name: str, module: torch.nn.Module) -> Outcome | None:
    """Say what a layer without a provider is, or None if it is not ours."""
    kernels = linear_kernels(module)
    held = [kernel for kernel in kernels if _deep_gemm_kernel(kernel) is not None]
    if held and getattr(module, "is_bmm", False):
        return Skipped(name, "is_bmm: it runs through fp8_einsum")
    if held:
        return Unregistered(
            name,
            f"{type(held[0]).__name__} was chosen and its "
            "process_weights_after_loading did not run",
        )
    if kernels and getattr(module, "weight_block_size", None) is not None:
        return Skipped(name, f"it runs on {type(kernels[0]).__name__}")
    return None


def linear_kernels(module: torch.nn.Module) -> list[Any]:
    """Return the linear kernels that the quantization of ``module`` holds."""
    holders = [getattr(module, holder, None) for holder in _HOLDERS]
    return list(_search(holders, _SEARCH_DEPTH))


def _search(candidates: Iterable[Any], depth: int) -> Iterator[Any]:
    for candidate in candidates:
        if _is_linear_kernel(candidate):
            yield candidate
        elif depth and _may_hold_kernels(candidate):
            yield from _search(vars(candidate).values(), depth - 1)


def _is_linear_kernel(candidate: Any) -> bool:
    return not isinstance(candidate, type) and all(
        hasattr(type(candidate), method)
        for method in ("is_supported", "can_implement", "apply_weights")
    )


def _may_hold_kernels(candidate: Any) -> bool:
    return (
        hasattr(candidate, "__dict__")
        and not isinstance(candidate, (type, torch.nn.Module, torch.Tensor))
        and ".quantization." in type(candidate).__module__
    )


def _deep_gemm_kernel(kernel: Any) -> Any | None:
    ask = getattr(kernel, "deep_gemm_kernel", None)
    return ask() if callable(ask) else None
