"""New cache entries are seen once, whoever made them and however fast."""

import pathlib

from vllm.model_executor.warmup.deep_gemm_jit.cache import CacheWatch, cache_folders


def test_both_libraries_have_their_folder() -> None:
    given = {"DG_JIT_CACHE_DIR": "/x", "TRTLLM_DG_CACHE_DIR": "/y", "HOME": "/z"}
    assert cache_folders(given) == [pathlib.Path("/x/cache"), pathlib.Path("/y/cache")]
    assert cache_folders({"HOME": "/z"}) == [pathlib.Path("/z/.tensorrt_llm/cache")]
    assert cache_folders({}) == []


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
