"""What is built without a GPU and weights is what an engine of them asks for."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_deep_gemm_warmup import standin
from vllm_deep_gemm_warmup.kernel_caches import FOLDER, deep_gemm
from vllm_deep_gemm_warmup.offline import build
from vllm_deep_gemm_warmup.offline.ask import Needs, ask, ask_in
from vllm_deep_gemm_warmup.offline.manifest import Manifest
from vllm_deep_gemm_warmup.proof import environment, fake_nvcc, run, server
from vllm_deep_gemm_warmup.proof.settings import Settings

from ..processes import family_of
from .runs import MODELS

SMALL = MODELS / "qwen3-0.6b-fp8"
EIGHT = ("--tensor-parallel-size", "8")
Verb = Callable[..., subprocess.CompletedProcess[str]]
# DeepGEMM alone, so that the host does not matter.
ALONE = {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}


@pytest.fixture(scope="module")
def environ() -> Mapping[str, str]:
    """The environment of a machine without a GPU."""
    return standin.without(os.environ)


@pytest.fixture(scope="module")
def asked(
    environ: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Needs, Path]:
    """Of eight tensor-parallel ranks, and the folder in which they were asked."""
    scratch = tmp_path_factory.mktemp("asked")
    return ask_in(scratch, [str(SMALL), *EIGHT], "h100", environ), scratch


@pytest.fixture(scope="module")
def needs(asked: tuple[Needs, Path]) -> Needs:
    """Of eight tensor-parallel ranks."""
    return asked[0]


@pytest.fixture
def verb(environ: Mapping[str, str], tmp_path: Path) -> Verb:
    """Run a verb of the command with the declared fake compiler."""
    fake_nvcc.install(tmp_path / "cuda" / "bin")
    given = {**environ, **ALONE, "CUDA_HOME": str(tmp_path / "cuda")}

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "vllm_deep_gemm_warmup.cli", *map(str, words)],
            env=given,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def shapes(needs: Needs) -> set[tuple[int, int, int, int]]:
    return {
        (spec["n"], spec["k"], spec["rows"]["first"], spec["rows"]["last"])
        for spec in needs.specs
    }


@pytest.mark.slow
def test_config_json_is_enough(needs: Needs) -> None:
    """G45: every shape of one of eight ranks, for hosts with and without an nvcc."""
    assert [path.name for path in SMALL.iterdir()] == ["config.json"]
    gemms = {(512, 1024), (1024, 256), (768, 1024), (1024, 384)}
    # One row alone: its scale has another layout where SiLU is fused with it.
    rows = {(1, 8192), (32, 8192), (1, 1)}
    assert shapes(needs) == {(*gemm, *span) for gemm in gemms for span in rows}
    assert len(needs.elsewhere) == 4
    assert needs.target == "sm90-132sm"
    assert needs.unregistered == ()
    assert Needs.from_json(json.loads(json.dumps(needs.to_json()))) == needs


def test_who_is_asked_begins_nothing(asked: tuple[Needs, Path]) -> None:
    """Constructed layers make an engine plan and build."""
    _, scratch = asked
    made = {path.name for path in scratch.rglob("*") if path.is_dir()}
    assert "caches" in made
    assert FOLDER not in made
    assert deep_gemm(scratch / "caches" / "deep_gemm").entries() == frozenset()


def begin(
    folder: Path, needs: Needs, arguments: tuple[str, ...] = EIGHT
) -> tuple[str, ...]:
    """Leave a folder as a `compile` that was killed before its first build."""
    serving = build.Serving(str(SMALL), "h100", arguments)
    build._begin(folder, serving, needs)
    return (str(SMALL), "--output", str(folder), *arguments)


@pytest.mark.slow
def test_compile_builds_all_goes_on_and_says_what_it_did(
    needs: Needs, verb: Verb, tmp_path: Path
) -> None:
    command = begin(tmp_path / "out", needs)
    done = verb("compile", *command)
    assert done.returncode == 0, done.stderr
    manifest = Manifest.read(tmp_path / "out")
    assert list(manifest.problems(tmp_path / "out")) == []
    assert set(manifest.kernels) == deep_gemm(tmp_path / "out").entries()
    kinds = {entry.partition(".")[0] for entry in manifest.kernels}
    assert kinds == {"sm90_fp8_gemm_1d2d", "transpose_fp32"}
    assert manifest.arguments == EIGHT
    # Damaged since, and built again by the same command.
    lost = sorted(manifest.kernels)[0]
    (tmp_path / "out" / "cache" / lost / "kernel.cubin").write_bytes(b"")
    done = verb("compile", *command)
    assert "1 built now, 0 problems" in done.stdout
    assert verb("status", tmp_path / "out").returncode == 0
    # Another model does not come into the same folder.
    done = verb("compile", MODELS / "qwen3-8b-fp8", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "not empty" in done.stderr


def test_what_cannot_be_compiled_is_one_line_and_nothing_is_written(
    verb: Verb, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    for words in (
        (SMALL, "--output", tmp_path / "out", "--device", "h900"),
        (SMALL, "--output", full),
    ):
        done = verb("compile", *words)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert [path.name for path in full.iterdir()] == ["notes"]


@pytest.mark.slow
def test_a_model_without_block_fp8_and_bad_arguments_are_refused(
    verb: Verb, tmp_path: Path
) -> None:
    config = json.loads((SMALL / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    done = verb("compile", tmp_path / "model", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "no layer has block-FP8 weights" in done.stderr.splitlines()[-1]
    done = verb("compile", SMALL, "--output", tmp_path / "out", "--no-such-option")
    assert done.returncode == 2
    assert "unrecognized arguments: --no-such-option" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def gemms(needs: Needs) -> set[tuple[int, int]]:
    """(N, K) of plain GEMMs."""
    plain = (spec for spec in needs.specs if spec["entry_point"] == "fp8_gemm_nt")
    return {(spec["n"], spec["k"]) for spec in plain}


# DeepSeek-V3 on eight ranks: dense and shared MLP, then attention.
MLP = {(4608, 7168), (7168, 2304), (512, 7168), (7168, 256)}
ATTENTION = {(2112, 7168), (3072, 1536), (4096, 512), (7168, 2048)}


@pytest.mark.slow
def test_eight_ranks_of_deepseek_v3_have_its_shapes(
    environ: Mapping[str, str],
) -> None:
    """G45: the shapes of entry-points.md, from `config.json` alone."""
    model = str(MODELS / "deepseek-v3")
    needs = ask(model, ("--tensor-parallel-size=8",), "h100", {**environ, **ALONE})
    assert gemms(needs) == MLP | ATTENTION
    assert needs.unregistered == needs.unconfirmed == ()


@pytest.mark.slow
def test_a_drafter_s_shapes_are_among_them(environ: Mapping[str, str]) -> None:
    """And its rows: it reads one token more of each request."""
    drafter = {"model": str(SMALL), "num_speculative_tokens": 2}
    arguments = (
        f"--speculative-config={json.dumps(drafter)}",
        "--max-num-seqs=64",
        "--max-num-batched-tokens=2048",
    )
    given = {**environ, **ALONE}
    needs = ask(str(MODELS / "qwen3-8b-fp8"), arguments, "h100", given)
    target = {(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)}
    small = {(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)}
    assert gemms(needs) == target | small
    rows = {
        (spec["n"], spec["k"]): spec["rows"]["last"]
        for spec in needs.specs
        if spec["rows"]["last"] > 2048
    }
    assert rows == dict.fromkeys(small, 2048 + 64)


@pytest.mark.slow
def test_what_an_einsum_s_layer_has_announced_is_among_them(
    environ: Mapping[str, str],
) -> None:
    """DeepSeek-V4's `wo_a`: an engine begins with a plain GEMM for it."""
    model = str(MODELS / "deepseek-v4-flash-base")
    needs = ask(model, (), "h100", {**environ, **ALONE})
    einsums = {
        (spec["groups"] * spec["n"], spec["k"])
        for spec in needs.specs
        if spec["entry_point"] == "fp8_einsum"
    }
    assert len(einsums) == 1
    assert einsums <= gemms(needs)
    ((n, k),) = einsums
    for line in needs.unconfirmed:
        assert f"N={n} K={k}, " in line
        assert line.endswith(": announced at construction, confirmed by no layer")
    assert needs.unconfirmed


