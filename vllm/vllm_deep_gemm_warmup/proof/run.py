"""Decides what is proved: one server, all requests, kernels counted (`prove`)."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_deep_gemm_warmup.proof import count, server, workload
from vllm_deep_gemm_warmup.proof.client import Answers, Endpoint, send
from vllm_deep_gemm_warmup.proof.environment import (
    Caches,
    caches,
    make_folder,
    server_environment,
    socket_folder,
)
from vllm_deep_gemm_warmup.proof.settings import (
    REAL,
    Settings,
    UsageError,
    parse,
    vocab_size,
)

DISTRIBUTION = "vllm-deep-gemm-warmup"
SHOWN = 20


@dataclass(frozen=True)
class Result:
    """What one run showed.

    Kernels: ``*_found`` lay in a kept cache, ``*_before`` were built until ``/health``
    first answered 200, ``*_after`` names those that came later. Seconds are wall time.
    ``first_request_seconds`` of them went by until the first request was answered.
    ``layers`` is None where no report was written (stock writes none);
    ``warm_when_ready`` says that it was there when ``/health`` first answered 200.
    """

    settings: dict[str, Any]
    base: str
    commit: str
    nvcc: str
    layers: int | None
    warm_when_ready: bool
    unregistered: tuple[str, ...]
    failed: tuple[str, ...]
    deep_gemm_found: int
    deep_gemm_before: int
    deep_gemm_after: tuple[str, ...]
    flashinfer_found: int
    flashinfer_before: int
    flashinfer_after: tuple[str, ...]
    asked: int
    right: int
    wrong: tuple[str, ...]
    ready_seconds: float
    first_request_seconds: float
    request_seconds: float

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each thing that keeps this from being a proof."""
        found = list(self.wrong)
        if self.settings["stock"]:
            return tuple(found)
        if self.layers is None:
            found.append(
                "report: the warmup wrote none, so this was stock; "
                f"install {DISTRIBUTION} beside this vLLM"
            )
        elif self.layers == 0:
            found.append(
                "layers: none is registered, so nothing ran on DeepGEMM; the server's "
                "log (--log) says why"
            )
        if self.layers and not self.deep_gemm_found + self.deep_gemm_before:
            found.append("kernels: none was there when the server was ready")
        if self.layers is not None and not self.warm_when_ready:
            found.append("ready: /health answered 200 before the warmup had ended")
        found += [f"unregistered layer: {line}" for line in self.unregistered]
        found += [f"failed kernel: {line}" for line in self.failed]
        for name, late in (
            ("DeepGEMM", self.deep_gemm_after),
            ("FlashInfer", self.flashinfer_after),
        ):
            if late:
                found.append(f"kernels: {len(late)} {name} kernels built after ready")
        return tuple(found)


def from_row(row: Mapping[str, Any]) -> Result:
    """Return the result that ``dataclasses.asdict`` and JSON made ``row`` of."""
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in row.items()
    }
    return Result(**values)


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """Return the git commit of this code, ``+`` added where the tree differs from it.

    Known from the checkout that the code lies in, or that pip recorded as its source.
    """
    places = [Path(__file__).resolve().parent]
    try:
        recorded = importlib.metadata.distribution(DISTRIBUTION).read_text(
            "direct_url.json"
        )
    except importlib.metadata.PackageNotFoundError:
        recorded = None
    if recorded is not None:
        source = json.loads(recorded)
        if "vcs_info" in source:
            return str(source["vcs_info"]["commit_id"])[:12]
        url = urllib.parse.urlparse(source["url"])
        places.append(Path(urllib.parse.unquote(url.path)))
    for place in places:
        # A wheel's folder may lie inside someone else's repository.
        if _output("git", "-C", str(place), "ls-files", "--error-unmatch", ".") is None:
            continue
        head = _output("git", "-C", str(place), "rev-parse", "--short=12", "HEAD")
        if head:
            changed = _output("git", "-C", str(place), "status", "--porcelain")
            return f"{head}+" if changed else head
    return "unknown"


