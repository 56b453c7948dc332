"""Counting: committed entries only, named by kernel and template arguments."""

import json
from pathlib import Path

from vllm_deep_gemm_warmup.proof import count

SOURCE = """\
#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
static void __instantiate_kernel() {
    auto ptr = reinterpret_cast<void*>(&sm90_fp8_gemm_1d2d_impl<
        cute::UMMA::Major::K,
        0, 576, 2048, 1
    >);
};
"""


def entry(cache: Path, name: str, source: str | None = SOURCE) -> Path:
    folder = cache / "cache" / name
    folder.mkdir(parents=True)
    if source is not None:
        (folder / "kernel.cu").write_text(source)
    (folder / "kernel.cubin").write_bytes(b"\x7fELF")
    (folder / ".committed").touch()
    return folder


def test_an_entry_is_named_by_kernel_and_arguments(tmp_path: Path) -> None:
    entry(tmp_path, "sm90_fp8_gemm_1d2d.0f")

    (found,) = count.deep_gemm_entries(tmp_path)

    arguments = "cute::UMMA::Major::K, 0, 576, 2048, 1"
    expected = f"sm90_fp8_gemm_1d2d_impl N=576 K=2048 <{arguments}>"
    assert str(found) == expected


def test_an_entry_without_readable_source_keeps_its_folder_name(tmp_path: Path) -> None:
    entry(tmp_path, "a.1", source=None)
    entry(tmp_path, "b.2", source="nothing of the kind")

    assert {str(e) for e in count.deep_gemm_entries(tmp_path)} == {"a.1", "b.2"}


def test_missing_folders_hold_nothing(tmp_path: Path) -> None:
    found = count.snapshot(tmp_path / "no", tmp_path / "neither")

    assert found == count.Snapshot(frozenset(), frozenset())


def test_compilers_are_read_from_meta_json(tmp_path: Path) -> None:
    program, link = tmp_path / "program", tmp_path / "nvcc"
    link.symlink_to(program)
    info = {"path": str(link), "version": "release 13.0, V13.0.88\nBuild"}
    entry(tmp_path, "c.3")  # says nothing of its compiler
    for name in ("a.1", "b.2"):
        meta = entry(tmp_path, name) / "meta.json"
        meta.write_text(json.dumps({"compiler_info": info}))

    assert count.compilers(tmp_path) == (f"{program} V13.0.88",)
