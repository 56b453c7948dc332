"""Decides what the processes that plan and build are told of this machine."""

import functools
import hashlib
import pathlib

from vllm_deep_gemm_warmup import kernel_caches, toolchain
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.cpus import available_cpus
from vllm_deep_gemm_warmup.compiling.environment import (
    Unplannable,
    compiler_text,
    deciding_variables,
    process_group,
)
from vllm_deep_gemm_warmup.compiling.store import Context
from vllm_deep_gemm_warmup.kernel_caches import FOLDER
from vllm_deep_gemm_warmup.settings import Settings

from .spec import Target

__all__ = ["Unplannable", "read_config"]


def read_config(target: Target, settings: Settings) -> Config:
    """Read what planning and building needs; the library is imported by now.

    Args:
        target: What the kernels are for.
        settings: The operator's.

    Raises:
        Unplannable: It is switched off, or kernels cannot be built apart from the
            library; the message says why.

    """
    if settings.workers == 0:
        raise Unplannable("it is switched off")
    compiler = toolchain.describe_current()
    if isinstance(compiler, toolchain.Unusable):
        raise Unplannable(str(compiler))
    library = _library()
    root = kernel_caches.deep_gemm_root().absolute()
    context = Context(
        major=target.major,
        minor=target.minor,
        sm_count=target.sm_count,
        library=_digest(library),
        compiler=compiler_text(compiler.nvcc),
        variables=deciding_variables(),
        every_row=settings.every_row,
    )
    return Config(
        context=context,
        root=root,
        work=root / FOLDER,
        nvcc=compiler.nvcc,
        library=library,
        workers=settings.workers or available_cpus(),
        limit=float(settings.nvcc_limit),
        group=process_group(),
    )


def _library() -> pathlib.Path:
    from vllm.utils.deep_gemm import _import_deep_gemm

    module = _import_deep_gemm()
    if module is None or not module.__file__:
        raise Unplannable("there is no DeepGEMM library")
    return pathlib.Path(module.__file__).parent


@functools.cache
def _digest(library: pathlib.Path) -> str:
    """Digest of what selects kernels and what they are compiled from.

    CUTLASS, which is large, has its version in the key of each kernel.
    """
    digest = hashlib.sha256()
    headers = library / "include" / "deep_gemm"
    for path in sorted([*library.glob("*.so"), *headers.rglob("*.*")]):
        if path.is_file():
            digest.update(f"{path.relative_to(library)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
