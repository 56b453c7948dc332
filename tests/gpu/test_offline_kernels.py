"""What the script for a GPU says and answers, on the stand-in and without a device."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_deep_gemm_warmup import standin
from vllm_deep_gemm_warmup.compiling.store import Context
from vllm_deep_gemm_warmup.kernel_caches import deep_gemm
from vllm_deep_gemm_warmup.offline.manifest import Manifest
from vllm_deep_gemm_warmup.proof import fake_nvcc
from vllm_deep_gemm_warmup.standin.environment import REAL_DRIVER

from . import offline_kernels
from .gemm_specs import GEMMS, LOGITS

HERE = Path(__file__).parent
MODELS = HERE.parent / "models"
# Of the CUDA driver's API.
INVALID_IMAGE, NO_BINARY_FOR_GPU = 200, 209
LIBRARY = offline_kernels.library_folder(None)
NO_GPU = pytest.mark.skipif(
    any(mark.exists() for mark in REAL_DRIVER), reason="there is a GPU here"
)
Done = subprocess.CompletedProcess[str]
Script = Callable[..., Done]


def without_vllm(folder: Path) -> dict[str, str]:
    """An environment beside the stand-in in which vLLM cannot be imported."""
    folder.mkdir()
    (folder / "vllm.py").write_text("raise ImportError('vLLM is not to be imported')")
    plain = standin.without(os.environ)
    paths = [str(folder), *filter(None, [plain.get("PYTHONPATH")])]
    return plain | {"PYTHONPATH": os.pathsep.join(paths)}


def run(environ: dict[str, str], program: str, *words: object) -> Done:
    return subprocess.run(
        [sys.executable, str(HERE / program), *map(str, words)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of kernels for 132 SMs, of every entry point that is called."""
    root = tmp_path_factory.mktemp("made")
    nvcc = fake_nvcc.install(root / "cuda" / "bin")
    environ = standin.environment(
        "h100", 1, root / "caches", without_vllm(root / "path"), over_real_driver=True
    )
    environ |= {
        "DG_JIT_CACHE_DIR": str(root / "kernels"),
        "DG_JIT_NVCC_COMPILER": str(nvcc),
        "CUDA_HOME": str(root / "cuda"),
    }
    done = run(environ, "offline_folder.py", root / "kernels", LIBRARY, nvcc)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made / "kernels", tmp_path / "kernels")


@pytest.fixture
def script(made: Path, tmp_path: Path) -> Script:
    """Run the script on the stand-in."""
    plain = without_vllm(tmp_path / "path")
    plain["CUDA_HOME"] = str(made / "cuda")

    def call(*words: object, device: str = "h100", library: Path = LIBRARY) -> Done:
        environ = standin.environment(
            device, 1, tmp_path / "caches", plain, over_real_driver=True
        )
        return run(environ, "offline_kernels.py", *words, "--library", library)

    return call