OVERLAP = ("--enable-dbo", "--all2all-backend=deepep_high_throughput")


@pytest.mark.slow
def test_overlapped_batches_have_kernels_of_their_own(
    environ: Mapping[str, str], verb: Verb, tmp_path: Path
) -> None:
    """112 SMs and half of the tokens; of a dense model, which needs no DeepEP."""
    limit = ("--max-num-batched-tokens=128",)
    given = {**environ, **ALONE}
    needs = ask(str(SMALL), (*OVERLAP, *limit), "h100", given)
    assert [share.target for share in needs.shares] == ["sm90-132sm", "sm90-112sm"]
    assert [share.machine.context.sm_count for share in needs.shares] == [132, 112]
    whole, part = ({json.dumps(s) for s in share.specs} for share in needs.shares)
    halved = {text.replace('"last": 128', '"last": 64') for text in whole}
    assert part == halved != whole
    assert Needs.from_json(json.loads(json.dumps(needs.to_json()))) == needs

    command = begin(tmp_path / "out", needs, (*OVERLAP, *limit))
    done = verb("compile", *command)
    assert done.returncode == 0, done.stderr
    assert "for sm90-132sm and sm90-112sm, " in done.stdout
    manifest = Manifest.read(tmp_path / "out")
    assert set(manifest.kernels) == deep_gemm(tmp_path / "out").entries()
    sources = [
        (tmp_path / "out" / "cache" / entry / "kernel.cu").read_text()
        for entry in manifest.kernels
        if "gemm" in entry
    ]
    counts = [sum(f" {sms}," in text for text in sources) for sms in (132, 112)]
    assert all(counts)
    assert sum(counts) == len(sources)
    said = verb("status", tmp_path / "out").stdout
    assert "(sm90-132sm and sm90-112sm)" in said
    done = verb("compile", *command)
    assert ", 0 built now, 0 problems" in done.stdout


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_goes_on(
    needs: Needs, environ: Mapping[str, str], verb: Verb, tmp_path: Path
) -> None:
    """50 times, whichever process it is; what is left is whole."""
    fake_nvcc.install(tmp_path / "cuda" / "bin")
    given = {**environ, "CUDA_HOME": str(tmp_path / "cuda")}
    command = begin(tmp_path / "out", needs)
    words = [sys.executable, "-m", "vllm_deep_gemm_warmup.cli", "compile", *command]
    chance = random.Random(4)
    for _ in range(50):
        with subprocess.Popen(words, env=given, stderr=subprocess.DEVNULL) as child:
            time.sleep(chance.uniform(0, 4))
            victim = chance.choice(family_of(child.pid))
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
        states = dict(deep_gemm(tmp_path / "out").judge_all())
        assert {state.value for state in states.values()} <= {"whole"}
    done = verb("compile", *command)
    assert done.returncode == 0, done.stderr
    assert list(Manifest.read(tmp_path / "out").problems(tmp_path / "out")) == []


