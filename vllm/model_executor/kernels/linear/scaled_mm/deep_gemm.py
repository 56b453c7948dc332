"""The DeepGEMM linear kernel: runs block-FP8 GEMMs and says which ones.

Why: the warmup must not guess which layers run on DeepGEMM; the kernel knows.
How: after loading, the kernel stamps itself on the layer and describes its GEMMs
    as specs; a toolchain or library that cannot work is a reason not to be
    selected, before any weight is loaded.
Upstream: vllm-project/vllm#56452 (deep_gemm_warmup_provider).
Removal: when the base's own kernel describes its GEMMs and checks the compiler.
"""

from typing import Any

import torch
import vllm.envs as envs
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    deepgemm_post_process_fp8_weight_block,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.utils import replace_parameter
from vllm.model_executor.warmup.deep_gemm_jit import ahead, engine, monitor
from vllm.model_executor.warmup.deep_gemm_jit.calls import describe_failure
from vllm.model_executor.warmup.deep_gemm_jit.jit_config import read_jit_config
from vllm.model_executor.warmup.deep_gemm_jit.library import (
    library_problem,
    packs_scales,
)
from vllm.model_executor.warmup.deep_gemm_jit.provider import (
    PROVIDER_ATTRIBUTE,
    Rejected,
)
from vllm.model_executor.warmup.deep_gemm_jit.spec import (
    EinsumSpec,
    EntryPoint,
    GemmSpec,
    RowRange,
    ScaleLayout,
    TensorLayout,
)
from vllm.platforms import current_platform
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm.utils.deep_gemm import (
    is_deep_gemm_e8m0_used,
    is_deep_gemm_supported,
    should_auto_disable_deep_gemm,
    should_use_deepgemm_for_fp8_linear,
)
from vllm.utils.torch_utils import direct_register_custom_op

from .BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)

__all__ = ["DeepGemmFp8BlockScaledMMKernel", "fp8_gemm_nt"]

logger = init_logger(__name__)

_BLOCK_SHAPE = (128, 128)
_ALIGNED = ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED


def shape_problem(shape: tuple[int, int]) -> str | None:
    """Return why DeepGEMM does not take a weight of ``shape`` (N, K), or None.

    Raises:
        TypeError: Given a tensor in place of its shape.

    """
    if isinstance(shape, torch.Tensor):
        raise TypeError(
            f"weight shape (tensor {tuple(shape.shape)}): expected (N, K), got a "
            "tensor; pass tensor.shape"
        )
    if should_use_deepgemm_for_fp8_linear(torch.bfloat16, shape, True):
        return None
    n, k = shape
    return (
        f"does not take N={n} K={k}: N must be a multiple of 64 and K of 128 "
        "(vllm.utils.deep_gemm)"
    )


