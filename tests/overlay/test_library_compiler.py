"""The real DeepGEMM on the stand-in: it takes the compiler that we foresaw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.proof import fake_nvcc
from vllm_deep_gemm_warmup.standin.environment import environment

SAYS = "#!/bin/sh\necho 'release {0}, V{0}.0'\n"


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Toolkits of the declared fake compiler, and four that cannot work."""
    folder = tmp_path_factory.mktemp("toolkits")
    for name in ("home", "path", "onpath", "other"):
        fake_nvcc.install(folder / name / "bin")
    for name, body in {
        "old": SAYS.format("12.8"),
        "silent": "#!/bin/sh\n",
        "failing": SAYS.format("13.0") + "exit 1\n",
    }.items():
        program = folder / name / "bin" / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text(body)
        program.chmod(0o755)
    (folder / "empty").mkdir()
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def answers(
    homes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """What the library did in each case; one process, one import of it."""
    folder = tmp_path_factory.mktemp("library")
    bare = "/usr/bin:/bin"  # a host compiler, and no nvcc
    own = f"{homes['onpath'] / 'bin'}:{bare}"
    other = str(homes["other"] / "bin" / "nvcc")
    cases = {
        "home": {"CUDA_HOME": "home", "CUDA_PATH": "path", "PATH": own},
        "path": {"CUDA_PATH": "path", "PATH": own},
        "onpath": {"PATH": own},
        "empty home": {"CUDA_HOME": "", "CUDA_PATH": "path", "PATH": own},
        "other": {"CUDA_HOME": "home", "DG_JIT_NVCC_COMPILER": other},
        "other without home": {"CUDA_HOME": "gone", "DG_JIT_NVCC_COMPILER": other},
        "other gone": {"CUDA_HOME": "home", "DG_JIT_NVCC_COMPILER": "/gone/nvcc"},
        "home gone": {"CUDA_HOME": "gone", "PATH": own},
        "home empty": {"CUDA_HOME": "empty", "PATH": own},
        "old": {"CUDA_HOME": "old"},
        "silent": {"CUDA_HOME": "silent"},
        "failing": {"CUDA_HOME": "failing"},
        "nothing set": {"CHOOSE": "1"},
    }
    for index, case in enumerate(cases.values()):
        for name in ("CUDA_HOME", "CUDA_PATH"):
            if case.get(name):
                case[name] = str(homes.get(case[name], "/nonexistent/cuda"))
        case.setdefault("PATH", bare)
        case["DG_JIT_CACHE_DIR"] = str(folder / f"cache{index}")
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    base = {k: v for k, v in os.environ.items() if "CUDA" not in k and k[:3] != "DG_"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ask_library.py")), str(listed)],
        env=environment("h100", cache_dir=folder / "caches", base_env=base),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    found = {line["case"]: line for line in lines}
    assert set(found) == set(cases), done.stdout
    return found


@pytest.mark.parametrize("case", ["home", "path", "onpath", "other"])
def test_library_takes_the_operators_compiler(
    answers: dict[str, dict[str, str]], homes: dict[str, Path], case: str
) -> None:
    expected = str(homes[case] / "bin" / "nvcc")
    assert answers[case]["used"] == expected
    assert answers[case]["foreseen"] == expected


@pytest.mark.parametrize(
    "case",
    [
        "other without home",
        "other gone",
        "home gone",
        "home empty",
        "old",
        "silent",
        "failing",
    ],
)
def test_library_fails_where_we_reject(
    answers: dict[str, dict[str, str]], case: str
) -> None:
    assert "used" not in answers[case]
    assert answers[case]["failed"]
    assert answers[case]["foreseen"].startswith("DeepGEMM toolchain (")


def test_empty_variable(
    answers: dict[str, dict[str, str]], homes: dict[str, Path]
) -> None:
    assert answers["empty home"].get("used") == answers["empty home"]["foreseen"]


def test_nothing_set_compiles_with_the_toolchain_of_pip(
    answers: dict[str, dict[str, str]],
) -> None:
    """The real nvcc, the system's hidden: its path stands in `meta.json`."""
    used = Path(answers["nothing set"]["used"])
    assert str(used) == answers["nothing set"]["foreseen"]
    assert used.parts[-4] == "deep_gemm_warmup"
    assert used.resolve().parts[-4:] == ("nvidia", "cu13", "bin", "nvcc")
