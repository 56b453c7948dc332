"""The library is silent, and programs that are not Python do not pass it on."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def output(command: list[str], env: dict[str, str]) -> bytes:
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout


def test_a_shell_gets_and_gives_a_clean_environment(
    standin: Callable[..., dict[str, str]],
) -> None:
    env = standin()
    for command in (["sh", "-c", "env; sh -c env"], ["bash", "-c", "env; env"]):
        text = output(command, env).decode()
        linked = [
            line
            for line in text.splitlines()
            if line.startswith(("LD_PRELOAD", "LD_LIBRARY_PATH", "STANDIN_GPU="))
        ]
        assert linked == []
    kept = env | {"LD_LIBRARY_PATH": f"{env['LD_LIBRARY_PATH']}:/opt/other"}
    assert b"LD_LIBRARY_PATH=/opt/other\n" in output(["sh", "-c", "env"], kept)


def test_a_python_child_keeps_the_device(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = f"""
import subprocess, sys
child = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
print(subprocess.run([{sys.executable!r}, "-c", child], capture_output=True).stdout)
"""
    assert python(code, standin()).strip() == r"b'0\n'"


def test_not_one_byte_is_printed(
    standin: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    """Same bytes with and without, from the pipe that DeepGEMM reads for its key."""
    tool = tmp_path / "nvcc"
    tool.write_text("#!/bin/sh\necho release 13.0, V13.0.88\nls / >&2\n")
    tool.chmod(0o755)
    pipes = (f"{tool} --version 2>&1", "true 2>&1", f"{sys.executable} -c pass 2>&1")
    for pipe in pipes:
        code = f"import os; print(repr(os.popen({pipe!r}).read()))"
        command = [sys.executable, "-c", code]
        assert output(command, standin()) == output(command, dict(os.environ))
