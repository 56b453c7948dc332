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


def test_only_tools_use_the_proof() -> None:
    """What runs in an engine has nothing of what proves it."""
    proof = "vllm_deep_gemm_warmup.proof"
    package = {
        ("vllm_deep_gemm_warmup", *path.relative_to(PACKAGE).parts): path
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "tree" not in path.parents
    }
    tree = {
        tuple(name.split(".")): Path(path)
        for name, path in overlay.tree_modules(overlay.tree_root()).items()
    }
    users = {
        module[1]
        for module, path in {**package, **tree}.items()
        if any(
            f"{name}.".startswith(f"{proof}.")
            for name in absolute(ast.parse(path.read_text()), module)
        )
    }
    assert users == {"proof", "offline"}


def absolute(tree: ast.AST, module: tuple[str, ...]) -> Iterator[str]:
    """Every module that may be imported, by its whole name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module[: -node.level] if node.level else ()
            base = [*above, *(node.module or "").split(".")]
            for alias in node.names:
                yield ".".join(filter(None, [*base, alias.name]))


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
