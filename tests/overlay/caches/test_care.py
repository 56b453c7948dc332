"""What is damaged is set aside, what lost its marker gets it back, and no more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import cache_care, cubins
from vllm_deep_gemm_warmup.cache_care import ASIDE, Mended
from vllm_deep_gemm_warmup.kernel_caches import (
    EntryState,
    KernelCache,
    deep_gemm,
    flashinfer,
)

from .entries import as_it_is, as_plain_user, entry_name, make_read_only, write_entry

NAME = entry_name(1)


def shorten(entry: Path) -> None:
    kernel = entry / "kernel.cubin"
    kernel.write_bytes(kernel.read_bytes()[:-100])


def lose(*names: str) -> Callable[[Path], None]:
    def remove(entry: Path) -> None:
        for name in names:
            (entry / name).unlink()

    return remove


def become_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("")


def become_dangling(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to("/nowhere/at/all")


DAMAGE = {
    "shorter": shorten,
    "empty": lambda entry: (entry / "kernel.cubin").write_bytes(b""),
    "zeros": lambda entry: (entry / "kernel.cubin").write_bytes(bytes(4096)),
    "no kernel": lose("kernel.cubin"),
    "marker alone": lose("kernel.cubin", "kernel.cu", "meta.json"),
    "no kernel and no marker": lose("kernel.cubin", ".committed"),
    "a file": become_file,
    "a dangling link": become_dangling,
}


def test_a_cache_in_order_is_left_alone(cache: KernelCache) -> None:
    before = as_it_is(cache.root)
    mended = cache_care.mend(cache)
    assert mended == Mended()
    assert cache_care.describe(cache, mended) == []
    assert as_it_is(cache.root) == before
    assert cache_care.mend(deep_gemm(cache.root / "missing")) == Mended()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_set_aside_and_named(cache: KernelCache, kind: str) -> None:
    """G50, G59: existence is not validity; the library would fail at each start."""
    DAMAGE[kind](cache.folder / NAME)
    mended = cache_care.mend(cache)
    assert mended == Mended(set_aside=(NAME,))
    assert not os.path.lexists(cache.folder / NAME)
    assert len(list((cache.root / ASIDE).iterdir())) == 1
    assert cache.entries() == {entry_name(0), entry_name(2)}
    (line,) = cache_care.describe(cache, mended)
    assert NAME in line
    assert str(cache.root / ASIDE) in line


def test_a_lost_marker_is_given_back(cache: KernelCache) -> None:
    """A copy without hidden files: the library compiles all, at every start."""
    for number in range(3):
        (cache.folder / entry_name(number) / ".committed").unlink()
    mended = cache_care.mend(cache)
    assert mended.repaired == tuple(map(entry_name, range(3)))
    assert len(cache.entries()) == 3
    (line,) = cache_care.describe(cache, mended)
    assert "hidden files" in line


def test_what_the_library_does_not_read_may_be_missing(cache: KernelCache) -> None:
    lose("meta.json", "kernel.cu")(cache.folder / NAME)
    assert cache.judge(NAME) is EntryState.WHOLE


def test_foreign_files_are_never_touched(cache: KernelCache) -> None:
    for name in ("notes.txt", ".snapshot", "lost+found", "sm90.short"):
        folder = cache.folder / name
        folder.mkdir()
        (folder / "kernel.cubin").write_text("not ours")
    (cache.root / "README").write_text("not ours")
    # The library takes an empty folder for its own.
    (cache.folder / entry_name(9)).mkdir()
    before = as_it_is(cache.root)
    assert cache_care.mend(cache) == Mended()
    assert as_it_is(cache.root) == before


def test_what_another_process_built_again_comes_back(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was damaged when it was judged and whole when it was moved."""
    entry = cache.folder / NAME
    whole = (entry / "kernel.cubin").read_bytes()
    (entry / "kernel.cubin").write_bytes(b"")
    judged = list(cache.judge_all())
    (entry / "kernel.cubin").write_bytes(whole)
    monkeypatch.setattr(KernelCache, "judge_all", lambda self: iter(judged))
    assert cache_care.mend(cache) == Mended()
    assert cache.judge(NAME) is EntryState.WHOLE


def test_of_many_processes_one_sets_an_entry_aside(cache: KernelCache) -> None:
    for number in range(3, 20):
        shorten(write_entry(cache, number))
    children = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            os._exit(len(cache_care.mend(cache).set_aside))
        children.append(pid)
    moved = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sum(moved) == 17
    assert len(list((cache.root / ASIDE).iterdir())) == 17


def test_what_cannot_be_moved_is_named_with_a_remedy(cache: KernelCache) -> None:
    shorten(cache.folder / NAME)
    make_read_only(cache.root)
    before = as_it_is(cache.root)

    def mend() -> None:
        mended = cache_care.mend(cache)
        assert mended == Mended(left=(NAME,))
        (line,) = cache_care.describe(cache, mended)
        assert "DG_JIT_CACHE_DIR" in line

    as_plain_user(mend)
    assert as_it_is(cache.root) == before


def test_flashinfer_builds_in_place(tmp_path: Path) -> None:
    """A folder without a kernel may be one that is being built."""
    cache = flashinfer(tmp_path)
    names = [
        "gemm_swapAB_6144_4096_128_16_128_1_81_8_1_Normal",
        "gemm_swapAB_6144_4096_128_24_128_8_68_6_1_GroupedWithOffset",
        "gemm_6144_4096_128_128_128_8_58_5_1_GroupedWithOffset",
    ]
    for name in names:
        (cache.folder / name).mkdir(parents=True)
    (cache.folder / names[0] / "kernel.cu").write_text("being built")
    (cache.folder / names[1] / "nvcc_kernel.cubin").write_bytes(b"\x7fELF")
    (cache.folder / names[2] / "nvcc_kernel.cubin").write_bytes(cubins.cubin("kernel"))
    assert cache_care.mend(cache) == Mended(set_aside=(names[1],))


def test_a_cubin_cut_anywhere_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    content = cubins.cubin("kernel")
    path.write_bytes(content)
    assert cubins.is_whole(path)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert not cubins.is_whole(path), length


def test_who_else_may_write_kernels_is_named(cache: KernelCache) -> None:
    assert cache_care.intruders(cache) is None
    cache.folder.chmod(0o770)  # a cluster's volume
    assert cache_care.intruders(cache) is None
    cache.folder.chmod(0o777)
    line = cache_care.intruders(cache)
    assert line is not None
    assert str(cache.folder) in line
    assert "777" in line
    assert cache_care.intruders(deep_gemm(cache.root / "missing")) is None
