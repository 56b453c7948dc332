"""Toolkits that are not there: a script in the place of nvcc."""

from __future__ import annotations

from pathlib import Path

from vllm_deep_gemm_warmup.toolchain import Toolchain, Unusable

NOWHERE = Path("/nonexistent/cuda")
SAYS = "echo 'nvcc: NVIDIA (R) Cuda compiler driver'\necho 'release {0}, V{0}.88'\n"


def script(path: Path, body: str, first_line: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(first_line + body)
    path.chmod(0o755)
    return path


def one_line(answer: Toolchain | Unusable) -> str:
    """The message of a compiler that was found unusable."""
    assert isinstance(answer, Unusable), answer
    text = str(answer)
    assert "\n" not in text
    assert text.startswith("DeepGEMM toolchain (")
    assert "; " in text
    return text
