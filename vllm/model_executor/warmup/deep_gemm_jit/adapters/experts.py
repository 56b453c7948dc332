"""Decides what block-FP8 experts run: a grouped GEMM for each of two weights."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch
from vllm_deep_gemm_warmup.overlay import base_in_use

from ..library import packs_scales
from ..provider import Rejected, WarmupProvider
from ..spec import (
    EntryPoint,
    ExpertRouting,
    GemmSpec,
    RowRange,
    ScaleLayout,
    TensorLayout,
)
from .loaded import is_a

# They tell the experts how many tokens each got (ExpertTokensMetadata.make_from_list).
HOST_COUNTS = ("DeepEPHTPrepareAndFinalize", "DeepEPV2PrepareAndFinalize")

_CHOOSES, _RUNS = "TritonOrDeepGemmExperts", "DeepGemmExperts"
_GROUPED = {_CHOOSES, _RUNS}
_RUNNER = ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner")


def adapt(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for each weight of DeepGEMM's experts."""
    experts = _deep_gemm_experts(experts_of(module))
    if experts is None:
        return []
    counted = _are_counted(module)
    return [GroupedExperts(experts, weight, counted) for weight in ExpertWeight]


def adapt_constructed(module: torch.nn.Module) -> list[WarmupProvider]:
    """Return a provider for each weight that DeepGEMM's experts will have.

    They say what they will run once they are loaded, if that is known: their method
    has chosen DeepGEMM, and scales keep the form in which they are created.
    """
    if not is_a(module, *_RUNNER) or packs_scales():
        return []
    experts = _experts_to_come(module)
    if experts is None:
        return []
    config = experts.moe_config
    counted = config.use_deepep_ht_kernels or config.use_deepep_v2_kernels
    return [GroupedExperts(experts, weight, counted) for weight in ExpertWeight]


def experts_of(module: torch.nn.Module) -> Any | None:
    """Return the object that runs the experts of a MoERunner, or None."""
    if not is_a(module, *_RUNNER):
        return None
    runner: Any = module
    kernel = getattr(runner._quant_method, "moe_kernel", None)
    return None if kernel is None else kernel.impl.fused_experts


def _deep_gemm_experts(experts: Any) -> Any | None:
    """Return the object whose ``apply`` calls the grouped GEMM, or None."""
    names = {cls.__name__ for cls in type(experts).__mro__}
    if _CHOOSES in names:
        # It takes Triton only where is_deep_gemm_e8m0_used() is False and the
        # shape does not fit; the DeepGEMM kernels are the ones to have ready.
        return experts.experts
    return experts if _RUNS in names else None


@dataclasses.dataclass(frozen=True)
class _ExpertsToCome:
    """What the experts that a method will make have of what a provider reads."""

    block_shape: Sequence[int]
    moe_config: Any
    w1_scale: torch.Tensor
    w2_scale: torch.Tensor


def _experts_to_come(runner: Any) -> _ExpertsToCome | None:
    method, routed = runner._quant_method, runner.routed_experts
    chosen = getattr(method, "experts_cls", None)
    # Other methods name a class as well, of experts in other formats.
    if chosen is None or not _GROUPED & {cls.__name__ for cls in chosen.__mro__}:
        return None
    name = getattr(method, "weight_scale_name", "weight_scale")
    scales = [getattr(routed, f"{which.value}_{name}", None) for which in ExpertWeight]
    if any(scale is None or scale.ndim != 3 for scale in scales):
        return None
    return _ExpertsToCome(method.weight_block_size, method.moe, *scales)


class ExpertWeight(enum.Enum):
    """The two weights of a layer of experts."""

    W13 = "w13"
    W2 = "w2"


class Experts:
    """One of the two weights of block-FP8 experts, as a provider's subclass runs it."""

    def __init__(self, experts: Any, which: ExpertWeight) -> None:
        self._experts = experts
        self._which = which

    def get_deep_gemm_warmup_weights(
        self, layer: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight (E, N, K) float8_e4m3fn and its block scale.

        Args:
            layer: The MoERunner.

        """
        routed: Any = layer.routed_experts
        if self._which is ExpertWeight.W13:
            return routed.w13_weight, self._experts.w1_scale
        return routed.w2_weight, self._experts.w2_scale


class GroupedExperts(Experts):
    """Describes one grouped contiguous GEMM of block-FP8 experts."""

    def __init__(self, experts: Any, which: ExpertWeight, counted: bool) -> None:
        super().__init__(experts, which)
        self._counted = counted

    def get_deep_gemm_warmup_entry_points(
        self, layer: torch.nn.Module
    ) -> tuple[EntryPoint, ...]:
        """Return the function that it runs."""
        return (EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS,)

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> Sequence[GemmSpec] | Rejected:
        """Return the spec of this weight.

        Args:
            layer: The MoERunner.
            max_tokens: Most tokens that one rank can send in a step; the ranks
                of a data-parallel group send theirs to every rank, those of a
                sequence-parallel one an equal part each.

        """
        from vllm.distributed.parallel_state import get_dp_group
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
        from vllm.utils.math_utils import round_up

        if list(self._experts.block_shape) != [128, 128]:
            return Rejected(f"block size {self._experts.block_shape} is not [128, 128]")
        routed: Any = layer.routed_experts
        weight, scale = self.get_deep_gemm_warmup_weights(layer)
        tokens = round_up(max_tokens, self._experts.moe_config.sp_size)
        return [
            GemmSpec(
                entry_point=EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS,
                n=weight.shape[1],
                k=weight.shape[2],
                groups=weight.shape[0],
                rows=RowRange(1, tokens * get_dp_group().world_size),
                weight_scale=TensorLayout.of(scale),
                activation_scale=self._activation_scale_layout(),
                ue8m0_cast=is_deep_gemm_e8m0_used(),
                routing=ExpertRouting(
                    routed.top_k,
                    _uses_prefix_sum(routed.activation),
                    counted=self._counted,
                ),
            )
        ]

    def _activation_scale_layout(self) -> ScaleLayout:
        # ep_scatter writes the scale of w13's input row by row, the activation
        # writes that of w2's input column by column.
        if self._which is ExpertWeight.W13:
            return ScaleLayout.ROW_MAJOR
        return ScaleLayout.PACKED_UE8M0 if packs_scales() else ScaleLayout.COLUMN_MAJOR


def _are_counted(runner: Any) -> bool:
    sender = type(runner._quant_method.moe_kernel.impl.prepare_finalize)
    return any(cls.__name__ in HOST_COUNTS for cls in sender.__mro__)


def _uses_prefix_sum(activation: enum.Enum) -> bool:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return base_in_use().experts_use_prefix_sum(
        activation.name, 10 * capability.major, packs_scales()
    )
