"""Decides what a model needs: the one walk over its layers, and its specs."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import engine
from .adapters import adapt, adapt_constructed
from .provider import (
    PROVIDER_ATTRIBUTE,
    NamesEntryPoints,
    Rejected,
    WarmupProvider,
    Weights,
)
from .spec import EntryPoint, Spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
        bypassed: Its kernel was asked without having registered itself, and this
            is why it had not; None: it had.

    """

    name: str
    specs: tuple[Spec, ...]
    adapter: bool = False
    bypassed: str | None = None


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A block-FP8 layer that is left out for a good reason.

    Attributes:
        name: Its path in the model.
        reason: Why.
        entry_points: What it would run of ours, as far as that is known.

    """

    name: str
    reason: str
    entry_points: tuple[EntryPoint, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unregistered:
    """A layer that runs on DeepGEMM and whose kernel did not say what it runs.

    Attributes:
        name: Its path in the model.
        reason: Why.
        entry_points: What it runs, as far as that is known.

    """

    name: str
    reason: str
    entry_points: tuple[EntryPoint, ...] = ()


LayerOutcome = Registered | Skipped | Unregistered
_OutcomeT = TypeVar("_OutcomeT", Registered, Skipped, Unregistered)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a model needs.

    Attributes:
        outcomes: One for every layer that is block-FP8 or runs on DeepGEMM.
        weights: For every spec, what the first layer that has it holds of its
            operands.
        config: Of the engine; None where no module names one.

    """

    outcomes: tuple[LayerOutcome, ...]
    weights: Mapping[Spec, Weights | None]
    config: "VllmConfig | None" = None

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
    """Ask every layer of ``model``, and of what stands beside it, what it will run.

    Args:
        model: Its weights are loaded, and so are those of a drafter.
        max_tokens: Most rows that one step can send.

    """
    walk = _Walk()
    towers = engine.towers(model)
    for name, module in model.named_modules(walk.seen):
        in_tower = f"{name}.".startswith(towers)
        walk.visit(
            name, module, engine.tower_rows(max_tokens) if in_tower else max_tokens
        )
    if walk.config is not None:
        rows = engine.drafter_rows(walk.config, max_tokens)
        for root, beside in engine.loaded(walk.config):
            for name, module in beside.named_modules(walk.seen, root):
                walk.visit(name, module, rows)
        walk.visit_unloaded(rows)
    return walk.plan


def plan_layers(layers: Iterable[tuple[str, torch.nn.Module]], max_tokens: int) -> Plan:
    """Ask these layers, each with its name, what they will run."""
    walk = _Walk()
    for name, module in layers:
        walk.visit(name, module, max_tokens)
    return walk.plan


def plan_constructed(
    layers: Iterable[tuple[str, torch.nn.Module]], max_tokens: int
) -> Plan:
    """Ask these layers what they will run once they are loaded.

    Only those that know it have an outcome.
    """
    walk = _Walk()
    for name, module in layers:
        walk.visit_constructed(name, module, max_tokens)
    return walk.plan


class _Walk:
    """What the modules have answered so far, each asked once."""

    def __init__(self) -> None:
        self.seen: set[torch.nn.Module] = set()
        self.outcomes: list[LayerOutcome] = []
        self.weights: dict[Spec, Weights | None] = {}
        self.config: VllmConfig | None = None
        self._kernels: list[Any] = []

    @property
    def plan(self) -> Plan:
        return Plan(tuple(self.outcomes), self.weights, self.config)

    def visit(self, name: str, module: torch.nn.Module, max_tokens: int) -> None:
        try:
            self.config = self.config or engine.config_of(module)
            for each in (module, *engine.absent(module)):
                self._kernels += linear_kernels(each)
            speakers = _speakers_of(module)
            silent = None if speakers else _describe_silent(name, module)
        # Engine start: one module that is not what this walk expects.
        except Exception as error:
            self.outcomes.append(Unregistered(name, _describe(module, error)))
            return
        for speaker in speakers:
            self._take(*_ask(speaker, name, module, max_tokens))
        if silent is not None:
            self.outcomes.append(silent)

    def visit_constructed(
        self, name: str, module: torch.nn.Module, max_tokens: int
    ) -> None:
        try:
            providers = adapt_constructed(module)
        # Engine start: what is wrong with it is said when it is loaded.
        except Exception:
            return
        for provider in providers:
            speaker = _Speaker(provider, adapter=True)
            self._take(*_ask(speaker, name, module, max_tokens))

    def visit_unloaded(self, max_tokens: int) -> None:
        """Ask the kernels of layers that were not loaded by way of our hook.

        Those of the model have been found as its modules. What is left is a
        drafter's: its kernels are known, and its modules are not.
        """
        if self.config is None:
            return
        for number, kernel in enumerate(engine.unloaded(self.config, self._kernels)):
            self._take(_ask_unloaded(kernel, number, max_tokens), None)

    def _take(self, outcome: LayerOutcome, operands: Weights | None) -> None:
        self.outcomes.append(outcome)
        if isinstance(outcome, Registered):
            for spec in outcome.specs:
                self.weights.setdefault(spec, operands)


