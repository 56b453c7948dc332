"""The start-up benchmark against a fake server: both sides in one run, one ratio."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).with_name("start_up.py")
FAKE_VLLM = Path(__file__).parents[1] / "proof" / "fake_vllm.py"


def start_up(tmp_path: Path, **script: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "config.json").write_text('{"vocab_size": 32}')
    command = [
        sys.executable, str(BENCHMARK), str(tmp_path), "--device=real",
        f"--vllm={FAKE_VLLM}", "--max-num-batched-tokens=64",
    ]  # fmt: skip
    return subprocess.run(
        command,
        env={**os.environ, "FAKE_VLLM": json.dumps(script)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_sides_are_run_and_compared(tmp_path: Path) -> None:
    done = start_up(tmp_path, kernels=[(4096, 1024)])

    assert done.returncode == 0, done.stderr
    assert "vLLM as it is" in done.stdout and "this patch set" in done.stdout
    *_, ready, answer, before, _, after, _ = done.stdout.splitlines()
    assert ready.startswith("| seconds to ready |")
    assert answer.startswith("| seconds to the first answer |")
    assert before == "| DeepGEMM kernels before ready | 1 | 1 | |"
    assert after == "| DeepGEMM kernels after ready | 0 | 0 | |"


def test_a_side_that_fails_gives_no_ratio(tmp_path: Path) -> None:
    done = start_up(tmp_path, kernels=[(4096, 1024)], bad={"17": "status"})

    assert done.returncode == 1
    assert "stock / ours" not in done.stdout
