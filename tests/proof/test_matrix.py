"""The matrix: which runs it holds, and that it takes up where it was left."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.proof import matrix, rows, run
from vllm_deep_gemm_warmup.proof.settings import Settings


def row(settings: Settings, commit: str, late: tuple[str, ...] = ()) -> str:
    result = run.Result(
        settings=settings.facts(), base="0.33.0", commit=commit, nvcc="declared fake",
        layers=8, unregistered=(), failed=(), deep_gemm_found=0, deep_gemm_before=40,
        deep_gemm_after=late, flashinfer_found=0, flashinfer_before=0,
        flashinfer_after=(), warm_when_ready=True,
        asked=1019, right=1019, wrong=(), ready_seconds=41.0,
        first_request_seconds=0.5, request_seconds=9.0,
    )  # fmt: skip
    return json.dumps(asdict(result)) + "\n"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 32}')
    (tmp_path / "README.md").touch()
    return tmp_path


COMMIT = "0123456789ab"


@pytest.fixture(autouse=True)
def clean_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a changed tree would not be taken from the file."""
    monkeypatch.setattr(run, "commit", lambda: COMMIT)


def arguments(models: Path, rows: Path) -> list[str]:
    return [str(models), f"--rows={rows}", "--only=two", "--kernel=deep_gemm"]


def cells(models: Path) -> list[Settings]:
    template = Settings(model=models, nvcc="fake")
    return [
        cell
        for cell in matrix.cells([models / "two"], template, full=False)
        if cell.kernel == "deep_gemm"
    ]


def test_every_folder_meets_every_device_mode_and_kernel(models: Path) -> None:
    folders = [models / "one", models / "two"]

    found = matrix.cells(folders, Settings(model=models), full=True)

    keys = {(c.model, c.device, c.mode, c.runner, c.kernel) for c in found}
    assert len(keys) == len(found) == 2 * 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("late", "status"), [((), 0), (("sm90_gemm<576>",), 1)], ids=["proved", "late"]
)
def test_runs_on_file_are_not_repeated(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    late: tuple[str, ...],
    status: int,
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [row(cell, COMMIT, late) for cell in cells(models)]
    rows.write_text("".join(lines) + '{"cut off')

    assert matrix.main(arguments(models, rows)) == status

    table = capsys.readouterr().out.splitlines()
    after = str(len(late))
    assert table[2].split(" | ")[:9] == [
        "| two", "h100", "eager", "v2", "deep_gemm", "overlay", "8", "40", after,
    ]  # fmt: skip
    assert len(table) == 2 + 4 + 1 + 2 + 1
    cell = "failed" if late else "40 / 0"
    assert table[-1] == (
        f"| two | deep_gemm | v2 | overlay |{f' {cell} |' * 4} {COMMIT} |"
    )
    assert table[-3] == (
        "| model | kernel | runner | side | h100 eager | h20 eager | h100 graphs "
        "| h20 graphs | commit |"
    )


def test_what_stands_after_two_dashes_goes_to_every_server(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    extra = ("--moe-backend", "deep_gemm")
    on_file = [replace(cell, extra=extra) for cell in cells(models)]
    rows.write_text("".join(row(cell, COMMIT) for cell in on_file))

    assert matrix.main([*arguments(models, rows), "--", *extra]) == 0

    table = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| two --moe-backend deep_gemm | h100 |")
    assert table[-1].startswith("| two --moe-backend deep_gemm | deep_gemm | v2 |")


def test_a_folder_without_models_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.main([str(tmp_path)]) == 2
    assert "no folder with config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("commit", "kept"), [(COMMIT, 4), ("unknown", 0), (f"{COMMIT}+", 0)]
)
def test_a_row_of_code_that_no_commit_names_is_run_again(
    models: Path, tmp_path: Path, commit: str, kept: int
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(row(cell, commit) for cell in cells(models)))

    assert len(rows.on_file(file, commit)) == kept


def test_the_rows_file_does_not_make_the_checkout_a_changed_one() -> None:
    ignored = Path(__file__).parents[2] / ".gitignore"
    assert "/matrix.jsonl" in ignored.read_text().splitlines()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--device=b200", "invalid choice: 'b200'"),
        ("--max-num-batched-tokens=0", "0 is not at least 1"),
    ],
)
def test_a_matrix_without_a_run_is_refused(
    models: Path, capsys: pytest.CaptureFixture[str], option: str, reason: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        matrix.main([str(models), option])
    assert reason in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.main([str(models), "--only=two", "--only=tow"]) == 2
    assert "no folder tow with" in capsys.readouterr().err


def test_rows_that_cannot_be_written_are_found_out_first(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = models / "README.md"
    assert run.main(["--matrix", str(models), f"--rows={file / 'rows'}"]) == 2
    assert f"folder ({file})" in capsys.readouterr().err