@dataclasses.dataclass(frozen=True)
class _Speaker:
    """Who speaks for a module, and as what; see ``Registered``."""

    provider: WarmupProvider
    adapter: bool = False
    bypassed: str | None = None


def _speakers_of(module: torch.nn.Module) -> list[_Speaker]:
    stamped = getattr(module, PROVIDER_ATTRIBUTE, None)
    if stamped is not None and not _is_stale(stamped, module):
        return [_Speaker(stamped)]
    adapted = adapt(module)
    if adapted:
        return [_Speaker(provider, adapter=True) for provider in adapted]
    return _bypassed(module)


def _bypassed(module: torch.nn.Module) -> list[_Speaker]:
    """Return the kernel of a layer whose loader did not let it register itself.

    Loaders that bring weights in their final form (``--load-format ipc_cache``)
    leave the hook out; the kernel was chosen all the same, and knows what it runs.
    """
    for kernel in linear_kernels(module):
        provider = _deep_gemm_kernel(kernel)
        if provider is not None:
            return [_Speaker(provider, bypassed=_bypassed_reason(kernel))]
    return []


def _bypassed_reason(kernel: object) -> str:
    return (
        f"{type(kernel).__name__} was chosen and its "
        "process_weights_after_loading did not run"
    )


def _ask_unloaded(kernel: Any, number: int, max_tokens: int) -> LayerOutcome:
    n, k = kernel.config.weight_shape
    name = f"N={n} K={k} beside the model.{number}"
    reason = _bypassed_reason(kernel.dispatcher or kernel)
    specs = tuple(kernel.specs_before_loading(max_tokens))
    if not specs:
        return Unregistered(
            name, f"{reason}; its scale has no form yet", (EntryPoint.FP8_GEMM_NT,)
        )
    return Registered(name, specs, bypassed=reason)


def _is_stale(stamped: WarmupProvider, module: torch.nn.Module) -> bool:
    """Whether a reload gave the layer another kernel that left the stamp."""
    kernels = linear_kernels(module)
    deep_gemm = [_deep_gemm_kernel(kernel) for kernel in kernels]
    return bool(kernels) and stamped not in deep_gemm


def _ask(
    speaker: _Speaker, name: str, module: torch.nn.Module, max_tokens: int
) -> tuple[LayerOutcome, Weights | None]:
    provider = speaker.provider
    if not isinstance(provider, WarmupProvider):
        return Unregistered(
            name, f"{type(provider).__name__} stamped itself and is no provider"
        ), None
    try:
        answer = provider.get_deep_gemm_warmup_specs(module, max_tokens)
        if isinstance(answer, Rejected):
            return _left_out(name, speaker, answer, module), None
        # A generator raises here.
        specs = tuple(answer)
        operands = provider.get_deep_gemm_warmup_weights(module)
    # Engine start: a provider may raise anything; the other layers go on.
    except Exception as error:
        known = _entry_points(provider, module)
        return Unregistered(name, _describe(provider, error), known), None
    problem = _specs_problem(specs)
    if problem is not None:
        known = _entry_points(provider, module)
        reason = f"{type(provider).__name__} {problem}"
        return Unregistered(name, reason, known), None
    return Registered(name, specs, speaker.adapter, speaker.bypassed), operands


def _left_out(
    name: str, speaker: _Speaker, answer: Rejected, module: torch.nn.Module
) -> LayerOutcome:
    known = _entry_points(speaker.provider, module)
    if speaker.bypassed is None:
        return Skipped(name, answer.reason, known)
    # Its weights are in no final form, so what it says of them may not hold.
    return Unregistered(name, f"{speaker.bypassed}; {answer.reason}", known)


def _entry_points(provider: object, module: torch.nn.Module) -> tuple[EntryPoint, ...]:
    """Return what a provider stands for, of which no spec says it; () if unknown."""
    if not isinstance(provider, NamesEntryPoints):
        return ()
    try:
        named = provider.get_deep_gemm_warmup_entry_points(module)
        return tuple(map(EntryPoint, named))
    # Engine start: a provider may raise anything, and its layer has its row.
    except Exception:
        return ()


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


def _describe_silent(name: str, module: torch.nn.Module) -> LayerOutcome | None:
    """Say what a layer for which nobody speaks is, or None if it is not ours."""
    kernels = linear_kernels(module)
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
