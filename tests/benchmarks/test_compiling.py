"""The compiling benchmark's parts; what stock and ours take is not tested."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).with_name("compiling.py")


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("compiling_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_builds_are_counted_with_their_cpu_seconds_and_questions_are_not(
    benchmark: Any, tmp_path: Path
) -> None:
    home = benchmark.write_compiler(tmp_path, benchmark.Case(nvcc_seconds=0.0))
    nvcc, source = home / "bin" / "nvcc", tmp_path / "kernel.cu"
    source.write_text("")
    build = [nvcc, source, "--cubin", "-o", tmp_path / "kernel.cubin"]
    subprocess.run([nvcc, "--version"], check=True, stdout=subprocess.DEVNULL)
    assert list((tmp_path / "compiled").iterdir()) == []
    for _ in range(2):
        subprocess.run(build, check=True)
    assert (tmp_path / "kernel.cubin").is_file()
    kept = [path.read_text() for path in (tmp_path / "compiled").iterdir()]
    runs = [seconds for text in kept for seconds in benchmark.cpu_seconds(text)]
    assert len(runs) == 2
    assert all(seconds > 0 for seconds in runs)


def test_a_build_that_fails_fails(benchmark: Any, tmp_path: Path) -> None:
    home = benchmark.write_compiler(tmp_path, benchmark.Case(nvcc_seconds=0.0))
    build = [home / "bin" / "nvcc", tmp_path / "absent.cu", "--cubin", "-o", "x"]
    done = subprocess.run(build, check=False, stderr=subprocess.DEVNULL)
    assert done.returncode != 0


def test_cpu_seconds_are_the_children_s_of_every_shell(benchmark: Any) -> None:
    one = "0m9.00s 0m9.00s\n1m0.50s 0m0.25s\n"
    assert benchmark.cpu_seconds(one) == [60.75]
    assert benchmark.cpu_seconds(2 * one) == [60.75, 60.75]


@pytest.mark.parametrize(("value", "word"), [(0.125, "met"), (0.126, "missed")])
def test_a_ratio_is_printed_with_its_goal(
    benchmark: Any, value: float, word: str
) -> None:
    line = benchmark.verdict("ours / stock", value, 1 / 8)
    assert line == f"ours / stock: {value:.3f}, goal at most 0.125: {word}"


def test_what_was_left_out_is_said(benchmark: Any) -> None:
    whole = benchmark.Benchmark(("stock", "ours"), None, None)
    assert list(whole.left_out()) == []
    part = "\n".join(benchmark.Benchmark(("ours",), 1, None).left_out())
    assert "Without stock" in part
    assert "no figures" in part


def test_no_ratio_without_its_other_side(benchmark: Any) -> None:
    ours = benchmark.Measured(10.0, 9.0, 1.0, 91, 91, 0.0)
    stock = dataclasses.replace(ours, seconds=100.0)
    both = {"stock": stock, "ours": ours}
    assert list(benchmark.shares(both, 1 / 8)) == [
        "ours / stock: 0.100, goal at most 0.125: met"
    ]
    assert list(benchmark.shares({"ours": ours}, 1 / 8)) == []


def test_a_case_that_is_not_there_is_named() -> None:
    done = run("absent")
    assert done.returncode == 2
    assert "no such case (absent)" in done.stderr
