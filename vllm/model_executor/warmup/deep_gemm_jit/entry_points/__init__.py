"""Decides which strategy builds the kernels of which entry point.

An entry point is a value of ``EntryPoint`` and a strategy in the table below, and
nothing else: the backend runs whatever stands here.
"""

from collections.abc import Mapping
from typing import Any

from ..spec import EntryPoint
from .einsum import Einsum
from .fused_moe import FlashInferFusedMoe
from .gemm import FlashInferGemm, PlainGemm
from .grouped import GroupedContiguousGemm
from .hc_prenorm import HcPrenormGemm
from .masked import MaskedGemm
from .mqa_logits import MqaLogits, PagedMqaLogits, PagedMqaMetadata
from .strategy import Shape, Strategy

__all__ = ["STRATEGIES", "Shape", "Strategy"]

STRATEGIES: Mapping[EntryPoint, Strategy[Any, Any, Any]] = {
    EntryPoint.FP8_GEMM_NT: PlainGemm(),
    EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS: GroupedContiguousGemm(),
    EntryPoint.FP8_M_GROUPED_GEMM_NT_MASKED: MaskedGemm(),
    EntryPoint.FP8_EINSUM: Einsum(),
    EntryPoint.TF32_HC_PRENORM_GEMM: HcPrenormGemm(),
    EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: FlashInferGemm(),
    EntryPoint.FLASHINFER_CUTLASS_FUSED_MOE: FlashInferFusedMoe(),
    EntryPoint.FP8_FP4_MQA_LOGITS: MqaLogits(),
    EntryPoint.FP8_FP4_PAGED_MQA_LOGITS: PagedMqaLogits(),
    EntryPoint.GET_PAGED_MQA_LOGITS_METADATA: PagedMqaMetadata(),
}
