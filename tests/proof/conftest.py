"""Shared by the proofs of a session: caches without kernels, a PATH without nvcc."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import standin


def hide(program: str, path: str, folder: Path) -> str:
    """Return ``path`` without ``program``.

    A folder that holds it is replaced by one of links to everything else in it.
    """
    parts = []
    for number, part in enumerate(filter(None, path.split(os.pathsep))):
        if not Path(part, program).exists():
            parts.append(part)
            continue
        links = folder / str(number)
        links.mkdir(parents=True)
        for entry in Path(part).iterdir():
            if entry.name != program:
                (links / entry.name).symlink_to(entry)
        parts.append(str(links))
    return os.pathsep.join(parts)


@pytest.fixture(scope="session")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """This process's environment without any CUDA toolkit of the machine.

    What compiles then is what the requirements brought.
    """
    folder = tmp_path_factory.mktemp("path")
    dropped = ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "FLASHINFER_NVCC")
    plain = standin.without(os.environ)
    kept = {name: value for name, value in plain.items() if name not in dropped}
    return kept | {"PATH": hide("nvcc", os.environ["PATH"], folder)}
