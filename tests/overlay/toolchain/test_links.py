"""The folder of links: a toolkit's shape, made once, by many processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.toolchain import Facts
from vllm_deep_gemm_warmup.toolchain.links import cuda_home_links


def test_links_look_like_a_toolkit(
    pip_root: Path, facts: Callable[..., Facts], tmp_path: Path
) -> None:
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "libcuda.so.1").write_text("driver")
    given = Facts(facts().variables, driver_folders=(tmp_path, driver))
    links = cuda_home_links(pip_root, given)
    assert links.parent == tmp_path / "cache" / "deep_gemm_warmup"
    for folder in ("bin", "include", "nvvm"):
        assert (links / folder).resolve() == pip_root / folder
    read = {p.name: p.read_text() for p in (links / "lib64").iterdir() if p.is_file()}
    for name, target in {
        "libcudart.so": "libcudart.so.13",
        "libcudart.so.13": "libcudart.so.13",
        "libcudart_static.a": "libcudart_static.a",
        "libnvrtc.so": "libnvrtc.so.13",
        "libnvrtc.alt.so": "libnvrtc.alt.so.13",
        "libnvrtc-builtins.so": "libnvrtc-builtins.so.13.0",
        "libcufile.so": "libcufile.so.0",
        "libcheckpoint.so": "libcheckpoint.so",
    }.items():
        assert (name, read[name]) == (name, target)
    assert (links / "lib" / "libcudart.so").read_text() == "libcudart.so.13"
    assert (links / "lib64" / "stubs" / "libcuda.so").read_text() == "driver"


def test_links_are_named_by_content_and_made_once(
    pip_root: Path, facts: Callable[..., Facts]
) -> None:
    first = cuda_home_links(pip_root, facts())
    state = first.stat().st_ino
    assert cuda_home_links(pip_root, facts()) == first
    assert first.stat().st_ino == state
    (pip_root / "lib" / "libcurand.so.10").write_text("")
    second = cuda_home_links(pip_root, facts())
    assert second != first
    assert first.is_dir()
    assert {p.name for p in first.parent.iterdir()} == {first.name, second.name}


def test_damaged_links_are_replaced(
    pip_root: Path, facts: Callable[..., Facts]
) -> None:
    links = cuda_home_links(pip_root, facts())
    (links / "lib64" / "libcudart.so").unlink()
    (links / "bin").unlink()
    (links / "bin").symlink_to("/elsewhere")
    assert cuda_home_links(pip_root, facts()) == links
    assert (links / "lib64" / "libcudart.so").exists()
    assert (links / "bin" / "nvcc").exists()
    assert [p.name for p in links.parent.iterdir()] == [links.name]


def _make_links(root: Path, given: Facts, start: Path) -> str:
    while not start.exists():  # all at once, without a lock to inherit
        pass
    return str(cuda_home_links(root, given))


def test_links_made_by_many_processes_at_once(
    pip_root: Path, facts: Callable[..., Facts], tmp_path: Path
) -> None:
    start, given = tmp_path / "start", facts()
    with multiprocessing.get_context("fork").Pool(16) as pool:
        jobs = [
            pool.apply_async(_make_links, (pip_root, given, start)) for _ in range(16)
        ]
        start.touch()
        made = {job.get(60) for job in jobs}
    (links,) = made
    assert Path(links, "bin", "nvcc").exists()
    assert [p.name for p in Path(links).parent.iterdir()] == [Path(links).name]


def test_cache_that_cannot_be_written(
    pip_root: Path,
    facts: Callable[..., Facts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    (tmp_path / "file").write_text("")  # works for root too, unlike a mode
    given = facts(VLLM_CACHE_ROOT=tmp_path / "file")
    links = cuda_home_links(pip_root, given)
    assert links.parent.parent == tmp_path / "temp"
    assert links.parent.stat().st_mode & 0o777 == 0o700
    # Nowhere at all: the toolkit itself, which is enough for DeepGEMM.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert cuda_home_links(pip_root, given) == pip_root


def test_no_link_lies_where_the_library_s_shell_would_break(
    pip_root: Path,
    facts: Callable[..., Facts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    given = facts(VLLM_CACHE_ROOT=str(tmp_path / "my cache"))
    links = cuda_home_links(pip_root, given)
    assert links.parent.parent == tmp_path / "temp"


@pytest.mark.parametrize("whose", ["another user's", "everybody's"])
def test_folder_that_another_user_could_fill_is_not_used(
    pip_root: Path,
    facts: Callable[..., Facts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whose: str,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "cache" / "deep_gemm_warmup"
    folder.mkdir(parents=True)
    if whose == "everybody's":
        folder.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(folder, 4242, -1)
    else:
        monkeypatch.setattr("os.getuid", lambda: 4242)
    assert folder not in cuda_home_links(pip_root, facts()).parents


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"VLLM_CACHE_ROOT": "v", "XDG_CACHE_HOME": "x", "HOME": "h"}, "v"),
        ({"XDG_CACHE_HOME": "x", "HOME": "h"}, "x/vllm"),
        ({"HOME": "h"}, "h/.cache/vllm"),
    ],
)
def test_links_lie_where_vllm_keeps_its_cache(
    pip_root: Path, tmp_path: Path, variables: dict[str, str], place: str
) -> None:
    given = Facts(tuple((n, str(tmp_path / v)) for n, v in variables.items()))
    links = cuda_home_links(pip_root, given)
    assert links.parent == tmp_path / place / "deep_gemm_warmup"