def gone(processes: Sequence[int]) -> bool:
    """Whether all of them have ended, by a deadline."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{number}").exists() for number in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_killed_while_vllm_is_asked_the_same_command_goes_on(
    environ: Mapping[str, str], verb: Verb, tmp_path: Path
) -> None:
    """Nothing is written by then, and nothing runs on."""
    fake_nvcc.install(tmp_path / "cuda" / "bin")
    given = {**environ, **ALONE, "CUDA_HOME": str(tmp_path / "cuda")}
    out = tmp_path / "out"
    command = (SMALL, "--output", out, "--max-num-batched-tokens=64")
    words = [sys.executable, "-m", "vllm_deep_gemm_warmup.cli", "compile"]
    chance = random.Random(5)
    for number in range(5):
        with subprocess.Popen(
            [*words, *map(str, command)], env=given, stderr=subprocess.DEVNULL
        ) as child:
            time.sleep(chance.uniform(0, 6))
            family = family_of(child.pid)
            # The command itself, and then one of those that it has started.
            os.kill(family[0] if number % 2 else family[-1], signal.SIGKILL)
        assert child.returncode != 0
        assert gone(family)
        assert not out.exists()
    done = verb("compile", *command)
    assert done.returncode == 0, done.stderr
    assert list(Manifest.read(out).problems(out)) == []


STAGES = ("--pipeline-parallel-size=2",)
# Of experts that get the tokens of both.
ENGINES = (
    "--data-parallel-size=2",
    "--enable-expert-parallel",
    "--moe-backend=deep_gemm",
)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(SMALL.name, (), marks=pytest.mark.slow),
        pytest.param(SMALL.name, STAGES, marks=pytest.mark.long),
        pytest.param("qwen3-30b-a3b-fp8", ENGINES, marks=pytest.mark.long),
    ],
)
def test_verify_boots_the_engine_and_says_what_is_missing(
    verb: Verb, tmp_path: Path, name: str, ranks: tuple[str, ...]
) -> None:
    """G54, G55: a full folder is enough; one kernel less is named before serving."""
    out, model = tmp_path / "out", MODELS / name
    arguments = ("--enforce-eager", "--max-num-batched-tokens=64", *ranks)
    done = verb("compile", model, "--output", out, *arguments)
    assert done.returncode == 0, done.stderr
    kernels = sorted(Manifest.read(out).kernels)
    done = verb("verify", out, model, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{out}: {len(kernels)} kernels found, 0 built\n")
    assert "manifest: " not in done.stdout

    shutil.rmtree(out / "cache" / kernels[0])
    done = verb("verify", out, model, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"manifest: {kernels[0]}: missing" in done.stdout
    assert done.stdout.endswith(f"{len(kernels) - 1} kernels found, 1 built\n")
    assert deep_gemm(out).entries() == set(kernels[1:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "now", "said"),
    [
        (("--max-num-batched-tokens=64",), (), "now `"),
        (("--device=h100",), ("--device=h20",), "now h20: another SM count"),
    ],
    ids=["other rows", "other SM count"],
)
def test_verify_of_another_engine_s_folder_fails_and_says_why(
    verb: Verb, tmp_path: Path, given: tuple[str, ...], now: tuple[str, ...], said: str
) -> None:
    """G54."""
    out = tmp_path / "out"
    done = verb("compile", SMALL, "--output", out, "--enforce-eager", *given)
    assert done.returncode == 0, done.stderr
    done = verb("verify", out, SMALL, "--enforce-eager", *now)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout
    assert not done.stdout.endswith(" 0 built\n")


@pytest.mark.slow
def test_two_topologies_share_a_folder(
    needs: Needs, environ: Mapping[str, str], verb: Verb, tmp_path: Path
) -> None:
    """G58: a union without collisions, of real plans."""
    alone = ask(str(SMALL), (), "h100", {**environ, **ALONE})
    first, second = tmp_path / "two", tmp_path / "one"
    assert verb("compile", *begin(first, needs)).returncode == 0
    assert verb("compile", *begin(second, alone, ())).returncode == 0
    before = Manifest.read(first).kernels
    added = Manifest.read(second).kernels
    assert before.keys() - added.keys()
    assert added.keys() - before.keys()
    assert verb("pack", second, tmp_path / "one.tar").returncode == 0
    done = verb("unpack", tmp_path / "one.tar", first)
    new, old = len(added.keys() - before.keys()), len(added.keys() & before.keys())
    assert f"{new} new kernels, {old} were there" in done.stdout
    joined = Manifest.read(first)
    assert joined.kernels == {**added, **before}
    assert list(joined.problems(first)) == []
    assert deep_gemm(first).entries() == before.keys() | added.keys()
    assert verb("status", first).returncode == 0


def planned_by_an_engine(
    environ: Mapping[str, str], folder: Path, model: Path, tp: int
) -> list[dict[str, Any]]:
    """The specs of a real start's report."""
    settings = Settings(model, kernel="deep_gemm", nvcc="fake", tp=tp)
    port = server.free_port()
    command = run.serve_command(settings, port)
    with environment.socket_folder() as sockets:
        where = environment.caches(settings, folder, sockets)
        given = environment.server_environment(settings, where, environ)
        with server.running(command, given, port, folder / "log", 1200):
            report: dict[str, Any] = json.loads(where.report.read_text())
    return list(report["specs"])


