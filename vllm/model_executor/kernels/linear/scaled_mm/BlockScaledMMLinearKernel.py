"""Block-scaled FP8 kernels: says once where a layer's weight and scale are.

Why: loading, `apply_weights` and the DeepGEMM warmup each need the block scale,
    which two loaders name differently; a wrong guess leaves kernels cold.
How: `FP8BlockParams` resolves the name and checks what it finds; a dynamic
    wrapper tells its two kernels who dispatches to them, for which rows.
Upstream: vllm-project/vllm#56452 (block_scale_attr, block_scale).
Removal: when the base's own file has the checks and the dispatcher link.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Self

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    process_fp8_weight_block_strategy,
)
from vllm.model_executor.utils import replace_parameter
from vllm.model_executor.warmup.deep_gemm_jit.engine import remember
from vllm.model_executor.warmup.deep_gemm_jit.provider import PROVIDER_ATTRIBUTE
from vllm_deep_gemm_warmup.overlay import base_in_use

from ..base import FP8Params, MMLinearKernel
from .ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig

__all__ = [
    "FP8BlockParams",
    "FP8ScaledMMLinearLayerConfig",
    "Fp8BlockScaledDynamicMMLinearKernel",
    "Fp8BlockScaledMMLinearKernel",
]

logger = init_logger(__name__)

# Scale dtypes that a checkpoint can hold: float32, or UE8M0 exponents.
_BLOCK_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)


@dataclasses.dataclass
class FP8BlockParams(FP8Params):
    """The tensors of a block-FP8 layer.

    Attributes:
        weight: float8_e4m3fn (N, K).
        weight_scale_inv: Block scale as Fp8LinearMethod names it, or None.
        weight_scale: Block scale as compressed-tensors, ModelOpt and Quark name
            it, or None.
        layer_name: For messages.

    """

    weight_scale_inv: torch.Tensor | None
    weight_scale: torch.Tensor | None
    layer_name: str = "block-FP8 layer"

    WEIGHT_SCALE_INV: ClassVar[str] = "weight_scale_inv"

    @classmethod
    def from_layer(cls, layer: torch.nn.Module) -> Self:
        """Read the tensors of ``layer``; what it does not have is None.

        Raises:
            AttributeError: The layer has no weight.

        """
        optional = (
            cls.WEIGHT_SCALE_INV,
            cls.WEIGHT_SCALE,
            cls.INPUT_SCALE,
            cls.INPUT_SCALE_UB,
        )
        return cls(
            weight=getattr(layer, cls.WEIGHT),
            layer_name=getattr(layer, "prefix", "") or type(layer).__name__,
            **{name: getattr(layer, name, None) for name in optional},
        )

    @property
    def block_scale_attr(self) -> str:
        """Name of the layer's attribute that holds the block scale.

        Where both names are set this is ``weight_scale_inv``.
        """
        if self.weight_scale_inv is not None:
            return self.WEIGHT_SCALE_INV
        return self.WEIGHT_SCALE

    @property
    def block_scale(self) -> torch.Tensor:
        """The block scale.

        Raises:
            ValueError: The layer has neither scale.

        """
        scale = (
            self.weight_scale
            if self.weight_scale_inv is None
            else self.weight_scale_inv
        )
        if scale is None:
            raise ValueError(
                f"block scale of {self.layer_name} ({self._describe()}): the layer "
                "has none; check that the checkpoint holds a scale for this layer "
                "or list the layer as not quantized in its quantization config"
            )
        return scale

    def check_block_scale(self, block_shape: tuple[int, int]) -> None:
        """Check the scale that a loader left, before any kernel converts it.

        Args:
            block_shape: Rows and columns of a quantization block.

        Raises:
            ValueError: No scale; its dtype is not a scale's; its shape is not
                (ceil(N / rows), ceil(K / columns)).

        """
        scale = self.block_scale
        if self.weight_scale_inv is not None and self.weight_scale is not None:
            logger.warning(
                "block scale of %s (%s): both names are set; %s is used, remove the "
                "other one",
                self.layer_name,
                self._describe(),
                self.block_scale_attr,
            )
        if scale.dtype not in _BLOCK_SCALE_DTYPES:
            raise ValueError(
                f"block scale of {self.layer_name} ({self._describe()}): "
                f"{self.block_scale_attr} is {_dtype_name(scale)}, expected float32 "
                "or UE8M0 (float8_e8m0fnu, uint8); convert the checkpoint's scales"
            )
        if self.weight.ndim != 2:
            raise ValueError(
                f"weight of {self.layer_name} ({self._describe()}): expected (N, K); "
                "the layer is converted already, load its checkpoint again first"
            )
        expected = tuple(
            -(-size // block)
            for size, block in zip(self.weight.shape, block_shape, strict=True)
        )
        if tuple(scale.shape) != expected:
            raise ValueError(
                f"block scale of {self.layer_name} ({self._describe()}): expected "
                f"{expected} for blocks of {block_shape}; check weight_block_size "
                "in the quantization config against the checkpoint"
            )

    def _describe(self) -> str:
        return ", ".join(
            f"{name} {_shape_of(tensor)}"
            for name, tensor in (
                (self.WEIGHT, self.weight),
                (self.WEIGHT_SCALE_INV, self.weight_scale_inv),
                (self.WEIGHT_SCALE, self.weight_scale),
            )
        )


def _shape_of(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Fp8BlockScaledMMLinearKernel(
    MMLinearKernel[FP8ScaledMMLinearLayerConfig, FP8BlockParams], abc.ABC
):
    """A linear layer with float8_e4m3fn weights (N, K) and one scale a block.

    Attributes:
        apply_input_quant: False in kernels that take bfloat16 activations and
            quantize them themselves.
        dispatcher: The dynamic wrapper that sends rows to this kernel, if any.
        vllm_config: Of the engine that the layer is of; None outside of one.

    """

    apply_input_quant: ClassVar[bool] = True
    dispatcher: "Fp8BlockScaledDynamicMMLinearKernel | None" = None

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        self.vllm_config = get_current_vllm_config_or_none()
        activation_scale = config.activation_quant_key.scale
        self.weight_group_shape = config.weight_quant_key.scale.group_shape
        self.use_triton = False
        self.quant_fp8 = QuantFP8(
            static=activation_scale.static,
            group_shape=activation_scale.group_shape,
            num_token_padding=self.get_output_padding(),
            use_ue8m0=False,
        )

    @classmethod
    def can_implement(
        cls, config: FP8ScaledMMLinearLayerConfig
    ) -> tuple[bool, str | None]:
        if config.activation_quant_key.scale.static:
            return False, "takes activations that are quantized per token group only"
        return True, None

    def deep_gemm_kernel(self) -> "Fp8BlockScaledMMLinearKernel | None":
        """Return the kernel of this layer that calls DeepGEMM, if one does."""
        return None

    def _get_layer_params(
        self, layer: torch.nn.Module, **kwargs: Any
    ) -> FP8BlockParams:
        return FP8BlockParams.from_layer(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Bring the loaded weight and scale into this kernel's form.

        Takes back the stamp of a kernel that an earlier load had chosen.
        """
        layer.__dict__.pop(PROVIDER_ATTRIBUTE, None)
        params = self._get_layer_params(layer)
        weight, scale = process_fp8_weight_block_strategy(
            params.weight, params.block_scale
        )
        replace_parameter(layer, params.WEIGHT, weight.data)
        replace_parameter(layer, params.block_scale_attr, scale.data)
        remember(layer)

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias``.

        Args:
            layer: Holds weight (N, K) and its block scale.
            x: (..., K), bfloat16 or float16.
            bias: (N,) or None.

        """
        params = self._get_layer_params(layer)
        n, k = params.weight.shape[0], x.shape[-1]
        activation, activation_scale = self._activation(x.view(-1, k), params)
        product = self.apply_block_scaled_mm(
            A=activation, B=params.weight, As=activation_scale, Bs=params.block_scale
        )
        biased = product if bias is None else product + bias
        return biased.to(self.config.out_dtype).view(*x.shape[:-1], n)

    def _activation(
        self, rows: torch.Tensor, params: FP8BlockParams
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and its scale in the form that this kernel takes."""
        if self.apply_input_quant:
            quantized: tuple[torch.Tensor, torch.Tensor] = self.quant_fp8(
                rows,
                params.input_scale,
                params.input_scale_ub,
                use_triton=self.use_triton,
            )
            return quantized
        # The kernel quantizes by itself and ignores the scale, but the operator's
        # schema wants a tensor.
        if params.input_scale is None:
            return rows, rows.new_empty(1)
        return rows, params.input_scale

    @abc.abstractmethod
    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
    ) -> torch.Tensor:
        """Return A (M, K) times B (N, K) transposed, (M, N).

        As and Bs are their scales; As is a placeholder where
        ``apply_input_quant`` is False.
        """


