"""The plugin hook: settings that end the start, and what is said once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_deep_gemm_warmup import plugin, standin
from vllm_deep_gemm_warmup.settings import check_settings, read_settings

# vLLM's own part in it: its list of variables, and a logger with a handler.
ENVS = "environment_variables = {'VLLM_PORT': lambda: None}\n"
# Its answers, by the name of a device.
PLATFORMS = """\
import os
DEVICE = os.environ.get('DEVICE', 'h100')
class current_platform:
    is_cuda = staticmethod(lambda: DEVICE in ('h100', 'a100'))
    support_deep_gemm = staticmethod(lambda: DEVICE in ('h100', 'some day'))
"""
REGISTER = """
import logging, sys
import vllm
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter('%(levelname)s %(message)s'))
logging.getLogger('vllm').addHandler(handler)
logging.getLogger('vllm').setLevel('INFO')
from vllm_deep_gemm_warmup.plugin import register
from vllm_deep_gemm_warmup.settings import check_settings
"""


@pytest.fixture
def engine(patched: Any) -> Any:
    for name, text in (("envs", ENVS), ("platforms", PLATFORMS)):
        (patched.site_packages / "vllm" / f"{name}.py").write_text(text)
    return patched


def change_base(env: Any, name: str) -> None:
    path = env.site_packages / "vllm" / name
    path.write_text(path.read_text() + "\n")


@pytest.mark.parametrize("value", ["Relax", "0", "none", "", "FULL", " skip", "1"])
def test_unknown_mode_names_the_allowed_ones(value: str) -> None:
    with pytest.raises(ValueError, match="VLLM_DEEP_GEMM_WARMUP") as caught:
        check_settings({"VLLM_DEEP_GEMM_WARMUP": value})
    assert repr(value) in str(caught.value)
    assert "skip, relax, full" in str(caught.value)


@pytest.mark.parametrize("value", ["0", "1", ""])
def test_retired_variable_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="VLLM_SKIP_DEEP_GEMM_WARMUP") as caught:
        check_settings({"VLLM_SKIP_DEEP_GEMM_WARMUP": value})
    assert "retired" in str(caught.value)
    assert "skip, relax, full" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["VLLM_DEEP_GEMM_OVERLAY", "VLLM_DEEP_GEMM_WARMUP_STRICT"]
)
@pytest.mark.parametrize("value", ["true", "off", ""])
def test_switches_take_zero_and_one(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_settings({name: value})


def test_settings_that_are_right() -> None:
    check_settings({"PATH": "/bin"})
    for mode in ("skip", "relax", "full"):
        check_settings({"VLLM_DEEP_GEMM_WARMUP": mode, "VLLM_DEEP_GEMM_OVERLAY": "0"})


def test_a_report_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a unit file or a pod's spec, `~` comes as it was written."""
    monkeypatch.setenv("HOME", "/home/op")
    given = {"VLLM_DEEP_GEMM_WARMUP_REPORT": "~/report.json"}
    assert read_settings(given).report == Path("/home/op/report.json")


def test_wrong_setting_ends_the_process(engine: Any) -> None:
    done = engine.start(REGISTER + "register()", VLLM_DEEP_GEMM_WARMUP="Relax")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ValueError: VLLM_DEEP_GEMM_WARMUP ('Relax'): unknown value; set one of "
        "skip, relax, full, or unset it"
    )


@pytest.mark.parametrize("value", ["off", ""])
def test_wrong_switch_ends_the_process(engine: Any, value: str) -> None:
    done = engine.start(REGISTER + "register()", VLLM_DEEP_GEMM_OVERLAY=value)
    assert done.returncode == 1
    assert "ValueError: VLLM_DEEP_GEMM_OVERLAY" in done.stderr


def test_off_is_off_for_our_settings_too(engine: Any) -> None:
    engine.run(
        REGISTER + "register()",
        VLLM_DEEP_GEMM_OVERLAY="0",
        VLLM_SKIP_DEEP_GEMM_WARMUP="1",
        VLLM_DEEP_GEMM_WARMUP_STRICT="yes",
    )


