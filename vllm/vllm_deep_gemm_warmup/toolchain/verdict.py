"""Decides what is said of a compiler: that nothing speaks against it, or what does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .facts import COMPILER_VARIABLE

OLDEST_NVCC = (12, 9)
PINS = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 "
    "nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96"
)

Version = tuple[int, int]


@dataclass(frozen=True)
class Toolchain:
    """A compiler that nothing speaks against.

    Attributes:
        home: the CUDA home DeepGEMM derives.
        nvcc: the program it will run.
        origin: what decided (`CUDA_HOME`, `PATH`, `/usr/local/cuda`, ...).
        version: nvcc's release; None when nvcc did not answer in time.
        headers: release of `cuda_runtime_api.h` beside nvcc; None if not seen.
        recorded: it is no compiler, and answers for one.
        host: the C++ compiler on PATH; None if not looked for, or named elsewhere.

    """

    home: Path
    nvcc: Path
    origin: str
    version: Version | None
    headers: Version | None
    recorded: bool = False
    host: Path | None = None

    @property
    def parts(self) -> str:
        """All that was found, in one line."""
        if self.recorded:
            return f"the recorded answer of {self}, which builds nothing"
        release = dotted(self.headers) if self.headers else "not seen"
        return f"{self}, headers {release}, C++ compiler {self.host or 'named to nvcc'}"

    def __str__(self) -> str:
        release = dotted(self.version) if self.version else "of unknown release"
        return f"nvcc {release} at {self.nvcc} ({self.origin})"


@dataclass(frozen=True)
class Unusable:
    """Why DeepGEMM cannot compile here, and what to do about it.

    Attributes:
        probed: the path looked at and what named it.
        reason: what is wrong with it, without the path.
        remedy: what the operator can do.

    """

    probed: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"DeepGEMM toolchain ({self.probed}): {self.reason}; {self.remedy}"


def dotted(version: Version) -> str:
    """`12.9`, for messages."""
    return f"{version[0]}.{version[1]}"


def needs() -> str:
    """What the library needs to build a kernel."""
    return (
        f"nvcc {dotted(OLDEST_NVCC)} or newer, CUDA headers of the same release and a "
        "C++ compiler (g++)"
    )


def other_toolkit() -> str:
    """The remedy where the compiler that was taken cannot be mended."""
    return (
        f"set CUDA_HOME to a CUDA toolkit {dotted(OLDEST_NVCC)} or newer, or unset "
        f"CUDA_HOME, CUDA_PATH and {COMPILER_VARIABLE} and pip install {PINS}"
    )