class Fp8BlockScaledDynamicMMLinearKernel(Fp8BlockScaledMMLinearKernel, abc.ABC):
    """Chooses between two kernels by the number of rows, at run time.

    Subclasses name the classes and dispatch in ``apply_block_scaled_mm``.

    Attributes:
        base_type: Kernel for few rows.
        fallback_type: Kernel for many rows.

    """

    base_type: ClassVar[type[Fp8BlockScaledMMLinearKernel]]
    fallback_type: ClassVar[type[Fp8BlockScaledMMLinearKernel]]

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        self.base = self._make(self.base_type, config)
        self.fallback = self._make(self.fallback_type, config)

    def _make(
        self,
        kind: type[Fp8BlockScaledMMLinearKernel],
        config: FP8ScaledMMLinearLayerConfig,
    ) -> Fp8BlockScaledMMLinearKernel:
        """Construct a kernel that knows its dispatcher already while it is made."""
        kernel = kind.__new__(kind)
        kernel.dispatcher = self
        kind.__init__(kernel, config)
        return kernel

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        return cls._ask_both("is_supported", "is not supported", compute_capability)

    @classmethod
    def can_implement(
        cls, config: FP8ScaledMMLinearLayerConfig
    ) -> tuple[bool, str | None]:
        return cls._ask_both("can_implement", "cannot implement", config)

    @classmethod
    def _ask_both(
        cls, predicate: str, verb: str, argument: Any
    ) -> tuple[bool, str | None]:
        refusals = [
            f"{role} ({kernel.__name__}) {verb}: {reason}"
            for role, kernel in (
                ("base", cls.base_type),
                ("fallback", cls.fallback_type),
            )
            for accepted, reason in (getattr(kernel, predicate)(argument),)
            if not accepted
        ]
        return (False, "; ".join(refusals)) if refusals else (True, None)

    def first_fallback_row(self) -> int:
        """Return the least number of rows that goes to the fallback kernel."""
        return 1 if envs.VLLM_BATCH_INVARIANT else base_in_use().wrapper_first_row

    def deep_gemm_kernel(self) -> Fp8BlockScaledMMLinearKernel | None:
        return self.fallback.deep_gemm_kernel() or self.base.deep_gemm_kernel()
