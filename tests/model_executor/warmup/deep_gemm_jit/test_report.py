"""The report names what failed, what was left out and what was not heard of."""

import html.parser
import json
import os
import pathlib

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.calls import Call, describe_failure
from vllm.model_executor.warmup.deep_gemm_jit.left_out import LEFT_OUT
from vllm.model_executor.warmup.deep_gemm_jit.plan import (
    LayerOutcome,
    Plan,
    Registered,
    Skipped,
    Unregistered,
)
from vllm.model_executor.warmup.deep_gemm_jit.report import text
from vllm.model_executor.warmup.deep_gemm_jit.report.coverage import (
    family_of,
    summarize,
)
from vllm.model_executor.warmup.deep_gemm_jit.report.document import to_json
from vllm.model_executor.warmup.deep_gemm_jit.report.files import write_report
from vllm.model_executor.warmup.deep_gemm_jit.report.values import (
    KernelState,
    Report,
    SpecResult,
    TakenKernel,
)
from vllm.model_executor.warmup.deep_gemm_jit.spec import EntryPoint, GemmSpec, Target

from .specs import grouped_spec, linear_spec

SPEC = linear_spec(576, 7168)


def report(*outcomes: LayerOutcome, calls: tuple[Call, ...] = ()) -> Report:
    plan = Plan(outcomes, {})
    results = (SpecResult(SPEC, plan.layers_of(SPEC), calls),) if calls else ()
    return Report(plan, results, 8192, "relax", Target(9, 0, 132), 1.25)


REGISTERED = Registered("layers.0.qkv", (SPEC,))
BUILT = Call(64, 2.0, ("sm90_fp8_gemm.0a", "transpose.0b"))
LOADED = Call(128, 0.001, ())


def test_one_line_when_all_is_well() -> None:
    well = report(REGISTERED, calls=(BUILT, LOADED))
    assert text.problems(well) == []
    assert text.summary(well) == (
        "DeepGEMM warmup complete, 2 kernels built, 1.2 s (1 layers, 1 shapes)"
    )


def test_a_full_cache_says_so() -> None:
    line = text.summary(report(REGISTERED, calls=(LOADED,)))
    assert "0 kernels built, all were there" in line


def test_the_closing_line_counts_what_failed() -> None:
    failed = Call(192, 3.0, (), "nvcc exited with 1")
    line = text.summary(report(REGISTERED, calls=(BUILT, failed)))
    assert "complete, 2 kernels built, 1 calls failed, " in line


def test_a_failed_kernel_is_named_with_spec_rows_and_reason() -> None:
    failed = Call(192, 3.0, (), "nvcc exited with 1\n  see log")
    (line,) = text.problems(report(REGISTERED, calls=(BUILT, failed)))
    assert "fp8_gemm_nt N=576 K=7168" in line
    assert "M=192" in line
    assert "nvcc exited with 1 see log" in line
    assert "1 of 2 calls failed" in line
    (line,) = text.problems(report(REGISTERED, calls=(failed,)))
    assert "not warmed, all of 1 calls failed, first" in line


def test_calls_that_were_not_made_are_counted_and_on_file() -> None:
    failed = Call(192, 3.0, (), "nvcc exited with 1")
    result = SpecResult(SPEC, ("layers.0.qkv",), (BUILT, failed), (256, 320))
    plan = Plan((REGISTERED,), {})
    made = Report(plan, (result,), 8192, "relax", Target(9, 0, 132), 1.25)
    (line,) = text.problems(made)
    assert "1 of 2 calls failed, 2 were not made" in line
    assert to_json(made)["specs"][0]["left"] == [256, 320]


def test_a_reason_is_what_the_compiler_said_and_no_stack_frame() -> None:
    said = "command failed with exit code 1:\nnvcc kernel.cu\nerror: no"
    frames = "\nC++ trace (most recent call first):\n  #0 /lib/_C.so+0x1 f()"
    assert describe_failure(RuntimeError(said + frames)) == said
    assert describe_failure(MemoryError()) == "MemoryError"


