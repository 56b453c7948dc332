"""Shared by the proofs of a session: caches without kernels, a PATH without nvcc."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import standin

from .runs import Proof, Result, Runs, Started


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


def bare(folder: Path) -> Mapping[str, str]:
    """Return this process's environment without any CUDA toolkit of the machine.

    What compiles then is what the requirements brought.
    """
    dropped = ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "FLASHINFER_NVCC")
    plain = standin.without(os.environ)
    kept = {name: value for name, value in plain.items() if name not in dropped}
    return kept | {"PATH": hide("nvcc", os.environ["PATH"], folder)}


STARTED = pytest.StashKey[Started]()
FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what the selected tests are parametrized with."""
    if session.config.option.collectonly:
        return
    params = (getattr(item, "callspec", None) for item in session.items)
    proofs = [
        spec.params["proof"] for spec in params if spec and "proof" in spec.params
    ]
    folder = tempfile.TemporaryDirectory(prefix="proofs-", ignore_cleanup_errors=True)
    made = {name: Path(folder.name, name) for name in ("path", "caches", "results")}
    for path in made.values():
        path.mkdir()
    runs = Runs(bare(made["path"]), made["caches"], made["results"])
    session.stash[FOLDER] = folder
    session.stash[STARTED] = Started(runs, proofs)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what is still running; each run ends its server and removes its folder."""
    started = session.stash.get(STARTED, None)
    if started is not None:
        started.stop()
        session.stash[FOLDER].cleanup()


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest) -> Started:
    """The runs of this session."""
    return request.session.stash[STARTED]


@pytest.fixture(scope="session")
def runs(started: Started) -> Runs:
    """For a run that a test makes by itself."""
    return started.runs


@pytest.fixture(scope="session")
def result_of(started: Started) -> Callable[[Proof], Result]:
    """Wait for a run that was started in advance."""
    return started.result


@pytest.fixture(scope="session")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of the runs."""
    return bare(tmp_path_factory.mktemp("path"))
