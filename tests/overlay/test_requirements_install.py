"""`requirements/install` says what is missing before it installs anything."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "requirements" / "install"
TOOLS = ("sh", "dirname", "mkdir", "df", "awk", "cc", "g++")


class Machine:
    """A folder as PATH: links to what a machine has, scripts for what it answers."""

    def __init__(self, folder: Path) -> None:
        self.path, self.target = folder / "bin", folder / "target"
        self.path.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.path / tool).symlink_to(found)
        (self.path / "python3").symlink_to(sys.executable)

    def script(self, name: str, text: str) -> None:
        (self.path / name).unlink()
        (self.path / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.path / name).chmod(0o755)

    def refusal(self, target: str | None = None, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [str(INSTALL), target or str(self.target)],
            env={"PATH": str(self.path)},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("tool", "reason"),
    [("g++", "no g++, which nvcc needs"), ("python3", "no python3 on PATH")],
)
def test_a_missing_program_is_named_with_its_package(
    machine: Machine, tool: str, reason: str
) -> None:
    (machine.path / tool).unlink()

    line = machine.refusal()

    assert reason in line
    assert "apt-get install python3-venv python3-dev g++" in line
    assert not machine.target.exists()


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("version_info", "Python 3.10.1 is older than 3.11"),
        ("ensurepip", "has no venv and ensurepip"),
        ("Python.h", "no Python.h, which Triton compiles with"),
    ],
)
def test_a_python_that_will_not_do_is_named(
    machine: Machine, question: str, reason: str
) -> None:
    machine.script(
        "python3",
        f'case "$*" in *{question}*) exit 1 ;; *--version) echo Python 3.10.1 ;; esac',
    )

    assert reason in machine.refusal()


@pytest.mark.parametrize(
    ("answer", "free"),
    [("echo; echo /dev/disk 9 9 5242880 9% /", 5), ("exit 1", 0)],
    ids=["full", "unknown"],
)
def test_too_little_room_is_said_in_figures(
    machine: Machine, answer: str, free: int
) -> None:
    machine.script("df", answer)

    assert f"{free} GB free, 16 GB needed" in machine.refusal()


def test_a_relative_folder_is_one_of_the_caller(
    machine: Machine, tmp_path: Path
) -> None:
    machine.script("df", "exit 1")

    assert f"install ({tmp_path}/here)" in machine.refusal("here", cwd=tmp_path)
