"""Before `verify` boots an engine, it says why a folder's manifest promises nothing."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.kernel_caches import deep_gemm
from vllm_deep_gemm_warmup.offline.arguments import Serving
from vllm_deep_gemm_warmup.offline.manifest import Manifest, cubin_digest, version_of
from vllm_deep_gemm_warmup.offline.verify import doubts, settings_of

from ..caches.entries import entry_name, write_entry

SERVING = Serving("m", "h100", ("--tensor-parallel-size", "8"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of two kernels whose manifest is right."""
    cache = deep_gemm(tmp_path / "kernels")
    for number in range(2):
        write_entry(cache, number)
    Manifest(
        model=SERVING.model,
        arguments=SERVING.arguments,
        device=SERVING.device,
        target="sm90-132sm",
        versions={"vllm": version_of("vllm")},
        library="0" * 8,
        compiler="V13.0.88",
        variables={},
        specs=1,
        kernels={name: cubin_digest(cache, name) for name in cache.entries()},
    ).write(cache.root)
    return cache.root


def test_a_manifest_that_fits_leaves_no_doubt(root: Path) -> None:
    assert doubts(root, SERVING) == []


def test_each_doubt_is_named(root: Path) -> None:
    """G54, G55: other SM count, other rows, other library, one shape less."""
    (line,) = doubts(root, replace(SERVING, device="h20"))
    assert "made for h100 (sm90-132sm), now h20" in line
    more = (*SERVING.arguments, "--max-num-batched-tokens=16384")
    (line,) = doubts(root, replace(SERVING, arguments=more))
    assert "made for `m --tensor-parallel-size 8`, now `m " in line
    assert line.endswith("--max-num-batched-tokens=16384`")
    made = Manifest.read(root)
    replace(made, versions={"vllm": "0.1"}).write(root)
    (line,) = doubts(root, SERVING)
    assert line == f"manifest: made with vllm 0.1, here is {version_of('vllm')}"
    made.write(root)
    shutil.rmtree(root / "cache" / entry_name(1))
    assert doubts(root, SERVING) == [f"manifest: {entry_name(1)}: missing"]


def test_a_folder_that_joined_two_is_right_for_both(root: Path) -> None:
    other = replace(SERVING, arguments=("--tensor-parallel-size", "4"))
    joined = replace(Manifest.read(root), joined=("m --tensor-parallel-size 4",))
    joined.write(root)
    assert doubts(root, SERVING) == doubts(root, other) == []


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 1}'])
def test_no_manifest_and_a_damaged_one_are_named(
    root: Path, content: str | None
) -> None:
    """G54."""
    (root / "manifest.json").unlink()
    if content is not None:
        (root / "manifest.json").write_text(content)
    (line,) = doubts(root, SERVING)
    assert "manifest.json: " in line


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((), (1, 1, 1)),
        (("--tensor-parallel-size", "4", "--enable-expert-parallel"), (4, 1, 1)),
        (("--tensor_parallel_size=2", "--pipeline_parallel_size", "3"), (2, 3, 1)),
        (("-tp", "2", "-pp=2", "-dp", "4"), (2, 2, 4)),
    ],
)
def test_the_engine_is_booted_with_as_many_devices_as_it_takes(
    tmp_path: Path, arguments: tuple[str, ...], sizes: tuple[int, int, int]
) -> None:
    settings = settings_of(Serving("m", "h100", arguments), tmp_path, None)
    assert (settings.tp, settings.pp, settings.dp) == sizes
    assert settings.ranks == math.prod(sizes)
    assert settings.extra == arguments