def base_version() -> str:
    """Return the version of the vLLM beside this package."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def serve_command(settings: Settings, port: int) -> list[str]:
    """Return the command that starts the server of ``settings`` on ``port``."""
    command = [
        *settings.vllm,
        "serve",
        str(settings.model.resolve()),
        "--host=127.0.0.1",
        f"--port={port}",
        f"--served-model-name={settings.model.resolve().name}",
        "--load-format=dummy",
        "--skip-tokenizer-init",
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
        f"--max-num-batched-tokens={settings.limit}",
        f"--max-model-len={workload.longest(settings.limit, settings.context)}",
        f"--tensor-parallel-size={settings.tp}",
    ]
    if settings.mode == "eager":
        command.append("--enforce-eager")
    if settings.pp > 1:
        command.append(f"--pipeline-parallel-size={settings.pp}")
    if settings.dp > 1:
        command.append(f"--data-parallel-size={settings.dp}")
    if settings.tp > 1:
        command.append("--disable-custom-all-reduce")
    return [*command, *settings.extra]


def _report(path: Path) -> tuple[int | None, tuple[str, ...], tuple[str, ...]]:
    """Return (registered layers or None, unregistered layers, failed kernels)."""
    if not path.is_file():
        return None, (), ()
    report = json.loads(path.read_text())
    layers = report["layers"]
    return (
        int(layers["registered"]),
        tuple(f"{row['name']}: {row['reason']}" for row in layers["unregistered"]),
        tuple(
            f"{spec['spec']}: {failure['reason']}"
            for spec in report["specs"]
            if not spec.get("unconfirmed")
            for failure in spec.get("failed", ())
        ),
    )


def _nvcc(settings: Settings, where: Caches) -> str:
    if settings.nvcc == "fake":
        return "declared fake"
    used = count.compilers(where.deep_gemm)
    return f"real: {', '.join(used)}" if used else "real"


def _steps(settings: Settings) -> list[list[workload.Request]]:
    sized = [[request] for request in workload.sized_requests(settings.limit)]
    context = workload.context_requests(settings.context) if settings.context else []
    batch = workload.batch_requests([settings.batch]) if settings.batch else []
    return sized + workload.batch_requests() + context + batch


def _measure(
    settings: Settings, where: Caches, environ: Mapping[str, str], log: Path
) -> Result:
    words = vocab_size(settings.model)
    port = server.free_port()
    command = serve_command(settings, port)
    found = count.snapshot(where.deep_gemm, where.flashinfer_deep_gemm)
    with server.running(command, environ, port, log, settings.start_timeout) as up:
        before = count.snapshot(where.deep_gemm, where.flashinfer_deep_gemm)
        warm = where.report.is_file()
        built = len(before.deep_gemm - found.deep_gemm)
        print(f"ready after {up.seconds:.1f} s, {built} kernels built", flush=True)
        endpoint = Endpoint(up.base_url, settings.model.resolve().name, words)
        answers = send(endpoint, _steps(settings), settings.request_timeout)
        if answers.wrong:
            print(f"the server's log ends with\n{server.tail(log)}", file=sys.stderr)
    after = count.snapshot(where.deep_gemm, where.flashinfer_deep_gemm)
    return _result(settings, where, (found, before, after), answers, up.seconds, warm)


def _result(
    settings: Settings,
    where: Caches,
    kernels: tuple[count.Snapshot, count.Snapshot, count.Snapshot],
    answers: Answers,
    ready_seconds: float,
    warm_when_ready: bool,
) -> Result:
    found, before, after = kernels
    layers, unregistered, failed = _report(where.report)
    return Result(
        settings=settings.facts(),
        base=base_version(),
        commit=commit(),
        nvcc=_nvcc(settings, where),
        layers=layers,
        warm_when_ready=warm_when_ready,
        unregistered=unregistered,
        failed=failed,
        deep_gemm_found=len(found.deep_gemm),
        deep_gemm_before=len(before.deep_gemm - found.deep_gemm),
        deep_gemm_after=tuple(sorted(map(str, after.deep_gemm - before.deep_gemm))),
        flashinfer_found=len(found.flashinfer),
        flashinfer_before=len(before.flashinfer - found.flashinfer),
        flashinfer_after=tuple(sorted(after.flashinfer - before.flashinfer)),
        asked=answers.asked,
        right=answers.right,
        wrong=answers.wrong,
        ready_seconds=round(ready_seconds, 1),
        first_request_seconds=round(answers.first_seconds, 3),
        request_seconds=round(answers.seconds, 1),
    )


def check_file(path: Path) -> None:
    """Find out before a run of minutes that its result cannot be written.

    Raises:
        UsageError: the file cannot be.
    """
    if path.is_dir():
        raise UsageError(f"file ({path}): it is a folder; name a file in it")
    make_folder(path.absolute().parent)


def _keep_log(log: Path, path: Path) -> None:
    try:
        shutil.copyfile(log, path)
    # What the run showed, or why it ended, is worth more.
    except OSError as error:
        print(f"log ({path}): {error}; it is not kept", file=sys.stderr)


def prove(settings: Settings, base_env: Mapping[str, str]) -> Result:
    """Run one proof and return what it showed.

    No process, port or temporary folder is left, however this ends.

    Raises:
        UsageError: the model folder, or one to write to, cannot be used.
        server.ServerError: the server did not become ready.
    """
    vocab_size(settings.model)
    with (
        tempfile.TemporaryDirectory(
            prefix="vllm-deep-gemm-", ignore_cleanup_errors=True
        ) as name,
        socket_folder() as sockets,
    ):
        scratch = Path(name)
        where = caches(settings, scratch, sockets)
        environ = server_environment(settings, where, base_env)
        log = scratch / "server.log"
        try:
            return _measure(settings, where, environ, log)
        finally:
            if settings.log is not None and log.is_file():
                _keep_log(log, settings.log)


def _kernels(found: int, before: int, after: Sequence[str]) -> str:
    kept = f"{found} found in the cache, " if found else ""
    return f"{kept}{before} built before ready, {len(after)} after"


def table(result: Result) -> str:
    """Return the result as lines of a name and a value."""
    facts = result.settings
    side = "vLLM as it is" if facts["stock"] else "this patch set"
    device = facts["device"]
    where = "this machine's GPU" if device == REAL else f"stand-in for {device}"
    more = f", prompts of {facts['context']}" if facts["context"] else ""
    more += f", {facts['batch']} together" if facts["batch"] else ""
    given = (f"{name}={value}" for name, value in facts["environment"].items())
    layers = "not reported by stock" if facts["stock"] else "no report"
    rows = {
        "model": f"{facts['model']}, {' '.join([*given, *facts['extra']])}".rstrip(
            ", "
        ),
        "base": f"vllm {result.base}, {side}, commit {result.commit}",
        "device": f"{where}, tensor parallel {facts['tp']}, "
        f"pipeline parallel {facts['pp']}, data parallel {facts['dp']}",
        "mode": f"{facts['mode']}, runner {facts['runner']}, kernel {facts['kernel']}, "
        f"at most {facts['limit']} rows{more}",
        "nvcc": result.nvcc,
        "layers registered": layers if result.layers is None else str(result.layers),
        "DeepGEMM kernels": _kernels(
            result.deep_gemm_found, result.deep_gemm_before, result.deep_gemm_after
        ),
        "FlashInfer's own kernels": _kernels(
            result.flashinfer_found, result.flashinfer_before, result.flashinfer_after
        ),
        "requests": f"{result.right} of {result.asked} answered as asked",
        "seconds": f"{result.ready_seconds} to ready, "
        f"{result.first_request_seconds:.1f} of the first request, "
        f"{result.request_seconds} of all",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _list(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    print(f"{title}:")
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  and {len(lines) - SHOWN} more")


def show(result: Result) -> None:
    """Print the table, the kernels built after ready, and the verdict."""
    print(table(result))
    _list("DeepGEMM kernels built after ready", result.deep_gemm_after)
    _list("FlashInfer kernels built after ready", result.flashinfer_after)
    _list("problems", result.problems)
    if result.problems:
        print("FAILED")
    else:
        print("measured" if result.settings["stock"] else "PROVED")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let other signals unwind the stack as Ctrl-C does, so that all is removed.

    The server is in a session of its own: it does not hear of a closed terminal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP)
        # nohup
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(argv: Sequence[str]) -> int:
    """Run ``vllm-deep-gemm prove ARGV``; return its exit status.

    0: proved (with ``--stock``: every request was right); 1: not; 2: the command line
    or the model folder cannot be used; 130: interrupted.
    """
    try:
        with _interruptible():
            if argv and argv[0] == "--matrix":
                from vllm_deep_gemm_warmup.proof import matrix

                return matrix.main(argv[1:])
            if argv and argv[0] == "--cases":
                from vllm_deep_gemm_warmup.proof import cases

                return cases.main(argv[1:])
            return _main(parse(argv))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except server.ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _main(settings: Settings) -> int:
    for path in filter(None, (settings.json, settings.log)):
        check_file(path)
    result = prove(settings, os.environ)
    show(result)
    if settings.json is not None:
        settings.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
