"""Decides when a server is ready, and that nothing of it is left when it ends."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.25
TAIL_LINES = 30
ERROR_LINES = 5
_ERROR = re.compile(r"\b\w*(Error|Exception): |: error: ")
# A group that ignores SIGINT for this long gets SIGTERM, then SIGKILL.
GRACE_SECONDS = 20.0
# Above the ports of well-known services, below those that Linux gives by default.
FIRST_PORT = 20000
LAST_PORT = 32768
PORTS_TRIED = 100
_SYSTEM_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ServerError(RuntimeError):
    """The server did not become ready; the message ends with its log's tail."""


@dataclass(frozen=True)
class Server:
    """A server that answers: its address, its log, and seconds until it was ready."""

    base_url: str
    log: Path
    pgid: int
    seconds: float


def free_port() -> int:
    """Return a port of the loopback address that nothing listens on now.

    The server binds it seconds later, when it has imported vLLM. Until then a port that
    the system gives to whoever asks for none could be taken by any connection, as those
    of another server's ranks are; so one is drawn from below them, where there are any.
    """
    chosen = range(FIRST_PORT, min(_first_of_the_system(), LAST_PORT))
    drawn = random.sample(chosen, k=min(len(chosen), PORTS_TRIED))
    for port in (*drawn, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no port of 127.0.0.1 is free")


def _first_of_the_system() -> int:
    """The first port that Linux gives to a socket that names none (ip(7))."""
    try:
        return int(_SYSTEM_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST_PORT


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the last ``lines`` lines of ``log``.

    The engine's error lies further up than the API server's, which only says that the
    engine ended: the first lines that name an error are put in front.
    """
    text = log.read_text(errors="replace") if log.is_file() else ""
    every = text.splitlines()
    errors = [line for line in every[:-lines] if _ERROR.search(line)]
    return "\n".join(errors[:ERROR_LINES] + every[-lines:])


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(process: subprocess.Popen[bytes], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        process.poll()  # reaps the leader, which would keep the group alive
        if not _group_exists(process.pid):
            return True
        time.sleep(0.05)
    return False


def _signal_group(
    process: subprocess.Popen[bytes], number: signal.Signals, seconds: float
) -> bool:
    """Send a signal; return whether the group is gone within so many seconds."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return True
    return _wait_for_group(process, seconds)


def end(process: subprocess.Popen[bytes]) -> None:
    """End every process of the group that ``process`` leads, politely at first.

    A second Ctrl-C meanwhile ends the politeness and not the work.
    """
    gone = False
    try:
        gone = _signal_group(process, signal.SIGINT, GRACE_SECONDS) or _signal_group(
            process, signal.SIGTERM, GRACE_SECONDS / 4
        )
    finally:
        if not gone:
            _signal_group(process, signal.SIGKILL, GRACE_SECONDS)
        process.wait()


def _healthy(base_url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _wait_until_healthy(
    process: subprocess.Popen[bytes], base_url: str, log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while not _healthy(base_url):
        status = process.poll()
        if status is not None:
            raise ServerError(
                f"server: ended with status {status} before it was ready; "
                f"its log ends with\n{tail(log)}"
            )
        if time.monotonic() > deadline:
            raise ServerError(
                f"server: not ready after {timeout:.0f} s; "
                f"give more with --start-timeout; its log ends with\n{tail(log)}"
            )
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def running(
    command: Sequence[str],
    environ: Mapping[str, str],
    port: int,
    log: Path,
    timeout: float,
) -> Iterator[Server]:
    """Run ``command`` and hand out the server once ``/health`` answers 200.

    ``timeout`` is in seconds. Whatever happens, no process of the group is left when
    this returns.

    Raises:
        ServerError: the command could not be started, ended, or was not ready in time.
    """
    base_url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"server: cannot start {command[0]}: {error}") from error
        try:
            _wait_until_healthy(process, base_url, log, timeout)
            yield Server(base_url, log, process.pid, time.monotonic() - started)
        finally:
            end(process)
