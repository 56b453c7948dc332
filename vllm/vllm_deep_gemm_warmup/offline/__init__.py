"""Kernels of a model that is served elsewhere: planned, built, checked and packed here.

`ask` has the real vLLM say what it will run. `manifest` says what a folder of kernels
holds and for what, `archive` makes one file of it. Every other file is a verb of
`vllm-deep-gemm`.
"""