def test_settings_are_declared_to_vllm_and_are_no_compile_factor(engine: Any) -> None:
    code = REGISTER + (
        "register()\nfrom vllm import envs\n"
        "print(sorted(envs.environment_variables))\n"
        "print({f() for f in envs.environment_variables.values()})"
    )
    out = engine.run(code, VLLM_DEEP_GEMM_WARMUP_REPORT="/tmp/x")
    names = ["NVCC_TIMEOUT_S", "REPORT", "STRICT", "WORKERS"]
    warmup = [f"VLLM_DEEP_GEMM_WARMUP_{name}" for name in names]
    declared = ["VLLM_DEEP_GEMM_OVERLAY", *warmup]
    assert out.splitlines() == [str([*declared, "VLLM_PORT"]), "{None}"]


def test_nothing_is_said_when_all_is_well(engine: Any) -> None:
    assert engine.run(REGISTER + "register()") == ""


def test_stand_aside_is_one_warning_with_file_and_digests(
    engine: Any, overlaid: tuple[str, ...]
) -> None:
    change_base(engine, overlaid[2])
    (line,) = engine.run(REGISTER + "register()").splitlines()
    assert line.startswith("WARNING DeepGEMM warmup patch set stands aside, stock")
    assert f"vllm/{overlaid[2]} has sha256" in line
    assert "recorded is" in line
    assert "0.33.0" in line


def test_stand_aside_is_heard_before_logging_is_configured(
    engine: Any, overlaid: tuple[str, ...]
) -> None:
    change_base(engine, overlaid[0])
    code = "import vllm; from vllm_deep_gemm_warmup.plugin import register; register()"
    done = engine.start(code)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert "stands aside" in done.stderr


def test_switched_off_is_no_warning(engine: Any) -> None:
    out = engine.run(REGISTER + "register()", VLLM_DEEP_GEMM_OVERLAY="0")
    assert out.startswith("INFO ")
    assert "VLLM_DEEP_GEMM_OVERLAY=0" in out


def test_stand_aside_leaves_the_environment_alone(
    engine: Any, overlaid: tuple[str, ...]
) -> None:
    change_base(engine, overlaid[1])
    code = REGISTER + "register()\nimport os; print('CUDA_HOME' in os.environ)"
    out = engine.run(code, PATH="/nonexistent", CUDA_PATH="")
    assert out.splitlines()[-1] == "False"


def test_pth_that_did_not_run_is_said(engine: Any) -> None:
    (engine.site_packages / "vllm_deep_gemm_warmup.pth").unlink()
    out = engine.run(REGISTER + "register()")
    assert ".pth line did not run" in out


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["unknown base", "no nvcc on PATH"])
def test_eight_ranks_say_it_once(
    engine: Any, overlaid: tuple[str, ...], method: str, kind: str
) -> None:
    """API server, engine, eight workers: one line, or none of ours."""
    if kind == "unknown base":
        change_base(engine, overlaid[2])
    script = engine.site_packages.parent / "ranks.py"
    script.write_text(f"""{REGISTER}
import multiprocessing
def engine():
    register()
    context = multiprocessing.get_context({method!r})
    ranks = [context.Process(target=register) for _ in range(8)]
    [r.start() for r in ranks]; [r.join() for r in ranks]
    print('codes', *[r.exitcode for r in ranks], flush=True)
if __name__ == '__main__':
    register()
    process = multiprocessing.get_context({method!r}).Process(target=engine)
    process.start(); process.join()
""")
    code = (
        f"import os, sys; os.execv(sys.executable, [sys.executable, {str(script)!r}])"
    )
    *said, codes = engine.run(code, PATH="/nonexistent").splitlines()
    assert codes == "codes" + " 0" * 8
    assert len(said) == (1 if kind == "unknown base" else 0)


