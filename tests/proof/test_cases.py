"""The table of entry points: a row a case, stock beside ours, from one file."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.proof import cases, environment, run
from vllm_deep_gemm_warmup.proof.settings import Settings, UsageError

COMMIT = "0123456789ab"
FILE = Path(__file__).parents[1] / "models" / "cases.toml"
TWO = """
[[case]]
name = "linear layers"
prove = ["one", "--kernel=deep_gemm", "--tp=2", "--", "--moe-backend=deep_gemm"]

[[case]]
name = "green contexts"
reason = "vLLM uses none"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "commit", lambda: COMMIT)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text('{"vocab_size": 32}')
    path = tmp_path / "cases.toml"
    path.write_text(TWO)
    return path


def row(settings: Settings, late: int) -> str:
    result = run.Result(
        settings=settings.facts(), base="0.33.0", commit=COMMIT, nvcc="declared fake",
        layers=8, unregistered=(), failed=(), deep_gemm_found=0, deep_gemm_before=40,
        deep_gemm_after=tuple(map(str, range(late))), flashinfer_found=0,
        flashinfer_before=2, flashinfer_after=(), warm_when_ready=True,
        asked=1019, right=1019, wrong=(), ready_seconds=41.0,
        first_request_seconds=0.5, request_seconds=9.0,
    )  # fmt: skip
    return json.dumps(asdict(result)) + "\n"


@pytest.mark.parametrize("late", [0, 1])
def test_a_case_is_one_row_with_both_sides(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], late: int
) -> None:
    (first, _) = cases.load(file)
    assert first.settings is not None
    ours = replace(first.settings, nvcc="fake")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(row(replace(ours, stock=True), 5) + row(ours, late))

    assert run.main(["--cases", str(file), f"--rows={rows}"]) == late

    *_, one, two = capsys.readouterr().out.splitlines()
    assert one == (
        f"| linear layers | 5 | {late} | `one --device=h100 --mode=eager "
        "--runner=v2 --kernel=deep_gemm --tp=2 -- --moe-backend=deep_gemm` |"
    )
    assert two == "| green contexts | | | vLLM uses none |"


def test_a_case_can_count_some_kernels_of_a_run_that_is_run_once(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = TWO.replace("green contexts", "the fourth").replace(
        'reason = "vLLM uses none"', TWO.split("\n")[3] + "\nkernels = '^[34]$'"
    )
    file.write_text(twice)
    (first, second) = cases.load(file)
    assert first.settings == second.settings
    assert first.settings is not None
    ours = replace(first.settings, nvcc="fake")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(row(replace(ours, stock=True), 5) + row(ours, 0))

    assert run.main(["--cases", str(file), f"--rows={rows}"]) == 0

    *_, one, two = capsys.readouterr().out.splitlines()
    assert one.startswith("| linear layers | 5 | 0 |")
    assert two.startswith("| the fourth | 2 | 0 |")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[case]]\nname = 'x'",
        "[[case]]\nname = 'x'\nprove = []",
        "case = [",
        "[[case]]\nname = 'x'\nprove = ['one']\nenvironment = 1",
        "[[case]]\nname = 'x'\nprove = ['one']\nenvironment = {A = 1}",
    ],
    ids=["empty", "no run", "no model", "no TOML", "no table", "no text"],
)
def test_a_file_of_another_form_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match="give each"):
        cases.load(file)


def test_a_case_can_set_variables_of_its_servers(file: Path, tmp_path: Path) -> None:
    file.write_text(TWO.replace('deep_gemm"]', "deep_gemm\"]\nenvironment = {A = '1'}"))
    first, _ = cases.load(file)
    assert first.settings is not None
    assert first.settings.environment == (("A", "1"),)
    assert first.settings.facts()["environment"] == {"A": "1"}
    where = environment.caches(first.settings, tmp_path, tmp_path)
    settings = replace(first.settings, device="real", nvcc="real")
    served = environment.server_environment(settings, where, {"A": "0", "B": "2"})
    assert (served["A"], served["B"]) == ("1", "2")
    rows = {
        replace(first.settings, stock=side): json.loads(row(first.settings, 0))
        for side in (True, False)
    }
    assert "| `A=1 one --device=h100 " in cases.markdown([first], rows)


def test_a_name_that_no_case_has_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--cases", str(file), "--only=gloves"]) == 2
    assert "none has 'gloves' in it" in capsys.readouterr().err


def test_the_cases_of_this_repository_name_folders_that_are_there() -> None:
    found = cases.load(FILE)
    assert len({case.name for case in found}) == len(found)
    for case in found:
        if case.settings is not None:
            assert (case.settings.model / "config.json").is_file(), case.name
        for name in re.findall(r"`(test_\w+\.py)`", case.reason):
            assert list(FILE.parents[1].rglob(name)), case.name
