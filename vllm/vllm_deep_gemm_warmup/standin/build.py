"""Decides when the stand-in is built: from its C source, once per content."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import generate

SOURCE = Path(__file__).resolve().parent / "csrc"
FLAGS = (
    "-O1",
    "-fPIC",
    "-shared",
    "-std=gnu11",
    "-Wall",
    "-Wno-deprecated-declarations",
)
_MATHEMATICS = (
    "cublas_api.h",
    "cublas_v2.h",
    "cublasLt.h",
    "cusolverDn.h",
    "cusolverSp.h",
    "cusolver_common.h",
    "cusparse.h",
    "cufft.h",
    "cufftXt.h",
    "curand.h",
)
_CUDA = ("cuda.h", "cuda_runtime_api.h", "driver_types.h")


class BuildError(RuntimeError):
    """The stand-in cannot be built here; the message says what is missing."""


@dataclass(frozen=True)
class Headers:
    """Folders with CUDA's, NCCL's and cuDNN's headers."""

    cuda: Path
    nccl: Path
    cudnn: Path | None

    @property
    def include_flags(self) -> list[str]:
        """For the compiler."""
        return [f"-I{self.cuda}", f"-I{self.nccl}"]


def find_headers(search: Iterable[str], environ: Mapping[str, str]) -> Headers:
    """The headers that the packages of an interpreter's ``sys.path`` brought.

    Raises:
        BuildError: no folder has them.
    """
    roots = [Path(entry) / "nvidia" for entry in search if entry]
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda"]
    cuda = [root / "cu13" / "include" for root in roots]
    cuda += [Path(home) / "include" for home in homes if home]
    nccl = [root / "nccl" / "include" for root in roots]
    cudnn = [root / "cudnn" / "include" for root in roots]
    found = _first(cuda, "cublasLt.h", *_CUDA)
    found_nccl = _first(nccl, "nccl.h")
    if found is None or found_nccl is None:
        missing = "cuda.h and cublasLt.h" if found is None else "nccl.h"
        raise BuildError(
            f"stand-in device: no {missing} beside this interpreter's packages; "
            "install the base (vllm, torch and the nvidia packages they bring)"
        )
    return Headers(found, found_nccl, _first(cudnn, "cudnn.h"))


def _first(folders: Iterable[Path], *names: str) -> Path | None:
    for folder in folders:
        if all((folder / name).is_file() for name in names):
            return folder
    return None


def default_root(environ: Mapping[str, str]) -> Path:
    """Where built libraries are kept: ``STANDIN_GPU_BUILD_DIR`` or the user's cache."""
    chosen = environ.get("STANDIN_GPU_BUILD_DIR")
    if chosen:
        return Path(chosen)
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-deep-gemm-warmup" / "standin"


def _generated(headers: Headers) -> dict[str, str]:
    cuda, runtime, types = ((headers.cuda / name).read_text() for name in _CUDA)
    mathematics = generate.read_all(headers.cuda, _MATHEMATICS)
    if headers.cudnn:
        names = sorted(path.name for path in headers.cudnn.glob("cudnn_*_v9.h"))
        mathematics += generate.read_all(headers.cudnn, names)
    return {
        "declared.c": generate.declared_source(cuda, runtime, types),
        "mathematics.c": generate.mathematics_source(mathematics),
        "collectives.c": generate.collective_source(
            (headers.nccl / "nccl.h").read_text()
        ),
    }


def _sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(SOURCE.glob("*.[ch]"))}


def content_hash(sources: Mapping[str, str], compiler: str) -> str:
    """Names a build by everything that goes into it."""
    digest = hashlib.sha256(" ".join((compiler, *FLAGS)).encode())
    for name in sorted(sources):
        digest.update(f"\0{name}\0{sources[name]}".encode())
    return digest.hexdigest()[:24]


def find_compiler(environ: Mapping[str, str]) -> str:
    """The C compiler: ``CC``, ``cc`` or ``gcc``.

    Raises:
        BuildError: there is none.
    """
    path = environ.get("PATH", os.defpath)
    for name in (environ.get("CC"), "cc", "gcc"):
        if name and shutil.which(name, path=path):
            return name
    raise BuildError(
        "stand-in device: no C compiler (cc) on PATH; "
        "install one (Debian: apt-get install gcc g++)"
    )


def ensure(
    environ: Mapping[str, str] = os.environ,
    search: Iterable[str] = sys.path,
    root: Path | None = None,
) -> Path:
    """The folder with the built libraries, built now if it was not there.

    Several processes may ask at once: each builds in a folder of its own and publishes
    by rename; a loser uses the winner's.

    Raises:
        BuildError: no compiler, no headers, or the compiler failed.
    """
    root = root or default_root(environ)
    if set(" :;") & set(str(root)):
        raise BuildError(
            f"stand-in device ({root}): the loader splits paths at spaces and colons; "
            "name another folder in STANDIN_GPU_BUILD_DIR"
        )
    compiler = find_compiler(environ)
    headers = find_headers(search, environ)
    sources = _sources() | _generated(headers)
    target = root / content_hash(sources, compiler)
    if (target / "libcuda.so.1").is_file():
        return target
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=root))
    try:
        work.chmod(0o755)
        _build(work, sources, headers, compiler, environ)
        try:
            work.rename(target)
        except OSError:
            if not (target / "libcuda.so.1").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _build(
    work: Path,
    sources: Mapping[str, str],
    headers: Headers,
    compiler: str,
    environ: Mapping[str, str],
) -> None:
    source = work / "src"
    source.mkdir()
    for name, text in sources.items():
        (source / name).write_text(text)
    collectives = ("nccl.c", "collectives.c")
    device = sorted(n for n in sources if n.endswith(".c") and n not in collectives)

    def link(output: str, names: Iterable[str], *flags: str) -> None:
        command = [compiler, *FLAGS, *headers.include_flags, f"-Wl,-soname,{output}"]
        command += ["-o", str(work / output), *(str(source / n) for n in names), *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, env=dict(environ)
        )
        if done.returncode != 0:
            raise BuildError(
                f"stand-in device ({output}): {compiler} failed: {done.stderr.strip()}"
            )

    link("libcuda.so.1", device, "-ldl", "-lpthread")
    # NVML's functions live in the one library, which a look-up reaches as a dependency.
    link("libnvidia-ml.so.1", (), "-Wl,--no-as-needed", str(work / "libcuda.so.1"))
    link("libstandin_nccl.so", collectives)
    for name in ("libcuda.so", "libnvidia-ml.so"):
        (work / name).symlink_to(f"{name}.1")
    shutil.rmtree(source)
