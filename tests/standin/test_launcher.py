"""The launcher says what it is, refuses over a real GPU, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.standin import environment
from vllm_deep_gemm_warmup.standin.environment import CACHES, RealDriver
from vllm_deep_gemm_warmup.standin.launcher import python_command

LAUNCH = [sys.executable, "-m", "vllm_deep_gemm_warmup.standin", "--over-real-driver"]


def launch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True)


def test_one_line_says_what_it_is_and_private_caches_go_away() -> None:
    code = "import os; print(os.environ['DG_JIT_CACHE_DIR']); raise SystemExit(7)"
    done = launch("--device", "h20", "--devices", "2", "--", sys.executable, "-c", code)
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert re.match(
        r"stand-in device: no GPU, results are meaningless; poses as 2 x NVIDIA H20",
        line,
    )
    assert "(78 SMs)" in line
    assert not Path(done.stdout.strip()).parent.exists()


def test_a_cache_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    code = "import os, pathlib; pathlib.Path(os.environ['DG_JIT_CACHE_DIR']).mkdir()"
    done = launch("--cache", str(tmp_path), "--", sys.executable, "-c", code)
    assert done.returncode == 0
    assert (tmp_path / "deep_gemm").is_dir()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--device", "a100"], "stand-in device (a100): unknown; use one of"),
        (["--devices", "99"], "stand-in device (devices=99): out of range"),
    ],
)
def test_a_refusal_is_one_line(arguments: list[str], reason: str) -> None:
    done = launch(*arguments, "--", sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert done.stderr.startswith(reason)
    assert len(done.stderr.splitlines()) == 1


def test_a_command_that_is_not_there() -> None:
    assert launch("--", "no-such-program").returncode == 127


def test_a_program_that_would_lose_the_device_is_refused() -> None:
    done = launch("--", "sh", "-c", "true")
    assert done.returncode == 2
    assert "(sh): not a Python program" in done.stderr


@pytest.mark.parametrize(
    ("head", "start"),
    [
        (b"#!/opt/venv/bin/python3\nimport x\n", ["/opt/venv/bin/python3"]),
        (b"#!/opt/bin/python3 -s\n", ["/opt/bin/python3", "-s"]),
        (b"#!/usr/bin/env -S python3 -u\n", ["python3", "-u"]),
        (b"#!/bin/sh\n'''exec' \"/long/bin/python3\" \"$0\"", ["/long/bin/python3"]),
        (
            b"#!/bin/sh\n'''exec' \"/my venv/bin/python3\" \"$0\"",
            ["/my venv/bin/python3"],
        ),
        (b"#!/bin/bash\n", None),
        (b"\x7fELF", None),
        (b"", None),
    ],
)
def test_python_is_the_first_thing_that_runs(
    head: bytes, start: list[str] | None
) -> None:
    expected = start and [*start, "/opt/tool"]
    assert python_command("/opt/tool", head) == expected


def test_a_signal_reaches_the_command() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    command = [*LAUNCH, "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait() == 5


def test_it_refuses_over_a_real_driver_unless_told(tmp_path: Path) -> None:
    mark = tmp_path / "nvidiactl"
    mark.touch()
    with pytest.raises(RealDriver, match="nvidiactl"):
        environment("h100", driver_marks=(mark,))
    env = environment("h100", driver_marks=(mark,), over_real_driver=True)
    assert "libcuda.so.1" in env["LD_PRELOAD"]


def test_the_environment_is_complete_and_private(tmp_path: Path) -> None:
    base = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LD_PRELOAD": "/opt/mine.so",
        "VLLM_USE_FLASHINFER_SAMPLER": "1",
        "STANDIN_GPU_BUILD_DIR": os.environ.get("STANDIN_GPU_BUILD_DIR", ""),
    }
    env = environment("h100", cache_dir=tmp_path, base_env=base, over_real_driver=True)
    assert all(env[name].startswith(str(tmp_path)) for name in CACHES)
    assert env["LD_PRELOAD"].endswith(":/opt/mine.so")
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    assert env["VLLM_NO_USAGE_STATS"] == env["HF_HUB_OFFLINE"] == "1"
    again = environment("h100", cache_dir=tmp_path, base_env=env, over_real_driver=True)
    assert again == env
