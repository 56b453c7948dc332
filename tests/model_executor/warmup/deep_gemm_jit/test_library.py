"""What is wrong with the DeepGEMM library is said with its own words (G22)."""

import importlib
import pathlib
import sys
from types import ModuleType

import pytest
from vllm.model_executor.warmup.deep_gemm_jit.library import (
    describe_cache,
    describe_import,
)


@pytest.fixture
def external(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An importable folder for an external ``deep_gemm`` package."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    return tmp_path / "deep_gemm.py"


def only_external(name: str) -> ModuleType:
    """Import as usual, in an environment whose vllm brings no copy."""
    if name != "deep_gemm":
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return importlib.import_module(name)


def test_an_absent_library_is_called_not_installed(external: pathlib.Path) -> None:
    reason = describe_import(None, only_external)
    assert reason is not None
    assert "deep_gemm is not installed" in reason
    assert "vllm.third_party.deep_gemm is not installed" in reason
    assert "reinstall vllm" in reason


def test_an_undefined_symbol_is_quoted(external: pathlib.Path) -> None:
    external.write_text("raise ImportError('_C.so: undefined symbol: cuFoo')")
    reason = describe_import(None, only_external)
    assert reason is not None
    assert "ImportError: _C.so: undefined symbol: cuFoo" in reason


def test_a_missing_dependency_of_the_library_is_named(external: pathlib.Path) -> None:
    external.write_text("import a_package_that_is_not_there")
    reason = describe_import(None, only_external)
    assert reason is not None
    assert "a_package_that_is_not_there" in reason


def test_a_library_without_the_symbol_is_named_with_its_file(
    external: pathlib.Path,
) -> None:
    external.write_text("def get_num_sms(): return 132")
    reason = describe_import(only_external("deep_gemm"), only_external)
    assert reason is not None
    assert "lacks fp8_gemm_nt" in reason
    assert str(external) in reason
    assert "external deep_gemm" in reason


def test_a_cache_folder_that_breaks_the_library_s_shell_is_named() -> None:
    problem = describe_cache("/my cache/deep_gemm")
    assert problem is not None
    assert "DG_JIT_CACHE_DIR=/my cache/deep_gemm" in problem
    assert describe_cache("/cachü/deep_gemm-1.0_x+y") is None


def test_a_whole_library_is_no_problem(external: pathlib.Path) -> None:
    external.write_text("def get_num_sms(): ...\ndef fp8_gemm_nt(): ...")
    assert describe_import(only_external("deep_gemm"), only_external) is None
