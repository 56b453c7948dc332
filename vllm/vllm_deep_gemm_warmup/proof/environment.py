"""Decides a server's environment: its private caches, its device, and its nvcc."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_deep_gemm_warmup.proof import fake_nvcc
from vllm_deep_gemm_warmup.proof.settings import REAL, Settings, UsageError


@dataclass(frozen=True)
class Caches:
    """The folders one server may write to; ``scratch`` goes when the server does.

    ``sockets`` is its folder for temporary files, sockets of vLLM and PyTorch among
    them; see ``socket_folder``.
    ``kernels`` belongs to one side (stock or ours) and one kind of nvcc, which the
    names of FlashInfer's kernels do not tell. ``other`` belongs to one side: vLLM's
    compile cache looks at source text. ``flashinfer`` holds what is the same for all.
    """

    kernels: Path
    other: Path
    flashinfer: Path
    scratch: Path
    sockets: Path

    @property
    def deep_gemm(self) -> Path:
        """DeepGEMM's compiled kernels."""
        return self.kernels / "deep_gemm"

    @property
    def flashinfer_deep_gemm(self) -> Path:
        """The kernels that FlashInfer's DeepGEMM compiles for fewer than 32 rows."""
        return self.kernels / "flashinfer_deep_gemm"

    @property
    def report(self) -> Path:
        """The JSON report of the warmup."""
        return self.scratch / "report.json"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a folder with a short path, which goes at the end.

    A socket's path holds 107 characters, and this machine's TMPDIR can be longer:
    PyTorch's symmetric memory then ends the process with SIGSEGV.
    """
    with tempfile.TemporaryDirectory(
        prefix="vllm-", dir="/tmp", ignore_cleanup_errors=True
    ) as name:
        yield Path(name)


def caches(settings: Settings, scratch: Path, sockets: Path) -> Caches:
    """Return a run's cache folders, in ``scratch`` unless they are to be kept."""
    kept = (settings.keep_cache or scratch / "cache").resolve()
    other = (settings.other_caches or kept).resolve()
    return Caches(
        kernels=kept / f"{settings.side}-{settings.nvcc}-nvcc",
        other=other / settings.side,
        flashinfer=other / "flashinfer",
        scratch=scratch,
        sockets=sockets,
    )


def make_folder(folder: Path) -> None:
    """Make a folder that will be written to.

    Raises:
        UsageError: it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Root passes every check of rights, and a read-only disk refuses root too.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"folder ({folder}): {error.strerror}; name one that can be written"
        ) from error


def _own(settings: Settings, where: Caches) -> dict[str, str]:
    values = {
        "VLLM_CACHE_ROOT": where.other / "vllm",
        "DG_JIT_CACHE_DIR": where.deep_gemm,
        "TRTLLM_DG_CACHE_DIR": where.flashinfer_deep_gemm,
        "TRITON_CACHE_DIR": where.other / "triton",
        "TORCHINDUCTOR_CACHE_DIR": where.other / "inductor",
        "HUMMING_CACHE_DIR": where.other / "humming",
        "TILELANG_CACHE_DIR": where.other / "tilelang",
        "TILELANG_TMP_DIR": where.other / "tilelang" / "tmp",
        "XDG_CACHE_HOME": where.other / "more",
        "FLASHINFER_WORKSPACE_BASE": where.flashinfer,
        "TMPDIR": where.sockets,
        "VLLM_RPC_BASE_PATH": where.sockets,
    }
    for folder in values.values():
        make_folder(folder)
    values["VLLM_DEEP_GEMM_WARMUP_REPORT"] = where.report
    switches = {
        "VLLM_DEEP_GEMM_OVERLAY": "0" if settings.stock else "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if settings.runner == "v2" else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Two more interpreters with torch at every start, for a kernel not used here.
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    }
    if settings.kernel == "deep_gemm":
        switches["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] = "0"
    return {name: str(path) for name, path in values.items()} | switches


def server_environment(
    settings: Settings, where: Caches, base_env: Mapping[str, str]
) -> dict[str, str]:
    """Return the complete environment of the server, and make its cache folders.

    On the overlay side with the real nvcc the toolchain is left for the product to
    find. On the stock side, and beside the fake (which cannot build FlashInfer's own
    module), it is found here, the same way.

    Raises:
        UsageError: the stand-in cannot be had as asked for.
    """
    base_env = dict(base_env) | dict(settings.environment)
    environ = dict(base_env)
    if settings.device != REAL:
        from vllm_deep_gemm_warmup import standin

        try:
            environ = standin.environment(
                settings.device, devices=settings.ranks, base_env=base_env
            )
        # An unknown device, a real driver, no C compiler: the message says which.
        except (ValueError, RuntimeError) as error:
            raise UsageError(str(error)) from error
    # Last: the stand-in's own build belongs to the user's cache, not to one run's.
    environ |= _own(settings, where)
    if settings.stock or settings.nvcc == "fake":
        from vllm_deep_gemm_warmup import toolchain

        environ |= toolchain.variables(toolchain.read_facts(environ))
    if settings.nvcc == "fake":
        program = str(fake_nvcc.install(where.scratch / "fake"))
        environ |= {
            "DG_JIT_NVCC_COMPILER": program,
            "TRTLLM_DG_NVCC_COMPILER": program,
        }
    return environ