def texts(specs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> set[str]:
    return {json.dumps([spec.get(name) for name in names]) for spec in specs}


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param("qwen3-0.6b-fp8", 1, marks=pytest.mark.long),
        pytest.param("qwen3-0.6b-fp8", 2, marks=pytest.mark.slow),
        pytest.param("deepseek-v3.2", 1, marks=pytest.mark.long),
        pytest.param("deepseek-v4-flash-base", 1, marks=pytest.mark.long),
    ],
)
def test_an_engine_plans_the_same(
    environ: Mapping[str, str], tmp_path: Path, name: str, tp: int
) -> None:
    """DeepGEMM alone, so that the engine's host does not matter.

    An indexer says what it runs once its cache is bound; DeepSeek-V4's shares blocks
    with layers of other kinds.
    """
    given = {**environ, **ALONE}
    arguments = ("--tensor-parallel-size", str(tp), "--enforce-eager")
    model = MODELS / name
    found = ask(str(model), arguments, "h100", given, every_rank=True)
    assert found.unregistered == ()
    engine = planned_by_an_engine(given, tmp_path, model, tp)
    # Specs of one kind have fields that another has not.
    names = sorted({name for spec in found.specs for name in spec})
    assert texts(found.specs, names) == texts(engine, names)
    assert found.ranks == 2 * tp


@pytest.mark.long
def test_ranks_that_are_not_asked_are_alike(environ: Mapping[str, str]) -> None:
    """Stages, and experts that do not divide: 128 of three ranks."""
    model = str(MODELS / "qwen3-30b-a3b-fp8")
    arguments = (
        "--data-parallel-size=3",
        "--enable-expert-parallel",
        "--moe-backend=deep_gemm",
    )
    found = ask(model, arguments, "h100", environ)
    every = ask(model, arguments, "h100", environ, every_rank=True)
    assert (found.ranks, every.ranks) == (4, 6)
    assert dataclasses.replace(every, ranks=4, specs=()) == dataclasses.replace(
        found, specs=()
    )
    assert texts(found.specs, ["n", "k", "groups", "rows"]) == texts(
        every.specs, ["n", "k", "groups", "rows"]
    )
    assert {spec["groups"] for spec in found.specs} == {1, 42, 43}
