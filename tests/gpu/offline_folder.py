"""Run on the stand-in: make a folder as `compile` leaves it, without vLLM.

    offline_folder.py ROOT LIBRARY NVCC

The library builds the kernels of ``GEMMS`` into ROOT, for which DG_JIT_CACHE_DIR has
to be set, with NVCC, a declared fake.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from call_gemms import load_library, make_calls  # type: ignore[import-not-found]
from gemm_specs import GEMMS  # type: ignore[import-not-found]
from vllm_deep_gemm_warmup.compiling.kernel import Kernel, Places
from vllm_deep_gemm_warmup.compiling.store import Context, PlanStore
from vllm_deep_gemm_warmup.kernel_caches import FOLDER, KernelCache, deep_gemm
from vllm_deep_gemm_warmup.offline.manifest import Manifest, cubin_digest
from vllm_deep_gemm_warmup.proof import fake_nvcc

SM_COUNT = 132


def make_folder(root: Path, library: Path, nvcc: Path) -> None:
    """Fill ``root`` with the kernels of ``GEMMS``, their plan and a manifest."""
    cache, known = deep_gemm(root), frozenset[str]()
    context = Context(9, 0, SM_COUNT, "", fake_nvcc.VERSION, (), False)
    plans = PlanStore(root / FOLDER, context)
    loaded = load_library(library)
    for spec, shapes in GEMMS:
        fill(loaded, spec, shapes)
        new = sorted(cache.entries() - known)
        known |= set(new)
        # Which of the calls takes a kernel does not matter here: all are made.
        texts = [json.dumps(shape) for shape in shapes] * len(new)
        made = [
            read_kernel(cache, entry, library, nvcc, text)
            for entry, text in zip(new, texts, strict=False)
        ]
        plans.save(spec, tuple(made))
    Manifest(
        model="a model", arguments=(), device="h100", target="sm90-132sm",
        versions={}, library="", compiler=fake_nvcc.VERSION, variables={},
        specs=len(GEMMS), kernels={e: cubin_digest(cache, e) for e in sorted(known)},
    ).write(root)  # fmt: skip


def fill(library: Any, spec: Mapping[str, Any], shapes: list[dict[str, int]]) -> None:
    """Have the library build the kernels of these calls and of all others."""

    def tell(**event: Any) -> None:
        assert "failure" not in event and "not_called" not in event, event

    gemms = [{"spec": spec, "shapes": shapes}]
    make_calls(library, {"gemms": gemms, "check": False, "stride": 1}, tell)


def read_kernel(
    cache: KernelCache, entry: str, library: Path, nvcc: Path, shape: str
) -> Kernel:
    """The entry as a plan holds it, without the paths of the build."""
    folder = cache.folder / entry
    meta = (folder / "meta.json").read_text()
    words = shlex.split(json.loads(meta)["command"])
    built_in = Path(next(word for word in words if word.endswith("kernel.cu"))).parent
    record = Places(nvcc, built_in, library).take_out(meta)
    return Kernel(entry, (folder / "kernel.cu").read_text(), record, shape)


if __name__ == "__main__":
    make_folder(*map(Path, sys.argv[1:]))
