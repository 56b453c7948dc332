"""New cache entries are seen once, whoever made them and however fast."""

import pathlib

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.cache import CacheWatch
from vllm_deep_gemm_warmup import kernel_caches


def make_entry(root: pathlib.Path, name: str) -> None:
    folder = root / "cache" / name
    folder.mkdir(parents=True)
    (folder / ".committed").touch()


def test_each_entry_is_new_once(tmp_path: pathlib.Path) -> None:
    make_entry(tmp_path, "old.0")
    watch = CacheWatch(kernel_caches.deep_gemm(tmp_path))
    assert watch.new_entries() == ()
    for index in range(50):
        make_entry(tmp_path, f"kernel.{index}")
        assert watch.new_entries() == (f"kernel.{index}",)
        assert watch.new_entries() == ()


def test_a_folder_that_appears_later(tmp_path: pathlib.Path) -> None:
    watch = CacheWatch(kernel_caches.deep_gemm(tmp_path))
    assert watch.new_entries() == ()
    make_entry(tmp_path, "kernel.0")
    assert watch.new_entries() == ("kernel.0",)


def test_a_compile_of_flashinfer_that_failed_is_no_kernel(
    tmp_path: pathlib.Path,
) -> None:
    watch = CacheWatch(kernel_caches.flashinfer(tmp_path))
    (tmp_path / "cache" / "gemm_1_Normal").mkdir(parents=True)
    assert watch.new_entries() == ()


def test_a_folder_that_cannot_be_looked_into_has_no_entries(
    tmp_path: pathlib.Path,
) -> None:
    """Counting must never cost the warmup: a file in the way, a link to itself."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "cache").symlink_to("cache")
    for root in (tmp_path / "file", tmp_path / "loop", pathlib.Path("x" * 300)):
        watch = CacheWatch(kernel_caches.flashinfer(root))
        assert watch.new_entries() == ()


def test_an_entry_whose_rights_are_missing_is_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_entry(tmp_path, "kernel.0")

    def refuse(path: object, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.stat", refuse)
    assert kernel_caches.deep_gemm(tmp_path).entries() == frozenset()
    assert CacheWatch(kernel_caches.deep_gemm(tmp_path)).new_entries() == ()
