"""Decides how a command is started on the stand-in, and what is left of it: nothing."""

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

from . import build
from .device import POSES, check_devices, parse_device
from .environment import RealDriver, environment


def parser() -> argparse.ArgumentParser:
    """The launcher's command line."""
    result = argparse.ArgumentParser(
        prog="vllm-deep-gemm standin",
        description="Run a Python program on a GPU that is not there. "
        "Kernels are selected and compiled as on the real device; "
        "results are meaningless.",
    )
    result.add_argument(
        "--device", default="h100", help=f"{', '.join(POSES)} or a number of SMs"
    )
    result.add_argument("--devices", type=int, default=1, help="how many of them")
    result.add_argument(
        "--cache", type=Path, help="keep kernel caches here (default: private, removed)"
    )
    result.add_argument("--trace", type=Path, help="file for calls without a meaning")
    result.add_argument(
        "--over-real-driver", action="store_true", help="hide this machine's GPU"
    )
    result.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command ...")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status (2 for a refusal)."""
    options = parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser().error("no command; write it after --")
    private = None if options.cache else tempfile.mkdtemp(prefix="standin-")
    cache = Path(private) if private else options.cache
    try:
        pose = parse_device(options.device)
        check_devices(options.devices)
        env = environment(
            pose,
            options.devices,
            cache,
            over_real_driver=options.over_real_driver,
        )
        if private:
            # Sockets and compilers' files of a killed server go with the caches.
            env["TMPDIR"] = str(cache / "tmp")
            (cache / "tmp").mkdir()
        if options.trace:
            env["STANDIN_GPU_TRACE"] = str(options.trace.resolve())
        _announce(pose.name, pose.sms, options.devices, cache, bool(private))
        return _run(command, env)
    except (ValueError, RealDriver, build.BuildError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if private:
            shutil.rmtree(private, ignore_errors=True)


def _announce(name: str, sms: int, devices: int, cache: Path, private: bool) -> None:
    count = f"{devices} x " if devices > 1 else ""
    print(
        f"stand-in device: no GPU, results are meaningless; poses as {count}{name} "
        f"({sms} SMs); caches in {cache}"
        f"{' (removed at the end)' if private else ''}",
        file=sys.stderr,
        flush=True,
    )


def python_command(program: str, head: bytes) -> list[str] | None:
    """How to start a program so that Python is the first thing that runs.

    ``head`` is the program's first bytes. A script that reaches Python through ``env``
    or ``sh`` (as pip writes one when the interpreter's path is long) would lose the
    device on the way. None for a program that is not Python's.
    """
    if Path(program).resolve().name.startswith("python"):
        return [program]
    lines = head.decode(errors="replace").splitlines()
    if not lines or not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    through_sh = len(lines) > 1 and lines[1].startswith("'''exec'")
    if through_sh:
        words = shlex.split(lines[1].removeprefix("'''exec'"))[:1]
    elif words and Path(words[0]).name == "env":
        words = list(dropwhile(lambda word: word.startswith("-"), words[1:]))
    if not words or not Path(words[0]).name.startswith("python"):
        return None
    return [*words, program]


def _run(command: Sequence[str], env: dict[str, str]) -> int:
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        print(f"stand-in device ({command[0]}): no such command", file=sys.stderr)
        return 127
    with Path(program).open("rb") as file:
        start = python_command(program, file.read(512))
    if start is None:
        print(
            f"stand-in device ({command[0]}): not a Python program, and the device is "
            "not passed on through others; start python or a Python script",
            file=sys.stderr,
        )
        return 2
    with subprocess.Popen([*start, *command[1:]], env=env) as child:

        def pass_on(number: int, frame: object) -> None:
            child.send_signal(number)

        # The terminal tells the child about Ctrl-C by itself; others tell only us.
        previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
            signal.SIGHUP: signal.signal(signal.SIGHUP, pass_on),
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        }
        try:
            status = child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status