def test_another_host_and_another_message_are_heard() -> None:
    environ: dict[str, str] = {}
    assert plugin.claim_speech(environ, "a")
    assert not plugin.claim_speech(environ, "a")
    assert plugin.claim_speech(environ, "b")
    assert not plugin.claim_speech({"LOCAL_RANK": "1"}, "a")
    assert plugin.claim_speech({"LOCAL_RANK": "0"}, "a")


def test_toolchain_of_pip_is_set_for_this_process_and_its_children(
    engine: Any, tmp_path: Path
) -> None:
    home = engine.site_packages / "nvidia" / "cu13"
    for path, body in (
        (home / "bin" / "nvcc", "echo release 13.0, V13.0.88"),
        (tmp_path / "host" / "gcc", ""),
        (tmp_path / "host" / "g++", ""),
        (tmp_path / "host" / "sh", 'exec /bin/sh "$@"'),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    code = REGISTER + "register()\nimport os; print(os.environ.get('CUDA_HOME'))"
    environ = {
        "PATH": str(tmp_path / "host"),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "CUDA_HOME": "",
        "CUDA_PATH": "",
        "DG_JIT_NVCC_COMPILER": "",
    }
    links = engine.run(code, **environ)
    assert Path(links).parent == tmp_path / "cache" / "deep_gemm_warmup"
    assert engine.run(code, **environ | {"CUDA_HOME": "/mine"}) == "/mine"
    off = engine.run(code, **environ, VLLM_DEEP_GEMM_OVERLAY="0")
    assert off.splitlines()[1:] == []  # one line of ours, and CUDA_HOME left empty


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"VLLM_CACHE_ROOT": "/vllm-cache"},
            "/vllm-cache/flashinfer_deep_gemm",
        ),
        ({"TRTLLM_DG_CACHE_DIR": "/the/operator's"}, "/the/operator's"),
    ],
)
def test_flashinfer_s_kernels_lie_beside_deep_gemm_s(
    engine: Any,
    given: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRTLLM_DG_CACHE_DIR", raising=False)
    code = REGISTER + (
        "register()\nimport os\nprint(os.environ['TRTLLM_DG_CACHE_DIR'])"
    )
    assert engine.run(code, **given).strip() == expected


def test_switched_off_deep_gemm_leaves_the_environment_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRTLLM_DG_CACHE_DIR", raising=False)
    code = REGISTER + (
        "import os\nbefore = dict(os.environ)\nregister()\n"
        "print(before == dict(os.environ))"
    )
    assert engine.run(code, VLLM_USE_DEEP_GEMM="0") == "True"
    assert engine.run(code) == "False"


@pytest.mark.parametrize("device", ["a100", "mi300x", "some day"])
def test_a_device_without_deep_gemm_is_left_alone(
    engine: Any, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRTLLM_DG_CACHE_DIR", raising=False)
    given = {"DEVICE": device, "VLLM_CACHE_ROOT": str(tmp_path / "root")}
    code = REGISTER + (
        "import os\nbefore = dict(os.environ)\nregister()\n"
        "print(before == dict(os.environ))"
    )
    assert engine.run(code, **given) == "True"
    assert not (tmp_path / "root").exists()
    # What the operator said is read all the same.
    wrong = engine.start(code, **given, VLLM_DEEP_GEMM_WARMUP="Relax")
    assert "ValueError: VLLM_DEEP_GEMM_WARMUP" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100", None])
def test_the_device_is_known_without_cuda(device: str | None, tmp_path: Path) -> None:
    """With the real vLLM: CUDA would not outlive the fork of an engine."""
    root = tmp_path / "root"
    environ = {**standin.without(os.environ), "VLLM_CACHE_ROOT": str(root)}
    environ.pop("DG_JIT_CACHE_DIR", None)
    if device:
        environ = standin.environment(device, base_env=environ)
    code = (
        "import torch\nfrom vllm_deep_gemm_warmup.plugin import register\n"
        "register()\nprint(torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
    assert (root / "deep_gemm" / "cache").is_dir() == (device is not None)
