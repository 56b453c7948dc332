"""vLLM 0.33.0.

Digests: computed from the files in the wheel named below. Its RECORD gives the
same values in base64. Versions: `Requires-Dist` of the wheel, `__version__` of
`vllm/third_party/deep_gemm`, and `Requires-Dist` of torch 2.14.0 for CUDA.
The wrapper's row count: `scaled_mm/flashinfer.py` compares `input.shape[0]` with it.
The experts' layout: `fused_moe/experts/deep_gemm_moe.py`, `DeepGemmExperts.apply`.
"""

from . import Base

_LINEAR = "model_executor/kernels/linear/scaled_mm"


def _experts_use_prefix_sum(activation: str, family: int, packs_scales: bool) -> bool:
    fused = activation in ("SILU", "SWIGLUOAI_UNINTERLEAVE")
    return fused and (family == 90 or (family == 100 and packs_scales))


BASE = Base(
    version="0.33.0",
    files={
        f"{_LINEAR}/BlockScaledMMLinearKernel.py": (
            "7ddf3bcf7db9a14dbd2512298d456e6dc941bb3952af7456caebbcbc20fb9b98"
        ),
        f"{_LINEAR}/deep_gemm.py": (
            "c382f001a9c34adf70fc1acd085f0bcf86eb467e435f35fd8f687736a49125b4"
        ),
        "model_executor/warmup/deep_gemm_warmup.py": (
            "a878c19295b0320ee5941c53c48d4d3587096de9db41936211fc1a9828d837bb"
        ),
    },
    wheel_sha256={
        "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl": (
            "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"
        ),
    },
    facts={
        "torch": "2.14.0",
        "flashinfer-python": "0.7.2.post1",
        "compressed-tensors": "0.17.0",
        "deep_gemm": "2.8.1",
        "cuda-toolkit": "13.0.3.0",
    },
    wrapper_first_row=32,
    experts_use_prefix_sum=_experts_use_prefix_sum,
)
