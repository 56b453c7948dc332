"""The command against a small real HTTP server: right, wrong, dying and hanging."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from vllm_deep_gemm_warmup.proof import run

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 32}')
    return folder


KERNELS = [(4096, 1024)]
FIRST_AND_ALL = ("first_request", "request")


def arguments(model: Path, *more: str) -> list[str]:
    return [
        str(model), "--device=real", f"--vllm={FAKE}", "--max-num-batched-tokens=64",
        "--start-timeout=60", *more,
    ]  # fmt: skip


class Runner:
    """Runs the command in this process for a script of the fake server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.monkeypatch, self.json = monkeypatch, tmp_path / "result.json"
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        monkeypatch.setattr("tempfile.tempdir", None)

    def __call__(self, model: Path, *more: str, **script: Any) -> int:
        self.monkeypatch.setenv("FAKE_VLLM", json.dumps(script))
        status: int = run.main(arguments(model, f"--json={self.json}", *more))
        return status

    @property
    def result(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.json.read_text())
        return loaded


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    return Runner(monkeypatch, tmp_path)


def test_right_answers_and_no_late_kernel_prove(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = prove(model, kernels=[(4096, 1024), (6144, 1024)])

    printed = capsys.readouterr().out
    assert status == 0
    assert "DeepGEMM kernels          2 built before ready, 0 after" in printed
    assert "layers registered         8" in printed
    assert "PROVED" in printed
    assert prove.result["asked"] == prove.result["right"] == 463 + 556
    first, every = (prove.result[f"{name}_seconds"] for name in FIRST_AND_ALL)
    assert 0 < first < every
    assert not list(prove.temporary.iterdir())


def test_sockets_fit_under_a_long_temporary_folder(
    prove: Runner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch makes a socket in TMPDIR, and ends with SIGSEGV where it does not fit."""
    deep = tmp_path / ("t" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))

    assert prove(model, kernels=[(4096, 1024)]) == 0
    assert not list(deep.iterdir())


def test_a_kernel_after_ready_fails_and_is_named(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = prove(model, kernels=[(4096, 1024)], late={"33": (576, 2048)})

    printed = capsys.readouterr().out
    assert status == 1
    assert "1 built before ready, 1 after" in printed
    assert "sm90_gemm_impl N=576 K=2048 <Major::K, 0, 576, 2048, 1>" in printed
    assert "FAILED" in printed


def test_stock_is_measured_not_judged(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = prove(model, "--stock", late={"33": (576, 2048)})

    printed = capsys.readouterr().out
    assert status == 0
    assert "not reported by stock" in printed
    assert "0 built before ready, 1 after" in printed


def test_without_a_report_nothing_is_proved(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(model, report=False) == 1
    assert "the warmup wrote none, so this was stock" in capsys.readouterr().out


def test_a_start_that_registers_nothing_proves_nothing(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(model, registered=0, kernels=[(4096, 1024)]) == 1
    assert "layers: none is registered" in capsys.readouterr().out


def test_a_start_that_builds_nothing_proves_nothing(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(model, kernels=[]) == 1
    assert "none was there when the server was ready" in capsys.readouterr().out


def test_ready_before_the_warmup_has_ended_fails(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G39."""
    assert prove(model, kernels=[(4096, 1024)], report_is_late=True) == 1
    assert "/health answered 200 before the warmup had ended" in (
        capsys.readouterr().out
    )


def test_an_unregistered_layer_fails_and_is_named(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = prove(
        model,
        kernels=KERNELS,
        unregistered=[{"name": "layers.0.up", "reason": "no stamp"}],
    )

    assert status == 1
    assert "unregistered layer: layers.0.up: no stamp" in capsys.readouterr().out


def test_a_failed_kernel_fails_and_is_named(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"spec": "fp8_gemm_nt N=576 K=2048, rows 1..64"}
    failed = [{"rows": 33, "reason": "nvcc: out of memory"}]

    assert prove(model, kernels=KERNELS, specs=[spec, spec | {"failed": failed}]) == 1
    assert f"failed kernel: {spec['spec']}: nvcc: out of memory" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("status", "prompt of 17: status 500"),
        ("text", "prompt of 17: not a completion: not an object"),
        ("tokens", "prompt of 17: 1 tokens, 2 asked for"),
        ("ids", "prompt of 17: 1 token ids, 2 asked for"),
        ("prompt", "prompt of 17: 16 prompt tokens counted, 17 sent"),
        ("drop", "prompt of 17: no answer"),
    ],
)
def test_a_wrong_answer_fails_and_names_the_request(
    prove: Runner,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    bad: str,
    reason: str,
) -> None:
    assert prove(model, bad={"17": bad}) == 1
    assert reason in capsys.readouterr().out


def test_no_request_is_sent_on_a_connection_that_may_be_closing(
    prove: Runner, model: Path
) -> None:
    assert prove(model, kernels=KERNELS, closes=True) == 0


def test_a_wrong_answer_of_stock_fails_too(prove: Runner, model: Path) -> None:
    assert prove(model, "--stock", bad={"17": "tokens"}) == 1


def test_a_server_that_dies_shows_status_and_log(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(model, dies=3) == 1

    error = capsys.readouterr().err
    assert "ended with status 3 before it was ready" in error
    assert "RuntimeError: no kernel for you" in error
    assert not list(prove.temporary.iterdir())


def test_a_server_that_never_is_healthy_is_ended(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(model, "--start-timeout=2", healthy=False) == 1
    assert "not ready after 2 s; give more with --start-timeout" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no config.json in it"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no vocab_size"),
    ],
)
def test_an_unusable_folder_is_refused(
    prove: Runner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    reason: str,
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)

    assert prove(folder) == 2
    assert reason in capsys.readouterr().err