def test_layers_that_did_not_register_are_named_once_a_reason() -> None:
    names = [f"layers.{i}.mlp" for i in range(5)]
    silent = [Unregistered(name, "hook bypassed") for name in names]
    (line,) = text.problems(report(REGISTERED, *silent))
    assert "layers.0.mlp" in line
    assert "and 2 more" in line
    assert "hook bypassed" in line


def test_a_block_fp8_model_without_any_registration_is_a_warning() -> None:
    skipped = report(Skipped("layers.0.mlp", "it runs on Marlin"))
    assert text.problems(skipped) == []
    (line,) = text.notices(skipped)
    assert "none is registered" in line
    assert "it runs on Marlin" in line


def test_skipped_layers_beside_registered_ones_are_no_problem() -> None:
    beside = report(REGISTERED, Skipped("x", "is_bmm"), calls=(BUILT,))
    assert text.problems(beside) == []


GROUPED = grouped_spec()
FAILED = Call(192, 3.0, (), "nvcc exited with 1\nsecond line")


def mixed() -> Report:
    """Two entry points, two families that share a shape, all that can go wrong."""
    layers = [f"layers.{i}.self_attn.qkv_proj" for i in range(3)]
    outcomes: tuple[LayerOutcome, ...] = (
        *(Registered(name, (SPEC,)) for name in layers),
        Registered("layers.0.mlp.experts", (GROUPED,), adapter=True),
        Registered("layers.0.self_attn.o_proj", (SPEC,)),
        *(Skipped(f"layers.{i}.wo_a", "is_bmm") for i in range(2)),
        Unregistered("layers.0.mlp.down_proj", "hook <bypassed>"),
    )
    results = (
        SpecResult(
            SPEC,
            (*layers, "layers.0.self_attn.o_proj"),
            (BUILT, LOADED, FAILED),
            (256,),
        ),
        SpecResult(GROUPED, ("layers.0.mlp.experts",), (LOADED,)),
    )
    return Report(Plan(outcomes, {}), results, 8192, "relax", Target(9, 0, 132), 1.25)


def test_every_planned_call_is_one_of_four() -> None:
    plain, grouped = summarize(mixed()).entry_points
    assert plain.entry_point is EntryPoint.FP8_GEMM_NT
    tally = plain.tally
    assert (tally.planned, tally.hit, tally.built, tally.failed, tally.left) == (
        *(4, 1, 1, 1, 1),
    )
    assert (tally.kernels, plain.shapes) == (2, 1)
    assert (grouped.tally.planned, grouped.tally.hit) == (1, 1)


def test_layers_that_differ_in_numbers_are_one_family() -> None:
    plain, grouped = summarize(mixed()).entry_points
    assert [(family.name, family.layers) for family in plain.families] == [
        ("layers.*.self_attn.qkv_proj", 3),
        ("layers.*.self_attn.o_proj", 1),
    ]
    assert [family.by_adapter for family in grouped.families] == [True]
    assert family_of("mtp.0.layers.12.wo_a") == "mtp.*.layers.*.wo_a"


def test_what_is_left_out_and_not_reached_is_named() -> None:
    coverage = summarize(mixed())
    (rejected,), (silent,) = coverage.rejected, coverage.unregistered
    assert (rejected.family, rejected.layers) == ("layers.*.wo_a", 2)
    assert silent.reason == "hook <bypassed>"
    reached = {row.entry_point for row in coverage.entry_points}
    assert set(coverage.unreached) == set(EntryPoint) - reached != set()


@pytest.mark.parametrize("kind", [Skipped, Unregistered])
def test_an_entry_point_that_no_layer_plans_is_not_said_to_be_unreached(
    kind: type[Skipped] | type[Unregistered],
) -> None:
    einsum, few = EntryPoint.FP8_EINSUM, EntryPoint.FLASHINFER_FP8_BLOCKSCALE_GEMM
    made = report(REGISTERED, kind("0.wo_a", "odd", (einsum,)), calls=(BUILT,))
    coverage = summarize(made)
    assert few in coverage.unreached
    assert einsum not in coverage.unreached
    (group,) = coverage.rejected or coverage.unregistered
    assert (group.family, group.entry_points) == ("*.wo_a", (einsum,))
    layers = to_json(made)["layers"]
    (named,) = layers["skipped"] or layers["unregistered"]
    assert named["entry_points"] == (einsum,)


