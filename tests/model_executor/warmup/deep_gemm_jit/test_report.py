"""The report names what failed, what was left out and what was not heard of."""

import json
import os
import pathlib

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.calls import Call, describe_failure
from vllm.model_executor.warmup.deep_gemm_jit.plan import (
    Outcome,
    Plan,
    Registered,
    Skipped,
    Unregistered,
)
from vllm.model_executor.warmup.deep_gemm_jit.report import (
    Report,
    SpecResult,
    write_json,
)
from vllm.model_executor.warmup.deep_gemm_jit.spec import GemmSpec, Target

from .specs import linear_spec

SPEC = linear_spec(576, 7168)


def report(*outcomes: Outcome, calls: tuple[Call, ...] = ()) -> Report:
    results = (SpecResult(SPEC, ("layers.0.qkv",), calls),) if calls else ()
    return Report(Plan(outcomes, {}), results, 8192, "relax", Target(9, 0, 132), 1.25)


REGISTERED = Registered("layers.0.qkv", (SPEC,))
BUILT = Call(64, 2.0, ("sm90_fp8_gemm.0a", "transpose.0b"))
LOADED = Call(128, 0.001, ())


def test_one_line_when_all_is_well() -> None:
    well = report(REGISTERED, calls=(BUILT, LOADED))
    assert well.problems() == []
    assert well.summary() == (
        "DeepGEMM warmup: 1 layers, 1 shapes, 2 kernels built, 1.2 s"
    )


def test_a_full_cache_says_so() -> None:
    assert (
        "all kernels found in the cache"
        in report(REGISTERED, calls=(LOADED,)).summary()
    )


def test_a_failed_kernel_is_named_with_spec_rows_and_reason() -> None:
    failed = Call(192, 3.0, (), "nvcc exited with 1\n  see log")
    (line,) = report(REGISTERED, calls=(BUILT, failed)).problems()
    assert "fp8_gemm_nt N=576 K=7168" in line
    assert "M=192" in line
    assert "nvcc exited with 1 see log" in line
    assert "1 of 2 calls failed" in line
    (line,) = report(REGISTERED, calls=(failed,)).problems()
    assert "not warmed, all of 1 calls failed, first" in line


def test_calls_that_were_not_made_are_counted_and_on_file() -> None:
    failed = Call(192, 3.0, (), "nvcc exited with 1")
    result = SpecResult(SPEC, ("layers.0.qkv",), (BUILT, failed), (256, 320))
    plan = Plan((REGISTERED,), {})
    made = Report(plan, (result,), 8192, "relax", Target(9, 0, 132), 1.25)
    (line,) = made.problems()
    assert "1 of 2 calls failed, 2 were not made" in line
    assert made.to_json()["specs"][0]["left"] == [256, 320]


def test_a_reason_is_what_the_compiler_said_and_no_stack_frame() -> None:
    said = "command failed with exit code 1:\nnvcc kernel.cu\nerror: no"
    frames = "\nC++ trace (most recent call first):\n  #0 /lib/_C.so+0x1 f()"
    assert describe_failure(RuntimeError(said + frames)) == said
    assert describe_failure(MemoryError()) == "MemoryError"


def test_layers_that_did_not_register_are_named_once_a_reason() -> None:
    names = [f"layers.{i}.mlp" for i in range(5)]
    (line,) = report(
        REGISTERED, *(Unregistered(name, "hook bypassed") for name in names)
    ).problems()
    assert "layers.0.mlp" in line
    assert "and 2 more" in line
    assert "hook bypassed" in line


def test_a_block_fp8_model_without_any_registration_is_a_warning() -> None:
    skipped = report(Skipped("layers.0.mlp", "it runs on Marlin"))
    assert skipped.problems() == []
    (line,) = skipped.notices()
    assert "none is registered" in line
    assert "it runs on Marlin" in line


def test_skipped_layers_beside_registered_ones_are_no_problem() -> None:
    assert report(REGISTERED, Skipped("x", "is_bmm"), calls=(BUILT,)).problems() == []


def test_json_holds_the_counts_and_replaces_the_file_whole(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "new" / "report.json"
    failed = Call(192, 3.0, (), "nvcc exited with 1")
    write_json(report(REGISTERED, Skipped("x", "is_bmm"), calls=(BUILT, failed)), path)
    value = json.loads(path.read_text())
    assert value["layers"]["registered"] == 1
    assert value["layers"]["skipped"] == [{"name": "x", "reason": "is_bmm"}]
    assert value["kernels"] == {"built": 2, "failed": 1}
    (spec,) = value["specs"]
    assert GemmSpec.from_json({key: spec[key] for key in SPEC.to_json()}) == SPEC
    assert spec["failed"] == [{"rows": 192, "reason": "nvcc exited with 1"}]
    assert [path.name for path in path.parent.iterdir()] == ["report.json"]


def test_what_is_no_file_is_not_replaced(tmp_path: pathlib.Path) -> None:
    """A rename by root would take the place of /dev/null."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for place in (path, tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            write_json(report(REGISTERED, calls=(BUILT,)), place)
    assert path.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_leads_to_the_file_that_is_written(tmp_path: pathlib.Path) -> None:
    link, target = tmp_path / "link", tmp_path / "volume" / "report.json"
    link.symlink_to(target)
    for _ in range(2):
        write_json(report(REGISTERED, calls=(BUILT,)), link)
    assert link.is_symlink()
    assert json.loads(target.read_text())["layers"]["registered"] == 1


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_report_has_the_rights_of_any_new_file(
    tmp_path: pathlib.Path, mask: int
) -> None:
    before = os.umask(mask)
    try:
        write_json(report(REGISTERED, calls=(BUILT,)), tmp_path / "report.json")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    mode = (tmp_path / "report.json").stat().st_mode & 0o777
    assert mode == 0o666 & ~mask


def test_what_is_built_for_fewer_sms_says_so() -> None:
    failed = Call(64, 3.0, (), "nvcc exited with 1")
    less = SpecResult(SPEC, ("proj",), (failed,), target=Target(9, 0, 112))
    whole = SpecResult(SPEC, ("proj",), (BUILT,), target=Target(9, 0, 132))
    both = Report(
        Plan((REGISTERED,), {}), (whole, less), 8192, "relax", Target(9, 0, 132), 1.25
    )
    (line,) = both.problems()
    assert f"({SPEC} on 112 SMs): not warmed" in line
    assert "1 shapes, 132 and 112 SMs, 2 kernels built" in both.summary()
    targets = [spec["target"] for spec in both.to_json()["specs"]]
    assert targets == ["sm90-132sm", "sm90-112sm"]
