"""The proof: the real `vllm serve` on the stand-in, nothing built after ready."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parents[1] / "models"
SMALL = "qwen3-0.6b-fp8"
OTHERS = sorted(
    path.parent.name
    for path in MODELS.glob("*/config.json")
    if path.parent.name != SMALL
)
Prove = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="the base is not installed: pip install -r requirements/base.txt",
)


@pytest.fixture
def prove(
    bare_environment: Mapping[str, str], other_caches: Path, tmp_path: Path
) -> Prove:
    """Run the command as a user does; return the result, which must be a proof.

    The engine is forked where the test does not ask for `spawn`, which is what
    `vllm serve` does by itself: half a minute less of imports.
    """

    def run(
        model: str, *more: str, start: str = "fork", nvcc: str = "fake"
    ) -> dict[str, Any]:
        result = tmp_path / "result.json"
        command = [
            sys.executable, "-m", "vllm_deep_gemm_warmup.proof.run",
            str(MODELS / model), f"--nvcc={nvcc}", f"--json={result}",
            f"--other-caches={other_caches}", *more,
        ]  # fmt: skip
        environ = dict(bare_environment) | {"VLLM_WORKER_MULTIPROC_METHOD": start}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        loaded: dict[str, Any] = json.loads(result.read_text())
        assert loaded["right"] == loaded["asked"] == 463 + 556
        return loaded

    return run


def check(result: dict[str, Any]) -> None:
    assert result["layers"] > 0
    assert result["deep_gemm_before"] > 0
    assert result["deep_gemm_after"] == []


@pytest.mark.parametrize(
    ("mode", "runner", "start"),
    [
        ("eager", "v2", "spawn"),
        ("graphs", "v2", "fork"),
        ("eager", "v1", "fork"),
        pytest.param("graphs", "v1", "fork", marks=pytest.mark.slow),
    ],
)
def test_one_folder_in_every_mode(
    prove: Prove, mode: str, runner: str, start: str
) -> None:
    modes = (f"--mode={mode}", f"--runner={runner}", "--kernel=deep_gemm")

    check(prove(SMALL, *modes, start=start))


@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("graphs", marks=pytest.mark.slow)]
)
def test_the_default_kernel_choice(prove: Prove, mode: str) -> None:
    result = prove(SMALL, f"--mode={mode}")

    check(result)
    built = result["flashinfer_before"] + len(result["flashinfer_after"])
    assert built > 0  # of FlashInfer's own, counted apart


@pytest.mark.parametrize(
    ("model", "device"),
    [(model, ("h100", "h20")[number % 2]) for number, model in enumerate(OTHERS)],
)
def test_every_other_folder(prove: Prove, model: str, device: str) -> None:
    check(prove(model, f"--device={device}", "--kernel=deep_gemm"))


def test_the_real_compiler_that_the_requirements_brought(prove: Prove) -> None:
    # 64 rows: three classes of rows, a few kernels, each a real Hopper cubin.
    limit = "--max-num-batched-tokens=64"

    result = prove(SMALL, "--kernel=deep_gemm", limit, nvcc="real")

    check(result)
    compiler = result["nvcc"].removeprefix("real: ").split()[0]
    assert Path(compiler).is_absolute()
    assert not compiler.startswith("/usr")


@pytest.mark.slow
def test_two_ranks(prove: Prove) -> None:
    check(prove(SMALL, "--tp=2", "--kernel=deep_gemm", start="spawn"))


@pytest.mark.slow
def test_a_full_cache_builds_nothing(prove: Prove, tmp_path: Path) -> None:
    kept = (f"--keep-cache={tmp_path / 'kept'}", "--kernel=deep_gemm")
    first = prove(SMALL, *kept)

    second = prove(SMALL, *kept)

    assert second["deep_gemm_found"] == first["deep_gemm_before"] > 0
    assert second["deep_gemm_before"] == 0
    assert second["deep_gemm_after"] == []


@pytest.mark.slow
def test_stock_is_one_switch_away(prove: Prove) -> None:
    result = prove(SMALL, "--stock", "--kernel=deep_gemm")

    assert result["layers"] is None
    assert result["deep_gemm_before"] > 0