def test_a_spec_lists_its_kernels() -> None:
    (first, second, loaded, failed) = mixed().results[0].kernels
    assert first == TakenKernel("sm90_fp8_gemm.0a", KernelState.BUILT, 64, 2.0)
    assert second.name == "transpose.0b"
    assert (loaded.name, loaded.state) == (None, KernelState.HIT)
    assert failed.state is KernelState.FAILED
    assert failed.reason == FAILED.failure


def test_the_table_says_all_of_it() -> None:
    screen = text.screen(mixed())
    (qkv,) = [line for line in screen.splitlines() if "3 x layers.*.self" in line]
    assert qkv.split()[3:] == ["4", "1", "1", "1", "1", "2", "5.0"]
    assert "layers.*.mlp.experts (adapter)" in screen
    assert "not registered: 1 x layers.*.mlp.down_proj: hook <bypassed>" in screen
    assert "left out: 2 x layers.*.wo_a: is_bmm" in screen
    assert "not reached by this model: " in screen


@pytest.mark.parametrize("layers", [1, 100])
@pytest.mark.parametrize("silent", [1, 100])
def test_the_table_fits_a_screen(layers: int, silent: int) -> None:
    long = "a.name.that.is.far.too.long.for.any.column.of.a.table.on.a.screen"
    outcomes: list[LayerOutcome] = [
        *(Registered(f"{long}.proj{i}", (SPEC,)) for i in range(layers)),
        *(Unregistered(f"{long}.silent{i}", "reason " * 40) for i in range(silent)),
    ]
    lines = text.screen(report(*outcomes, calls=(BUILT, FAILED))).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert ("lines more" in "".join(lines)) == (max(layers, silent) > 1)
    assert any("not registered" in line for line in lines)