class DeepGemmFp8BlockScaledMMKernel(Fp8BlockScaledMMLinearKernel):
    """Block-FP8 linear layers with 128x128 blocks on DeepGEMM.

    Attributes:
        is_loaded: A layer's weights have been brought into this kernel's form.

    """

    is_loaded = False

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        self.is_deep_gemm_supported = is_deep_gemm_supported()
        self.use_deep_gemm_e8m0 = is_deep_gemm_e8m0_used()
        self.quant_fp8 = QuantFP8(
            static=False,
            group_shape=config.activation_quant_key.scale.group_shape,
            column_major_scales=True,
            tma_aligned_scales=envs.VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES,
            use_ue8m0=self.use_deep_gemm_e8m0,
        )
        self._quant_enabled = self.quant_fp8.enabled()
        compilation = get_current_vllm_config().compilation_config
        self._activation_fused = (
            compilation.mode == CompilationMode.VLLM_COMPILE
            and compilation.pass_config.fuse_act_quant
        )
        # Last, since it is asked at once what it will run.
        if self.vllm_config is not None:
            engine.expect(self, self.vllm_config)
            ahead.announce(self.specs_before_loading, self.vllm_config)

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        if not current_platform.is_cuda():
            return False, "needs a CUDA platform"
        if not (current_platform.support_deep_gemm() and envs.VLLM_USE_DEEP_GEMM):
            return False, (
                "needs a Hopper or Blackwell GPU and VLLM_USE_DEEP_GEMM not set to 0"
            )
        problem = library_problem()
        if problem is None and not is_deep_gemm_supported():
            problem = "vLLM found no deep_gemm library that works (its log says why)"
        if problem is not None:
            logger.warning_once("DeepGEMM is not used: %s", problem, scope="local")
        return problem is None, problem

    @classmethod
    def can_implement(
        cls, config: FP8ScaledMMLinearLayerConfig
    ) -> tuple[bool, str | None]:
        accepted, reason = super().can_implement(config)
        if not accepted:
            return False, reason
        if config.out_dtype != torch.bfloat16:
            return False, f"writes bfloat16 only, not {config.out_dtype}"
        group_shape = config.activation_quant_key.scale.group_shape
        if group_shape != GroupShape(1, 128):
            return False, (
                "takes activations with one scale per token and 128 columns only, "
                f"not {group_shape}"
            )
        block = config.weight_quant_key.scale.group_shape
        if (block.row, block.col) != _BLOCK_SHAPE:
            return False, (
                f"takes weights in 128x128 blocks only, not {block.row}x{block.col}"
            )
        problem = shape_problem(config.weight_shape)
        if problem is not None:
            return False, problem
        engine_config = get_current_vllm_config()
        if engine_config.model_config is None:
            return False, "needs a model config"
        hf_config = engine_config.model_config.hf_text_config
        model_type = getattr(hf_config, "model_type", None)
        if should_auto_disable_deep_gemm(model_type):
            return False, f"is switched off for model type {model_type} on this GPU"
        if getattr(engine_config.quant_config, "use_deep_gemm", None) is False:
            return False, "is switched off by the quantization config (use_deep_gemm)"
        return True, None

    def deep_gemm_kernel(self) -> Fp8BlockScaledMMLinearKernel:
        return self

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Convert the weights, then stamp the layer with this kernel.

        Args:
            layer: Holds weight (N, K) float8_e4m3fn and its block scale. One that
                runs through ``fp8_einsum`` (``is_bmm``) holds (h, N / h, K) after.

        Raises:
            ValueError: The layer has no block shape, or its scale does not fit.

        """
        block_shape = getattr(layer, "weight_block_size", None)
        params = self._get_layer_params(layer)
        if block_shape is None:
            raise ValueError(
                f"weights of {params.layer_name} (weight {tuple(params.weight.shape)})"
                ": the layer has no weight_block_size; set it in create_weights"
            )
        block_shape = tuple(block_shape)
        is_bmm = getattr(layer, "is_bmm", False)
        params.check_block_scale(block_shape)
        super().process_weights_after_loading(layer)
        params = self._get_layer_params(layer)
        if self.is_deep_gemm_supported:
            weight, scale = deepgemm_post_process_fp8_weight_block(
                wq=params.weight,
                ws=params.block_scale,
                quant_block_shape=block_shape,
                use_e8m0=self.use_deep_gemm_e8m0,
                is_bmm=is_bmm,
                bmm_batch_size=getattr(layer, "bmm_batch_size", 0),
            )
            replace_parameter(layer, params.WEIGHT, weight)
            replace_parameter(layer, params.block_scale_attr, scale)
        setattr(layer, PROVIDER_ATTRIBUTE, self)
        self.is_loaded = True
        # Here, since a start that skips the warmup has no later call of ours.
        monitor.install(read_jit_config(self.vllm_config))

    def get_deep_gemm_warmup_weights(
        self, layer: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight (N, K) float8_e4m3fn and block scale, as serving has them.

        That of an ``is_bmm`` layer is (h, N, K).

        Raises:
            ValueError: The layer has no block scale.

        """
        params = self._get_layer_params(layer)
        return params.weight, params.block_scale

    def get_deep_gemm_warmup_entry_points(
        self, layer: torch.nn.Module
    ) -> tuple[EntryPoint, ...]:
        """Return what serving runs for ``layer``, whatever its shape."""
        if getattr(layer, "is_bmm", False):
            return (EntryPoint.FP8_EINSUM,)
        if self._first_row() > 1:
            return (
                EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM,
                EntryPoint.FP8_GEMM_NT,
            )
        return (EntryPoint.FP8_GEMM_NT,)

    def get_deep_gemm_warmup_specs(
        self, layer: torch.nn.Module, max_tokens: int
    ) -> list[GemmSpec] | Rejected:
        """Return the GEMMs that serving runs for ``layer``.

        Args:
            layer: Loaded and stamped.
            max_tokens: Most rows that one step can send.

        """
        block_shape = tuple(getattr(layer, "weight_block_size", None) or ())
        if block_shape != _BLOCK_SHAPE:
            return Rejected(f"block size {list(block_shape)} is not [128, 128]")
        weight, scale = self.get_deep_gemm_warmup_weights(layer)
        if getattr(layer, "is_bmm", False):
            return [self._einsum_spec(weight, scale, max_tokens)]
        if weight.ndim != 2:
            return Rejected(f"weight {tuple(weight.shape)} is not a matrix")
        if scale.ndim != 2:
            return Rejected(f"block scale {tuple(scale.shape)} is not a matrix")
        problem = shape_problem((weight.shape[0], weight.shape[1]))
        if problem is not None:
            return Rejected(f"DeepGEMM {problem}")
        shape = weight.shape[0], weight.shape[1]
        return self._specs(shape, TensorLayout.of(scale), max_tokens)

    def specs_before_loading(self, max_tokens: int) -> list[GemmSpec]:
        """Return the specs of a plain GEMM that loading will confirm.

        The layer is not known yet: one that turns out to run through ``fp8_einsum``
        has these for nothing. Where the form of a scale is known only when it is
        loaded, on Blackwell, there are none.

        Args:
            max_tokens: Most rows that one step can send.

        """
        if packs_scales():
            return []
        n, k = self.config.weight_shape
        rows, columns = -(-n // _BLOCK_SHAPE[0]), k // _BLOCK_SHAPE[1]
        scale = TensorLayout((rows, columns), (columns, 1), "float32")
        return self._specs((n, k), scale, max_tokens)

    def _specs(
        self, shape: tuple[int, int], scale: TensorLayout, max_tokens: int
    ) -> list[GemmSpec]:
        first = self._first_row()
        calls = [
            (EntryPoint.FP8_GEMM_NT, RowRange(first, max_tokens), layout)
            for layout in self._activation_scale_layouts()
        ]
        if self._activation_fused and calls[0][2] is _ALIGNED:
            # The operator that the compiler fuses with SiLU knows no alignment
            # (act_quant_fusion.py of the base). For one row alone that is another
            # layout, which DeepGEMM changes by a kernel of its own.
            one = (EntryPoint.FP8_GEMM_NT, RowRange(1, 1), ScaleLayout.COLUMN_MAJOR)
            calls.append(one)
        if first > 1:
            few = RowRange(1, min(first - 1, max_tokens))
            entry_point = EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM
            calls.insert(0, (entry_point, few, ScaleLayout.NONE))
        return [
            GemmSpec(
                entry_point=entry_point,
                n=shape[0],
                k=shape[1],
                groups=1,
                rows=rows,
                weight_scale=scale,
                activation_scale=layout,
                ue8m0_cast=self.use_deep_gemm_e8m0,
            )
            for entry_point, rows, layout in calls
            if rows
        ]

    def _first_row(self) -> int:
        """Return the least number of rows that comes to this kernel."""
        return 1 if self.dispatcher is None else self.dispatcher.first_fallback_row()

    def _einsum_spec(
        self, weight: torch.Tensor, scale: torch.Tensor, max_tokens: int
    ) -> EinsumSpec:
        """Return what ``deep_gemm_fp8_o_proj`` of the base runs: all rows, always.

        The recipe is that of its ``compute_fp8_einsum_recipe``; the scale of A is
        one for each row and 128 columns under either.
        """
        packed = packs_scales()
        groups, n, k = weight.shape
        return EinsumSpec(
            entry_point=EntryPoint.FP8_EINSUM,
            n=n,
            k=k,
            groups=groups,
            rows=RowRange(1, max_tokens),
            weight_scale=TensorLayout.of(scale),
            activation_scale=ScaleLayout.PACKED_UE8M0
            if packed
            else ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED,
            ue8m0_cast=self.use_deep_gemm_e8m0,
            recipe=(1, 1, 128) if packed else (1, 128, 128),
        )

    def _activation_scale_layouts(self) -> list[ScaleLayout]:
        if packs_scales():
            return [ScaleLayout.PACKED_UE8M0]
        # The wrapper quantizes by itself and does not ask for TMA alignment.
        if self.dispatcher is not None or not self.quant_fp8.tma_aligned_scales:
            return [ScaleLayout.COLUMN_MAJOR]
        if self._quant_enabled:
            return [ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED]
        # The compiler may replace the quantization operator by PyTorch code,
        # which knows no alignment.
        return [ScaleLayout.COLUMN_MAJOR_TMA_ALIGNED, ScaleLayout.COLUMN_MAJOR]

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        As: torch.Tensor,
        Bs: torch.Tensor,
    ) -> torch.Tensor:
        output = A.new_empty((A.shape[0], B.shape[0]), dtype=self.config.out_dtype)
        torch.ops.vllm.fp8_gemm_nt_op(A, As, B, Bs, output, self.use_deep_gemm_e8m0)
        return output


