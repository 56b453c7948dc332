"""New cache entries are seen once, whoever made them and however fast."""

import pathlib

from vllm.model_executor.warmup.deep_gemm_jit.cache import CacheWatch, cache_folder


def test_the_folder_is_where_deep_gemm_puts_entries() -> None:
    assert cache_folder({"DG_JIT_CACHE_DIR": "/x"}) == pathlib.Path("/x/cache")
    assert cache_folder({}) is None


def test_each_entry_is_new_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "old.0").mkdir()
    watch = CacheWatch(tmp_path)
    assert watch.new_entries() == ()
    for index in range(50):
        (tmp_path / f"kernel.{index}").mkdir()
        assert watch.new_entries() == (f"kernel.{index}",)
        assert watch.new_entries() == ()


def test_a_folder_that_appears_later(tmp_path: pathlib.Path) -> None:
    watch = CacheWatch(tmp_path / "cache")
    assert watch.new_entries() == ()
    (tmp_path / "cache" / "kernel.0").mkdir(parents=True)
    assert watch.new_entries() == ("kernel.0",)


def test_no_folder_no_entries() -> None:
    assert CacheWatch(None).new_entries() == ()