class Page(html.parser.HTMLParser):
    """The text of a page, its tags with their attributes, and those left open."""

    VOID = ("meta", "link", "br", "img", "hr", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def page(tmp_path: pathlib.Path) -> Page:
    write_report(mixed(), tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text())


def test_the_page_is_whole_and_has_a_labelled_bar_for_each_entry_point(
    page: Page,
) -> None:
    assert page.open == []
    bars = [attrs for _, attrs in page.tags if attrs.get("class") == "bar"]
    assert [bar["role"] for bar in bars] == ["img", "img"]
    assert bars[0]["aria-label"] == (
        "fp8_gemm_nt, 4 calls planned: 1 hit, 1 built, 1 failed, 1 left"
    )
    styles = [attrs["style"] for _, attrs in page.tags if "style" in attrs]
    assert styles[:4] == ["flex: 1"] * 4
    assert "width: 100.0%" in styles


def test_the_page_says_what_the_table_says(page: Page) -> None:
    for said in (
        *("layers.*.self_attn.qkv_proj", "layers.*.mlp.experts (adapter)"),
        *("hook <bypassed>", "is_bmm", "sm90_fp8_gemm.0a", "transpose.0b", "2.00"),
        *("nvcc exited with 1 second line", "Not reached by this model: "),
    ):
        assert said in page.text, said


@pytest.mark.parametrize("function", LEFT_OUT)
def test_functions_that_are_knowingly_not_warmed_are_printed(
    function: str, page: Page
) -> None:
    """G03: the table has their numbers and reasons, the page each of them."""
    assert function in page.text
    *_, line = text.screen(mixed()).splitlines()
    assert LEFT_OUT[function] in line
    alike = [name for name, why in LEFT_OUT.items() if why == LEFT_OUT[function]]
    assert f"{len(alike)} {LEFT_OUT[function]}" in line
    assert not line.endswith("...")


def test_the_page_loads_nothing_and_runs_nothing(page: Page) -> None:
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    assert not any({"src", "href"} & attrs.keys() for _, attrs in page.tags)
    policies = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_a_start_without_any_kernel_has_a_page(tmp_path: pathlib.Path) -> None:
    write_report(report(Skipped("x", "is_bmm")), tmp_path / "report.HTML")
    assert "No kernel was built." in (tmp_path / "report.HTML").read_text()


def test_json_holds_the_counts_and_replaces_the_file_whole(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "new" / "report.json"
    failed = Call(192, 3.0, (), "nvcc exited with 1")
    write_report(
        report(REGISTERED, Skipped("x", "is_bmm"), calls=(BUILT, failed)), path
    )
    value = json.loads(path.read_text())
    assert value["layers"]["registered"] == 1
    assert value["layers"]["skipped"] == [
        {"name": "x", "reason": "is_bmm", "entry_points": []}
    ]
    assert value["kernels"] == {"built": 2, "failed": 1, "unconfirmed": 0}
    (row,) = value["coverage"]["entry_points"]
    assert (row["entry_point"], row["tally"]["failed"]) == ("fp8_gemm_nt", 1)
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
            write_report(report(REGISTERED, calls=(BUILT,)), place)
    assert path.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_leads_to_the_file_that_is_written(tmp_path: pathlib.Path) -> None:
    link, target = tmp_path / "link", tmp_path / "volume" / "report.json"
    link.symlink_to(target)
    for _ in range(2):
        write_report(report(REGISTERED, calls=(BUILT,)), link)
    assert link.is_symlink()
    assert json.loads(target.read_text())["layers"]["registered"] == 1


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_report_has_the_rights_of_any_new_file(
    tmp_path: pathlib.Path, mask: int
) -> None:
    before = os.umask(mask)
    try:
        write_report(report(REGISTERED, calls=(BUILT,)), tmp_path / "report.json")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    mode = (tmp_path / "report.json").stat().st_mode & 0o777
    assert mode == 0o666 & ~mask


def test_what_was_built_for_no_layer_is_counted_and_is_no_problem(
    tmp_path: pathlib.Path,
) -> None:
    reason = "announced at construction, confirmed by no layer"
    calls = (
        Call(32, 2.0, ("gemm.0c",)),
        Call(64, 0.0, ()),
        Call(96, 1.0, (), "nvcc exited with 1"),
    )
    extra = SpecResult(linear_spec(2048, 4096), (), calls, unconfirmed=reason)
    whole = SpecResult(SPEC, ("layers.0.qkv",), (BUILT,))
    plan = Plan((REGISTERED,), {})
    made = Report(plan, (whole, extra), 8192, "relax", Target(9, 0, 132), 1.25)
    assert text.problems(made) == []
    said = text.summary(made)
    assert "complete, 3 kernels built, 1 of them for no layer, " in said
    assert "1 shapes" in said
    line = f"for no layer: {extra.spec}: 3 kernels, 1 built: {reason}"
    (shown,) = [row for row in text.screen(made).splitlines() if "for no" in row]
    assert line.startswith(shown.removesuffix("..."))
    value = to_json(made)
    assert value["kernels"] == {"built": 3, "failed": 0, "unconfirmed": 1}
    assert [spec["unconfirmed"] for spec in value["specs"]] == [None, reason]
    write_report(made, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert page.open == []
    assert "For no layer" in page.text
    assert reason in page.text


def test_what_is_built_for_fewer_sms_says_so() -> None:
    failed = Call(64, 3.0, (), "nvcc exited with 1")
    less = SpecResult(SPEC, ("proj",), (failed,), target=Target(9, 0, 112))
    whole = SpecResult(SPEC, ("proj",), (BUILT,), target=Target(9, 0, 132))
    both = Report(
        Plan((REGISTERED,), {}), (whole, less), 8192, "relax", Target(9, 0, 132), 1.25
    )
    (line,) = text.problems(both)
    assert f"({SPEC} on 112 SMs): not warmed" in line
    assert "1 shapes, 132 and 112 SMs" in text.summary(both)
    targets = [spec["target"] for spec in to_json(both)["specs"]]
    assert targets == ["sm90-132sm", "sm90-112sm"]
