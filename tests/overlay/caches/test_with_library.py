"""The real DeepGEMM on the stand-in: what it does with a cache, and after us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_deep_gemm_warmup import standin
from vllm_deep_gemm_warmup.proof import fake_nvcc

PROGRAM = Path(__file__).with_name("call_library.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Any]:
    """What happened in each case, without us and with us; one import of the library."""
    folder = tmp_path_factory.mktemp("library")
    real = fake_nvcc.install(folder / "real")
    nvcc = folder / "home" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    keep = f'[ "$1" = --version ] || echo compile >> {folder / "log"}'
    nvcc.write_text(f'#!/bin/sh\n{keep}\nexec {real} "$@"\n')
    nvcc.chmod(0o755)
    base = {k: v for k, v in os.environ.items() if k[:3] != "DG_"}
    given = standin.environment("h100", cache_dir=folder / "caches", base_env=base)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "base"), str(folder / "log")],
        env=given | {"CUDA_HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    assert lines[0]["compiled"] == 2
    return {(line["case"], line["ours"]): line for line in lines[1:]}


@pytest.mark.parametrize("kind", ["no kernel", "empty kernel", "a file"])
def test_damage_fails_for_ever_and_is_mended(
    answers: dict[tuple[str, bool], Any], kind: str
) -> None:
    assert answers[kind, False]["failed"]
    mended = answers[kind, True]
    assert (mended["failed"], mended["compiled"], mended["again"]) == ("", 1, 0)


def test_a_lost_marker_compiles_at_each_start_and_is_mended(
    answers: dict[tuple[str, bool], Any],
) -> None:
    alone, mended = answers["no marker", False], answers["no marker", True]
    assert (alone["failed"], alone["compiled"], alone["again"]) == ("", 1, 1)
    assert (mended["failed"], mended["compiled"], mended["again"]) == ("", 0, 0)


def test_what_is_in_order_or_missing_is_as_without_us(
    answers: dict[tuple[str, bool], Any],
) -> None:
    for kind, compiled in (("none", 0), ("no entry", 1)):
        for ours in (False, True):
            line = answers[kind, ours]
            assert (line["failed"], line["compiled"], line["again"]) == (
                "",
                compiled,
                0,
            )


def test_links_to_the_entries_of_another_folder_are_entries(
    answers: dict[tuple[str, bool], Any],
) -> None:
    """What is put in the place of a folder that is read-only."""
    line = answers["links", True]
    assert (line["failed"], line["compiled"]) == ("", 0)


def test_a_recorded_answer_serves_a_full_cache_and_builds_nothing(
    answers: dict[tuple[str, bool], Any],
) -> None:
    full, gap = answers["recorded, none", True], answers["recorded, no entry", True]
    assert (full["failed"], full["compiled"]) == ("", 0)
    assert gap["failed"]
    assert gap["compiled"] == 0