def test_a_missing_folder_is_refused(
    prove: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(tmp_path / "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("more", ["--device=h99", "--tp=99"])
def test_an_impossible_device_is_refused(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    assert prove(model, "--device=h100", more) == 2
    assert "99" in capsys.readouterr().err


def test_a_missing_program_is_named(
    prove: Runner, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(model, "--vllm=/nowhere/vllm") == 1
    assert "server: cannot start /nowhere/vllm" in capsys.readouterr().err


def test_caches_of_stock_and_ours_are_kept_apart(
    prove: Runner, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    for more in ((), ("--stock",)):
        assert prove(model, f"--keep-cache={kept}", *more, kernels=[(64, 128)]) == 0

    assert prove(model, f"--keep-cache={kept}", kernels=[(64, 128), (64, 256)]) == 0
    assert "1 found in the cache, 1 built before ready, 0 after" in (
        capsys.readouterr().out
    )
    entries = sorted(path.relative_to(kept) for path in kept.rglob(".committed"))
    assert [entry.parts[0] for entry in entries] == [
        "overlay-real-nvcc",
        "overlay-real-nvcc",
        "stock-real-nvcc",
    ]


def alive(pid: int) -> bool:
    # A zombie, which the machine's init has yet to reap, runs no more.
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("number", "ignores", "again"),
    [
        (signal.SIGINT, False, False),
        (signal.SIGTERM, False, False),
        (signal.SIGHUP, False, False),
        (signal.SIGINT, True, True),
    ],
    ids=["Ctrl-C", "SIGTERM", "closed terminal", "impatient"],
)
def test_an_interrupt_leaves_no_process_port_or_folder(
    model: Path, tmp_path: Path, number: signal.Signals, ignores: bool, again: bool
) -> None:
    note, temporary = tmp_path / "child", tmp_path / "temporary"
    temporary.mkdir()
    script = {"healthy": False, "child": str(note), "ignores": ignores}
    environ = os.environ | {
        "TMPDIR": str(temporary),
        "FAKE_VLLM": json.dumps(script),
    }
    command = [sys.executable, "-m", run.__name__, *arguments(model)]
    with subprocess.Popen(
        command,
        env=environ,
        stderr=subprocess.PIPE,
        # A shell starts what it runs in the background with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while not (note.is_file() and note.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5 * ignores)
        process.send_signal(number)
        if again:
            time.sleep(1)
            process.send_signal(number)
        _, error = process.communicate()

    pid, port = map(int, note.read_text().split())
    assert process.returncode == 130
    assert error.decode().strip() == "interrupted"
    assert not alive(pid)
    assert not list(temporary.iterdir())
    with socket.socket() as probe:
        # Of a killed server's connections the kernel keeps the addresses a while.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_server_that_ignores_signals_is_killed(
    prove: Runner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_deep_gemm_warmup.proof.server.GRACE_SECONDS", 1.0)
    note = tmp_path / "child"

    assert prove(model, "--stock", ignores=True, child=str(note)) == 0
    assert not alive(int(note.read_text().split()[0]))


@pytest.mark.parametrize("option", ["--json", "--log", "--keep-cache"])
def test_what_cannot_be_written_is_refused_before_the_server_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"

    assert run.main([*arguments(model), f"{option}={place}"]) == 2

    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error
    assert "name one that can be written" in error
    assert len(error.splitlines()) == 1


def test_folders_of_result_and_log_are_made(
    prove: Runner, model: Path, tmp_path: Path
) -> None:
    prove.json = tmp_path / "new" / "result.json"
    log = tmp_path / "other" / "server.log"

    assert prove(model, f"--log={log}", kernels=KERNELS) == 0
    assert prove.result["right"] == prove.result["asked"]
    assert "the fake server starts" in log.read_text()


def test_a_folder_in_place_of_a_file_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*arguments(model), f"--json={tmp_path}"]) == 2
    assert "it is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--port=9", "--host", "--uds=x", "--ssl_keyfile=x"])
@pytest.mark.parametrize("matrix", [False, True], ids=["one", "matrix"])
def test_an_address_of_the_server_s_own_is_refused(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    matrix: bool,
) -> None:
    rows = f"--rows={tmp_path / 'rows.jsonl'}"
    command = ["--matrix", str(tmp_path), rows] if matrix else arguments(model)
    assert run.main([*command, "--", option]) == 2
    assert option in capsys.readouterr().err
