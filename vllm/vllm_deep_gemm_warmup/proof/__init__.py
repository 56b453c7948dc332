"""The proof: `vllm serve` on the stand-in, real requests, and a count of kernels."""