def rows(done: Done) -> dict[str, list[str]]:
    """The lines of the tables by their first cell."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {first: rest for first, *rest in cells}


def entries(folder: Path) -> list[str]:
    return sorted(deep_gemm(folder).entries())


def test_on_a_stand_in_calls_go_through_and_no_result_is_claimed(
    script: Script, folder: Path
) -> None:
    def facts() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = facts()
    done = script(folder, "--no-times")
    assert done.returncode == 3, done.stdout + done.stderr
    # A hit touches the entry of a cache.
    assert facts() == before
    table, count = rows(done), len(entries(folder))
    assert table["kernels that the driver takes"] == [f"{count} of {count}"]
    calls = sum(len(shapes) for _, shapes in GEMMS)
    assert table["GEMMs against float64"] == [
        f"not checked: {calls} calls on a GPU that is not there"
    ]
    assert table["kernels that had to be compiled"] == ["0"]
    assert table["fp8_gemm_nt N=256 K=512 1..40"] == ["3", "meaningless", "40"]
    assert "this is a stand-in and no GPU" in done.stdout
    assert "wrong" not in done.stdout


def test_damaged_kernels_are_named(script: Script, folder: Path) -> None:
    short, changed, *_ = entries(folder)
    path = folder / "cache" / short / "kernel.cubin"
    path.write_bytes(path.read_bytes()[:-100])
    path = folder / "cache" / changed / "kernel.cubin"
    path.write_bytes(path.read_bytes() + b"\0")
    # A device that the plan is not for: nothing is called, and this takes no time.
    done = script(folder, device="h20")
    assert done.returncode == 1
    refused = rf"- {short}: the driver does not take it: .* \(error {INVALID_IMAGE}\)"
    assert re.search(refused, done.stdout)
    for entry in (short, changed):
        assert f"- {entry}: not the kernel that was built" in done.stdout
    total = len(entries(folder))
    assert rows(done)["kernels that the driver takes"] == [f"{total - 1} of {total}"]


def test_a_missing_kernel_is_counted_as_a_compile(script: Script, folder: Path) -> None:
    gone = next(name for name in entries(folder) if name.startswith("sm90_fp8_gemm"))
    shutil.rmtree(folder / "cache" / gone)
    done = script(folder, "--no-times")
    assert done.returncode == 1
    assert rows(done)["kernels that had to be compiled"] == ["1"]
    assert f"- {gone}: it had to be compiled" in done.stdout
    assert f"- {gone}: missing" in done.stdout


def test_a_library_that_does_not_load_is_said_and_kernels_are_checked(
    script: Script, folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "deep_gemm"
    shutil.copytree(LIBRARY, broken, ignore=shutil.ignore_patterns("*.so", "include"))
    (broken / "_C_extension.abi3.so").write_bytes(b"of another torch")
    damaged = entries(folder)[0]
    (folder / "cache" / damaged / "kernel.cubin").write_bytes(b"")
    done = script(folder, library=broken)
    assert done.returncode == 1
    assert "the library does not load in this torch: OSError: " in done.stdout
    assert f"- {damaged}: the driver does not take it: " in done.stdout
    count = len(entries(folder))
    assert rows(done)["kernels that the driver takes"] == [f"{count - 1} of {count}"]
    assert "GEMMs against float64" not in rows(done)


def test_kernels_of_another_architecture_are_refused(
    script: Script, folder: Path
) -> None:
    done = script(folder, device="b200")
    assert done.returncode == 1
    count = len(entries(folder))
    assert rows(done)["kernels that the driver takes"] == [f"0 of {count}"]
    assert done.stdout.count(f"(error {NO_BINARY_FOR_GPU})") == count


def test_a_plan_for_more_sms_is_not_called(script: Script, folder: Path) -> None:
    done = script(folder, device="h20")
    assert done.returncode == 3
    assert "plan for sm90 and 132 SMs: this GPU is sm90 with 78" in done.stdout
    assert "GEMMs against float64" not in done.stdout


@NO_GPU
def test_without_a_gpu_one_line_says_so(folder: Path, tmp_path: Path) -> None:
    environ = without_vllm(tmp_path / "path")
    report = tmp_path / "report.md"
    done = run(
        environ, "offline_kernels.py", folder, "--library", LIBRARY, "--report", report
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("GPU: ")
    assert not report.exists()


def test_a_stand_in_s_report_is_not_kept(
    script: Script, folder: Path, tmp_path: Path
) -> None:
    done = script(folder, "--report", tmp_path / "report.md")
    assert done.returncode == 2
    assert done.stderr == "--report: this is a stand-in and no GPU\n"
    assert not (tmp_path / "report.md").exists()


def test_folders_that_are_none_are_refused(
    script: Script, folder: Path, tmp_path: Path
) -> None:
    done = script(tmp_path)
    assert done.returncode == 2
    assert "manifest.json" in done.stderr
    done = script(folder, library=tmp_path)
    assert done.returncode == 2
    assert "name its folder with --library" in done.stderr


@pytest.fixture
def plan() -> offline_kernels.Plan:
    """Of two GEMMs, without kernels."""
    context = Context(9, 0, 132, "", "", (), False)
    return offline_kernels.Plan(context, ((GEMMS[0][0], ()), (LOGITS, ())))


def judged(
    plan: offline_kernels.Plan, *events: dict[str, Any], standing_in: bool = False
) -> offline_kernels.Findings:
    found = offline_kernels.Findings()
    offline_kernels.called(events, found)
    offline_kernels.judge(events, plan, standing_in, found)
    return found


LOADED = {"library": "2.8.1"}
CALLED = {"gemm": 0, "shape": {"rows": 16}, "seconds": 0.1}


def test_on_a_gpu_results_are_right_or_wrong(plan: offline_kernels.Plan) -> None:
    good = judged(plan, LOADED, {**CALLED, "error": 2e-3})
    assert (good.status, good.gemms[0][2]) == (0, "2.0e-03")
    for wrong in (0.5, math.nan, math.inf):
        found = judged(plan, LOADED, {**CALLED, "error": wrong})
        assert found.status == 1
        (line,) = found.problems
        assert line.startswith("fp8_gemm_nt N=256 K=512 1..40 at rows 16: relative ")
        assert judged(plan, {**CALLED, "error": wrong}, standing_in=True).status == 0
    worst = judged(plan, {**CALLED, "error": 1e-3}, {**CALLED, "error": math.nan})
    assert worst.gemms[0][2] == "nan"


def test_what_fails_in_a_call_is_wrong_and_what_is_not_called_is_not_checked(
    plan: offline_kernels.Plan,
) -> None:
    failed = judged(plan, LOADED, {**CALLED, "failure": "an illegal address"})
    assert failed.status == 1
    died = judged(plan, LOADED, CALLED, {"ended": "it ended with -11: "})
    assert died.status == 1
    assert judged(plan, {"ended": "it ended with -11: "}).status == 3
    assert judged(plan, {"not_loaded": "ImportError: a symbol"}).status == 3
    left = judged(plan, LOADED, {"gemm": 1, "not_called": "no reference"})
    assert left.status == 3
    assert left.unchecked == [
        "fp8_fp4_mqa_logits 1..8: loaded and not called: no reference"
    ]
    assert left.gemms[1][2] == "not compared"


@pytest.mark.slow
def test_stock_and_ours_are_timed_in_one_run(script: Script, folder: Path) -> None:
    done = script(folder)
    assert done.returncode == 3, done.stdout + done.stderr
    times = [line for line in done.stdout.splitlines() if line.count("|") == 4]
    compiled = [line.split("|")[-2].strip() for line in times[-3:]]
    count = str(len(entries(folder)))
    assert compiled == ["0", count, count]
    assert "stock: " in times[-2] and "ours: " in times[-1]


def compile_offline(out: Path, device: str, *arguments: str) -> Manifest:
    """Build the kernels of Qwen3-0.6B with the real compiler."""
    command = [sys.executable, "-m", "vllm_deep_gemm_warmup.cli", "compile"]
    done = subprocess.run(
        [*command, str(MODELS / "qwen3-0.6b-fp8"), "--output", str(out),
            "--device", device, *arguments],
        env=standin.without(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Manifest.read(out)


@pytest.mark.slow
def test_kernels_of_the_real_compiler(tmp_path: Path) -> None:
    """A handful, as `compile` makes them; vLLM is there, and is not imported."""
    few = ("--max-num-batched-tokens=16", "--max-num-seqs=16", "--max-model-len=16")
    manifest = compile_offline(tmp_path / "out", "h100", *few)
    environ = standin.environment(
        "h100", 1, tmp_path / "caches", standin.without(os.environ),
        over_real_driver=True,
    )  # fmt: skip
    done = run(environ, "offline_kernels.py", tmp_path / "out", "--no-times")
    assert done.returncode == 3, done.stdout + done.stderr
    count = len(manifest.kernels)
    table = rows(done)
    assert table["kernels that the driver takes"] == [f"{count} of {count}"]
    assert table["kernels that had to be compiled"] == ["0"]
    assert "wrong" not in done.stdout


@pytest.mark.gpu
def test_kernels_built_offline_work_on_this_gpu(tmp_path: Path) -> None:
    """On a Hopper GPU; it has not been run on one."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    compile_offline(tmp_path / "out", str(sms), "--max-num-batched-tokens=1024")
    environ = standin.without(os.environ)
    done = run(environ, "offline_kernels.py", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr


@NO_GPU
def test_without_a_gpu_what_needs_one_is_skipped_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", HERE],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    outcome = done.stdout.splitlines()[-1]
    assert "skipped" in outcome
    assert "passed" not in outcome
    assert "it needs a real Hopper GPU" in done.stdout


def test_the_readme_says_whether_a_report_is_there() -> None:
    said = "There is no report yet" in (HERE.parents[1] / "README.md").read_text()
    assert said is not (HERE / "report.md").exists()
