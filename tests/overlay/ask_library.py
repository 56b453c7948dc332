"""Run on the stand-in: which compiler does the real DeepGEMM take, case by case?

    python ask_library.py CASES.json

Each case is a list of environment variables and a cache folder. It runs in a
forked child of one process that has imported the library and touched no device,
and prints one line of JSON: what the library did, and what `toolchain` foresaw.
"""

import json
import os
import sys
from pathlib import Path

import torch
import vllm.third_party.deep_gemm as deep_gemm
from vllm_deep_gemm_warmup import toolchain


def build_one_kernel() -> None:
    """One GEMM whose kernels are not in any cache."""
    m, n, k = 64, 256, 512
    fp8, device = torch.float8_e4m3fn, "cuda"
    a, b = (torch.empty(rows, k, dtype=fp8, device=device) for rows in (m, n))
    a_scale = torch.empty(m, k // 128, device=device)
    b_scale = torch.empty(n // 128, k // 128, device=device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out)


def run(case: dict[str, str]) -> dict[str, str]:
    """What the library used or said, and what was foreseen; paths as text."""
    for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER"):
        os.environ.pop(name, None)
    os.environ.update(case)
    if "CHOOSE" in case:
        os.environ.update(toolchain.variables(toolchain.read_facts()))
    found = toolchain.describe_current()
    unusable = isinstance(found, toolchain.Unusable)
    result = {"foreseen": str(found if unusable else found.nvcc)}
    try:
        build_one_kernel()
    except RuntimeError as error:
        return result | {"failed": str(error).splitlines()[0]}
    metas = sorted(Path(case["DG_JIT_CACHE_DIR"]).glob("cache/*/meta.json"))
    used = {json.loads(meta.read_text())["compiler_info"]["path"] for meta in metas}
    return result | {"used": ", ".join(sorted(used))}


def main() -> None:
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            print(json.dumps({"case": name} | run(case)), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
