#!/usr/bin/env python3
"""An executable in place of `vllm serve`: a small real HTTP server that can misbehave.

What it does wrong is named by FAKE_VLLM (a JSON object), see ``Script``.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Script:
    """``dies``: exit with this status before ready. ``healthy``: False is never.

    ``kernels``: (N, K) compiled before ready. ``late``: prompt size -> (N, K) compiled
    when such a prompt comes. ``bad``: prompt size -> "status", "tokens", "prompt",
    "ids", "text" or "drop". ``report``: write the warmup's report, with so many
    ``registered`` layers, and two seconds after ready if it ``report_is_late``.
    ``child``: file to write a child process's id to. ``ignores``: signals are ignored.
    ``closes``: a second request on one connection gets no answer, as when the server
    has just closed an idle one.
    """

    dies: int | None = None
    healthy: bool = True
    kernels: tuple[tuple[int, int], ...] = ()
    late: dict[str, tuple[int, int]] | None = None
    bad: dict[str, str] | None = None
    report: bool = True
    registered: int = 8
    report_is_late: bool = False
    unregistered: tuple[dict[str, str], ...] = ()
    specs: tuple[dict[str, Any], ...] = ()
    child: str | None = None
    ignores: bool = False
    closes: bool = False


def build(n: int, k: int) -> None:
    """Leave a cache entry as DeepGEMM does: all files, the marker last."""
    folder = Path(os.environ["DG_JIT_CACHE_DIR"], "cache", f"sm90_gemm.{n:x}{k:x}")
    folder.mkdir(parents=True, exist_ok=True)
    source = "auto p = (void*)(&sm90_gemm_impl<\n  Major::K, 0, {}, {},\n  1>);\n"
    (folder / "kernel.cu").write_text(source.format(n, k))
    (folder / "kernel.cubin").write_bytes(b"\x7fELF")
    (folder / ".committed").touch()


def option(name: str) -> str:
    """Return the value of ``--name=value``."""
    found = [text for text in sys.argv if text.startswith(f"--{name}=")]
    return found[-1].partition("=")[2]


def answer(script: Script, asked: dict[str, Any]) -> tuple[int, Any]:
    """Return status and body for a completion request."""
    size, tokens = len(asked["prompt"]), asked["max_tokens"]
    bad = (script.bad or {}).get(str(size))
    late = (script.late or {}).get(str(size))
    if late is not None:
        build(*late)
    if bad == "status":
        return 500, {"error": "no"}
    if bad == "text":
        return 200, "not an object"
    given = tokens - 1 if bad == "tokens" else tokens
    ids = [0] * (tokens - 1 if bad == "ids" else given)
    usage = {
        "prompt_tokens": size - 1 if bad == "prompt" else size,
        "completion_tokens": given,
    }
    return 200, {"choices": [{"token_ids": ids}], "usage": usage}


def handler(script: Script) -> type[BaseHTTPRequestHandler]:
    """Return the request handler for ``script``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet per answer, or each costs a delayed ACK
        answered = 0

        def _reply(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._reply(200 if script.healthy else 503, {})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            asked = json.loads(self.rfile.read(length))
            dropped = (script.bad or {}).get(str(len(asked["prompt"]))) == "drop"
            if dropped or (script.closes and self.answered):
                self.close_connection = True
                return
            self.answered += 1
            self._reply(*answer(script, asked))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    """A whole batch connects at the same moment."""

    request_queue_size = 512
    daemon_threads = True


def main() -> None:
    script = Script(**json.loads(os.environ.get("FAKE_VLLM", "{}")))
    print("the fake server starts", *sys.argv[1:], flush=True)
    if script.child is not None:
        sleeper = subprocess.Popen(["sleep", "600"])
        Path(script.child).write_text(f"{sleeper.pid} {option('port')}")
    if script.ignores:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.dies is not None:
        print("RuntimeError: no kernel for you", *range(50), sep="\n", flush=True)
        sys.exit(script.dies)
    # As PyTorch's symmetric memory does; the path may be too long.
    meeting = socket.socket(socket.AF_UNIX)
    meeting.bind(f"{tempfile.gettempdir()}/symm_mem-{os.getpid()}")
    for n, k in script.kernels:
        build(n, k)
    on = os.environ["VLLM_DEEP_GEMM_OVERLAY"] == "1"
    if script.report and on:
        report = {
            "layers": {
                "registered": script.registered,
                "unregistered": script.unregistered,
            },
            "specs": script.specs,
        }
        path = Path(os.environ["VLLM_DEEP_GEMM_WARMUP_REPORT"])
        write = functools.partial(path.write_text, json.dumps(report))
        if script.report_is_late:
            threading.Timer(2.0, write).start()
        else:
            write()
    time.sleep(0.3)
    Server(("127.0.0.1", int(option("port"))), handler(script)).serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
