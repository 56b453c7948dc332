"""The library is built once per content; what is missing is named."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.standin import build, generate

HEADER = """
#define cuMemAlloc   cuMemAlloc_v2
#define cuMemPrefetchAsync  __CUDA_API_PTSZ(cuMemPrefetchAsync_v2)
/* CUresult CUDAAPI cuCommented(void); */
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
typedef enum cudaError_enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100 } CUresult;
"""


def test_every_declared_function_and_its_versioned_name() -> None:
    assert generate.driver_names(HEADER) == {
        "cuInit",
        "cuMemAlloc",
        "cuMemAlloc_v2",
        "cuMemPrefetchAsync_v2",
    }
    assert ("cuMemAlloc", "cuMemAlloc_v2") in generate.aliases(HEADER)


def test_error_names_prefer_the_runtimes() -> None:
    runtime = "enum cudaError { cudaSuccess = 0, cudaErrorNoDevice = 100 };"
    assert generate.errors(runtime, HEADER) == [
        (0, "cudaSuccess"),
        (100, "cudaErrorNoDevice"),
    ]


def test_an_unanswered_question_is_an_error_and_a_version_is_left_alone() -> None:
    text = generate.mathematics_source(
        ["int cusparseSpMV_bufferSize(int); int cublasLtGetVersion(void);"]
    )
    assert "return 10;" in text
    assert "cublasLtGetVersion" not in text


def test_no_compiler_is_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=r"no C compiler.*install one"):
        build.ensure({"PATH": str(tmp_path)}, sys.path, tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_a_folder_that_cannot_be_preloaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="STANDIN_GPU_BUILD_DIR"):
        build.ensure(root=tmp_path / "with space")


def test_no_headers_is_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="install the base"):
        build.find_headers([str(tmp_path)], {"CUDA_HOME": str(tmp_path)})


def test_a_failing_compiler_leaves_nothing_published(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    compiler.chmod(0o755)
    root = tmp_path / "root"
    with pytest.raises(build.BuildError, match="no luck"):
        build.ensure({"PATH": f"{tmp_path}:{os.defpath}"}, sys.path, root)
    assert list(root.iterdir()) == []


def test_builders_at_once_publish_one_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(build.ensure, root=tmp_path) for _ in range(2)]
        folders = {future.result() for future in builds}
    assert [folders.pop()] == list(tmp_path.iterdir())
    assert not folders


def test_shared_object_names() -> None:
    folder = build.ensure()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        text = subprocess.run(
            ["readelf", "-d", folder / name], capture_output=True, text=True, check=True
        ).stdout
        assert f"soname: [{name}]" in text
    assert (folder / "libcuda.so").resolve() == folder / "libcuda.so.1"


def test_content_decides_the_name() -> None:
    first = build.content_hash({"a.c": "int a;"}, "cc")
    assert first == build.content_hash({"a.c": "int a;"}, "cc")
    assert first != build.content_hash({"a.c": "int b;"}, "cc")
    assert first != build.content_hash({"a.c": "int a;"}, "clang")
