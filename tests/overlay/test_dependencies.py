"""Which way imports point: our tree under `vllm/` may use the package, never back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from vllm_deep_gemm_warmup import overlay

PACKAGE = Path(overlay.__file__).parent
# Imports the base inside functions: vLLM itself calls it.
USES_THE_BASE = {"plugin.py"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_the_package_imports_nothing_of_vllm_s() -> None:
    """The finder runs in every interpreter, and the proof beside any vLLM."""
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "tree" not in path.parents
        and any(
            name.split(".")[0] == "vllm"
            for name in imported(ast.parse(path.read_text()))
        )
    }
    assert users == USES_THE_BASE


def test_our_tree_reads_no_environment() -> None:
    """Settings come from `settings`, facts from what reads them, the rest is vLLM's."""
    for path in map(Path, overlay.tree_modules(overlay.tree_root()).values()):
        names = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert not names & {"environ", "getenv", "putenv"}, path


def test_planning_and_reporting_start_no_device() -> None:
    """Of the warmup's own files these talk to DeepGEMM; the others are values."""
    tree = overlay.tree_root() / "model_executor/warmup/deep_gemm_jit"
    talking = {
        path.relative_to(tree).parts[0]
        for path in tree.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and (node.module or "").split(".")[0] == "vllm"
    }
    assert talking == {
        "backend.py",
        "build.py",
        "entry_points",
        "monitor.py",
        "sm_counts.py",
    }
