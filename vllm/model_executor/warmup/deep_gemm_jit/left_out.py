"""Decides which functions of DeepGEMM that vLLM can call are not warmed, and why."""

from collections.abc import Mapping

_BLACKWELL = "for Blackwell only"
_NO_KERNEL = "without a kernel on Hopper"
_UNUSED = "not called by vLLM"

# Functions of ``vllm.utils.deep_gemm``; the others are in ``EntryPoint``.
LEFT_OUT: Mapping[str, str] = {
    "bf16_mega_gate": _BLACKWELL,
    "cublaslt_gemm_nt": _UNUSED,
    "fp8_fp4_paged_sparse_mqa_logits": _BLACKWELL,
    "fp8_fp4_sparse_mqa_logits": _BLACKWELL,
    "get_col_major_tma_aligned_tensor": _UNUSED,
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": _UNUSED,
    "get_mk_alignment_for_contiguous_layout": _NO_KERNEL,
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": _UNUSED,
    "get_num_sms": _NO_KERNEL,
    "get_paged_sparse_mqa_logits_metadata": _BLACKWELL,
    "get_sparse_mqa_logits_metadata": _BLACKWELL,
    "get_theoretical_mk_alignment_for_contiguous_layout": _NO_KERNEL,
    "has_deep_gemm_sparse_mqa": _NO_KERNEL,
    "m_grouped_fp8_fp4_gemm_nt_contiguous": _BLACKWELL,
    "mega_mhc": _BLACKWELL,
    "pack_ue8m0_to_int": _UNUSED,
    "set_mk_alignment_for_contiguous_layout": _NO_KERNEL,
    "set_num_sms": _NO_KERNEL,
    "transform_sf_into_required_layout": _NO_KERNEL,
}


def by_reason() -> dict[str, list[str]]:
    """Return the same functions, grouped by the reason."""
    groups: dict[str, list[str]] = {}
    for function, reason in LEFT_OUT.items():
        groups.setdefault(reason, []).append(function)
    return groups
