"""Decides which strategy builds the kernels of which entry point.

An entry point is a value of ``EntryPoint`` and a strategy in the table below, and
nothing else: the backend runs whatever stands here.
"""

from collections.abc import Mapping
from typing import Any

from ..spec import EntryPoint
from .gemm import FlashInferGemm, PlainGemm
from .grouped import GroupedContiguousGemm
from .mqa_logits import MqaLogits, PagedMqaLogits, PagedMqaMetadata
from .strategy import Shape, Strategy

__all__ = ["STRATEGIES", "Shape", "Strategy"]

STRATEGIES: Mapping[EntryPoint, Strategy[Any, Any, Any]] = {
    EntryPoint.FP8_GEMM_NT: PlainGemm(),
    EntryPoint.M_GROUPED_FP8_GEMM_NT_CONTIGUOUS: GroupedContiguousGemm(),
    EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM: FlashInferGemm(),
    EntryPoint.FP8_FP4_MQA_LOGITS: MqaLogits(),
    EntryPoint.FP8_FP4_PAGED_MQA_LOGITS: PagedMqaLogits(),
    EntryPoint.GET_PAGED_MQA_LOGITS_METADATA: PagedMqaMetadata(),
}
