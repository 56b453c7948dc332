"""Run on the stand-in: what does the real DeepGEMM do with a cache, case by case?

    python call_library.py BASE LOG

Fills the cache folder BASE with a compiler that writes LOG. Each case then is a copy
of it, damaged by one of `DAMAGE`, and perhaps put in order by us; a forked child makes
the same call with it and prints one line of JSON: how often a compiler ran, and what
failed.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import vllm.third_party.deep_gemm as deep_gemm
from vllm_deep_gemm_warmup import cache_care, cache_place, kernel_caches, toolchain
from vllm_deep_gemm_warmup.compiling.environment import compiler_text
from vllm_deep_gemm_warmup.toolchain import recorded


def become_file(entry: Path) -> None:
    """Leave an empty file in its place."""
    shutil.rmtree(entry)
    entry.write_text("")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "none": lambda entry: None,
    "no marker": lambda entry: (entry / ".committed").unlink(),
    "no kernel": lambda entry: (entry / "kernel.cubin").unlink(),
    "empty kernel": lambda entry: (entry / "kernel.cubin").write_bytes(b""),
    "no entry": shutil.rmtree,
    "a file": become_file,
}


def call() -> None:
    """One GEMM."""
    m, n, k = 64, 256, 512
    fp8, device = torch.float8_e4m3fn, "cuda"
    a, b = (torch.empty(rows, k, dtype=fp8, device=device) for rows in (m, n))
    a_scale = torch.empty(m, k // 128, device=device)
    b_scale = torch.empty(n // 128, k // 128, device=device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), out, disable_ue8m0_cast=True)


def run(root: Path, log: Path, **variables: str) -> dict[str, object]:
    """Make the call in a child, with a compiler that keeps a log."""
    log.write_text("")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ.update(variables, DG_JIT_CACHE_DIR=str(root))
        try:
            call()
            said = ""
        except RuntimeError as error:
            said = str(error).splitlines()[0]
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return {"failed": answer.read(), "compiled": log.read_text().count("compile")}


def main() -> None:
    base, log = Path(sys.argv[1]), Path(sys.argv[2])
    print(json.dumps({"case": "fill"} | run(base, log)))
    for number, (kind, damage) in enumerate(DAMAGE.items()):
        for ours in (False, True):
            root = base.with_name(f"case-{number}-{ours}")
            shutil.copytree(base, root)
            damage(next((root / "cache").glob("sm90_*")))
            if ours:
                cache_care.mend(kernel_caches.deep_gemm(root))
            done = run(root, log)
            again = run(root, log)["compiled"]
            line = {"case": kind, "ours": ours, **done, "again": again}
            print(json.dumps(line), flush=True)
    # As for a folder that is read-only.
    full = base.with_name("links")
    for folder in ("cache", "tmp"):
        (full / folder).mkdir(parents=True)
    made = kernel_caches.deep_gemm
    cache_place._link_entries(made(base), made(full))
    print(json.dumps({"case": "links", "ours": True, **run(full, log)}), flush=True)
    # As on a host without a compiler, and the same where a kernel is missing.
    compiler = toolchain.describe_current()
    recorded.record(base, compiler_text(compiler.nvcc))
    program = str(base / recorded.FOLDER / "nvcc")
    for kind in ("none", "no entry"):
        DAMAGE[kind](next((base / "cache").glob("sm90_*")))
        done = run(base, log, DG_JIT_NVCC_COMPILER=program)
        print(json.dumps({"case": f"recorded, {kind}", "ours": True, **done}))


if __name__ == "__main__":
    main()
