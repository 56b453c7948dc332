"""Kernels go elsewhere where their cache cannot be written, and only then."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from vllm_deep_gemm_warmup import cache_place, plugin
from vllm_deep_gemm_warmup.cache_place import Place
from vllm_deep_gemm_warmup.kernel_caches import KernelCache, deep_gemm

from .entries import as_it_is, as_plain_user, entry_name, make_read_only, write_entry


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def place_read_only(cache: KernelCache, elsewhere: Path) -> KernelCache:
    """The place of a cache that is read-only, which stays as it was."""
    make_read_only(cache.root)
    before = as_it_is(cache.root)

    def choose() -> None:
        place = cache_place.choose(deep_gemm, cache.root, elsewhere)
        assert place.reason == "Permission denied"
        (elsewhere / "root").symlink_to(place.root)

    as_plain_user(choose)
    assert as_it_is(cache.root) == before
    return deep_gemm((elsewhere / "root").resolve())


def test_a_folder_that_can_be_written_is_taken_and_made(
    tmp_path: Path, elsewhere: Path
) -> None:
    """G48."""
    root = tmp_path / "not" / "yet"
    assert cache_place.choose(deep_gemm, root, elsewhere) == Place(root)
    assert sorted(path.name for path in root.rglob("*")) == ["cache", "tmp"]
    assert list(elsewhere.iterdir()) == []


def test_many_processes_make_the_same_folder_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G51: what is there already is no failure."""
    root = tmp_path / "not" / "yet" / "there"
    mkdir = os.mkdir

    def slow(*args: Any, **options: Any) -> None:
        """All have looked by then."""
        time.sleep(0.05)
        mkdir(*args, **options)

    monkeypatch.setattr(os, "mkdir", slow)
    go, give = os.pipe()
    children = []
    for _ in range(32):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(give)
                os.read(go, 1)  # ends for all at once
                status = int(cache_place.write_problem(root) is not None)
            finally:
                os._exit(status)
        children.append(pid)
    os.close(go)
    os.close(give)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 32
    assert [list(folder.iterdir()) for folder in root.iterdir()] == [[], []]


def test_a_whole_read_only_cache_serves_and_is_not_written(
    cache: KernelCache, elsewhere: Path
) -> None:
    """G56."""
    plan = Path("deep_gemm_warmup", "plans", "0a", "1b.json")
    (cache.root / plan).parent.mkdir(parents=True)
    (cache.root / plan).write_text("{}")
    placed = place_read_only(cache, elsewhere)
    assert placed.entries() == cache.entries()
    assert (placed.root / plan).read_text() == "{}"
    assert cache_place.describe(placed) is None


def test_what_a_read_only_cache_lacks_is_built_elsewhere_and_said(
    cache: KernelCache, elsewhere: Path
) -> None:
    """G56."""
    placed = place_read_only(cache, elsewhere)
    write_entry(placed, 7)
    line = cache_place.describe(placed)
    assert line is not None
    assert f"{cache.root}" in line
    assert "1 kernels" in line
    assert str(placed.root) in line
    assert cache_place.describe(cache) is None


def test_a_read_only_entry_without_marker_is_taken_all_the_same(
    cache: KernelCache, elsewhere: Path
) -> None:
    (cache.folder / entry_name(1) / ".committed").unlink()
    (cache.folder / entry_name(2) / "kernel.cubin").write_bytes(b"")
    placed = place_read_only(cache, elsewhere)
    assert placed.entries() == {entry_name(0), entry_name(1)}
    assert cache_place.describe(placed) is None


def test_links_follow_the_cache(cache: KernelCache, elsewhere: Path) -> None:
    """An image with another cache at the same path, and a place that stayed."""
    placed = place_read_only(cache, elsewhere)
    (elsewhere / "root").unlink()
    for path in (cache.root, cache.folder, *cache.folder.iterdir()):
        path.chmod(0o755)
    shutil.rmtree(cache.folder / entry_name(1))
    write_entry(cache, 5)
    assert place_read_only(cache, elsewhere) == placed
    assert placed.entries() == {entry_name(0), entry_name(2), entry_name(5)}


def test_a_full_disk_is_found_by_writing(cache: KernelCache, elsewhere: Path) -> None:
    """A limit on files stands in for a disk that has room for names alone."""

    def choose() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        assert cache_place.write_problem(cache.root) == "File too large"
        # Nor is there room elsewhere.
        assert cache_place.choose(deep_gemm, cache.root, elsewhere).reason is None

    as_plain_user(choose)
    assert list((cache.root / "tmp").iterdir()) == []
    assert len(list(cache.folder.iterdir())) == 3


def test_a_place_of_another_user_is_not_taken(
    cache: KernelCache, elsewhere: Path
) -> None:
    (elsewhere / f"vllm-deep-gemm-{os.getuid()}").mkdir(mode=0o777)
    (elsewhere / f"vllm-deep-gemm-{os.getuid()}").chmod(0o777)
    make_read_only(cache.root)
    as_plain_user(
        lambda: _expect(
            cache_place.choose(deep_gemm, cache.root, elsewhere), Place(cache.root)
        )
    )


def _expect(found: Place, wanted: Place) -> None:
    assert found == wanted


def test_without_a_home_there_is_a_place(elsewhere: Path) -> None:
    """`~` stays as it is where neither HOME nor the user's entry says what it is."""
    place = cache_place.choose(deep_gemm, Path("~/.cache/vllm/deep_gemm"), elsewhere)
    assert place.reason == "there is no home directory"
    assert place.root.is_relative_to(elsewhere)


def test_the_plugin_places_once_a_node_and_the_operators_folder_wins(
    cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G57: `VLLM_CACHE_ROOT` and `DG_JIT_CACHE_DIR` name different folders."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    environ = {
        "DG_JIT_CACHE_DIR": str(cache.root),
        "TRTLLM_DG_CACHE_DIR": str(tmp_path / "flashinfer"),
    }
    plugin.place_caches(environ)
    assert environ["DG_JIT_CACHE_DIR"] == str(cache.root)
    assert not (tmp_path / "root").exists()
    # What was placed is not looked at again, by this process or a child.
    shutil.rmtree(cache.root)
    plugin.place_caches(environ)
    assert not cache.root.exists()