def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    **options: Any,
) -> None:
    """Run DeepGEMM's ``fp8_gemm_nt`` and name the GEMM if it fails.

    Args:
        a: float8_e4m3fn (M, K) and its scale.
        b: float8_e4m3fn (N, K) and its block scale.
        d: Output, bfloat16 (M, N).
        options: Passed on (``is_deep_gemm_e8m0_used`` among them).

    Raises:
        ValueError: DeepGEMM failed over a scale that is packed, where this GPU
            takes float32 scales only.
        RuntimeError: DeepGEMM failed, most often because it could not build the
            kernel.

    """
    ahead.wait_once()
    try:
        deep_gemm_utils.fp8_gemm_nt(a, b, d, **options)
    except (
        torch.OutOfMemoryError,
        torch.AcceleratorError,
        monitor.BuiltAfterReadyError,
    ):
        raise
    # What is left comes from DeepGEMM's host side: its compiler, or an assertion.
    except RuntimeError as error:
        problem = _scale_problem(a, b)
        if problem is not None:
            raise ValueError(problem) from error
        m, k = a[0].shape
        raise RuntimeError(
            f"DeepGEMM GEMM (fp8_gemm_nt N={b[0].shape[0]} K={k}, M={m}): "
            f"{describe_failure(error)}; check the CUDA compiler "
            "(DG_JIT_PRINT_COMPILER_COMMAND=1 shows its command) or set "
            "VLLM_USE_DEEP_GEMM=0"
        ) from error


def _scale_problem(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> str | None:
    for name, (values, scale) in (("activation", a), ("weight", b)):
        if scale.dtype == torch.int32 and not packs_scales():
            return (
                f"{name} scale (int32 {tuple(scale.shape)} of {tuple(values.shape)}): "
                "packed UE8M0 scales are Blackwell's, this GPU takes float32 (rows, "
                "K / 128); quantize with use_ue8m0 unpacked"
            )
    return None


def _run(
    q_input: torch.Tensor,
    input_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    output: torch.Tensor,
    use_deep_gemm_e8m0: bool,
) -> None:
    """The operator's body; its schema is read from these names and types."""
    operands = (q_input, input_scale), (weight, weight_scale)
    fp8_gemm_nt(*operands, output, is_deep_gemm_e8m0_used=use_deep_gemm_e8m0)


direct_register_custom_op("fp8_gemm_nt_op", _run, mutates_args=["output"])
