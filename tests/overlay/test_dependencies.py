"""Which way imports point: our tree under `vllm/` may use the package, never back."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
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


# Of the warmup's own files these talk to DeepGEMM, by vLLM's module of it or by the
# library itself; the others are values. Those that ask a question alone are below.
TALKS = {
    "backend.py",
    "entry_points/einsum.py",
    "entry_points/gemm.py",
    "entry_points/grouped.py",
    "entry_points/hc_prenorm.py",
    "entry_points/masked.py",
    "entry_points/mqa_logits.py",
    "monitor.py",
    "sm_counts.py",
}
ASKS = {
    "adapters/batched_experts.py": {"is_deep_gemm_e8m0_used"},
    "adapters/experts.py": {"is_deep_gemm_e8m0_used"},
    "adapters/mhc.py": {"is_deep_gemm_supported"},
    "library.py": {
        "DeepGemmQuantScaleFMT",
        "_import_deep_gemm",
        "is_deep_gemm_e8m0_used",
    },
    "machine.py": {"_import_deep_gemm"},
}
DEEP_GEMM = ("vllm.utils.deep_gemm", "vllm.third_party.deep_gemm", "deep_gemm")


def taken(tree: ast.AST) -> Iterator[str]:
    """What a file takes of DeepGEMM, wherever in it; "*" for a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ("*" for alias in node.names if alias.name in DEEP_GEMM)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names:
                if module in DEEP_GEMM:
                    yield alias.name
                elif f"{module}.{alias.name}" in DEEP_GEMM:
                    yield "*"


def test_few_files_talk_to_deep_gemm() -> None:
    tree = overlay.tree_root() / "model_executor/warmup/deep_gemm_jit"
    found = {
        path.relative_to(tree).as_posix(): set(taken(ast.parse(path.read_text())))
        for path in tree.rglob("*.py")
    }
    talking = {name: names for name, names in found.items() if names}
    assert talking == {name: {"*"} for name in TALKS} | ASKS


def at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a file is imported; types are not imported then."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            if "TYPE_CHECKING" not in ast.unparse(node).partition(":")[0]:
                yield from at_import(n for n in ast.iter_child_nodes(node)
                                     if isinstance(n, ast.stmt))  # fmt: skip
        elif isinstance(node, ast.ClassDef):
            yield from at_import(node.body)


def test_planning_and_reporting_start_no_device() -> None:
    """Importing vLLM's modules starts it, so the others import it in functions."""
    tree = overlay.tree_root() / "model_executor/warmup/deep_gemm_jit"
    importing = {
        path.relative_to(tree).as_posix()
        for path in tree.rglob("*.py")
        for node in at_import(ast.parse(path.read_text()).body)
        if any(
            name.split(".")[0] == "vllm"
            for name in imported(ast.Module([node], []))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        )
    }
    assert importing == TALKS | {"build.py"}
