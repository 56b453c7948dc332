"""Decides whether our files stand in for the base's, all of them or none.

Loaded at the first request for a `vllm.` module, never before. The base is
read as files: importing it from inside an import of it would recurse.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

from .bases import Base, known_bases
from .finder import Decision, installed
from .settings import SWITCH, is_switched_off

DIVERTED_FILE = "model_executor/warmup/deep_gemm_warmup.py"
DIVERTED_NAME = "vllm.model_executor.warmup._deep_gemm_warmup_base"


def decide(
    environ: Mapping[str, str] | None = None,
    base_roots: Iterable[str] | None = None,
    tree: Path | None = None,
    bases: tuple[Base, ...] | None = None,
) -> Decision:
    """Compare the base's files with the recorded digests.

    Args:
        environ: where the switch is read; this process's by default.
        base_roots: folders of the `vllm` package; those of the `vllm` that is
            being imported by default.
        tree: our files, laid out like the `vllm` package.
        bases: the bases we know.

    """
    environ = os.environ if environ is None else environ
    if is_switched_off(environ):
        return Decision(False, expected=True, reason=f"{SWITCH}=0")
    roots = [Path(root) for root in _vllm_roots(base_roots)]
    ours = tree_modules(tree_root() if tree is None else tree)
    bases = known_bases() if bases is None else bases
    names = {name for base in bases for name in base.files}
    found = {name: _find(roots, name) for name in names}
    digests = {name: _sha256(path) for name, path in found.items()}
    base = match(bases, digests)
    if base is None:
        return Decision(
            False, expected=False, reason=_why_unknown(bases, digests, roots)
        )
    missing = [n for n in base.files if module_name(n) not in ours]
    if missing:
        reason = f"this installation is damaged: no {', '.join(sorted(missing))}"
        return Decision(False, expected=False, base=base.version, reason=reason)
    modules = ours | {DIVERTED_NAME: str(found[DIVERTED_FILE])}
    return Decision(True, expected=True, base=base.version, modules=modules)


def match(bases: Iterable[Base], digests: Mapping[str, str]) -> Base | None:
    """The base all of whose files have their recorded digests, or None."""
    for base in bases:
        if all(digests[name] == digest for name, digest in base.files.items()):
            return base
    return None


def base_in_use() -> Base:
    """The base that our files stand in this process beside.

    Raises:
        LookupError: the finder stands aside.

    """
    finder = installed()
    version = finder.decide().base if finder else ""
    for base in known_bases():
        if base.version == version:
            return base
    raise LookupError("base (none): the finder stands aside; our files cannot run")


def tree_root() -> Path:
    """Our files: inside the package when installed, the checkout's `vllm/` else."""
    package = Path(__file__).absolute().parent
    packed = package / "tree"
    return packed if packed.is_dir() else package.parent


def tree_modules(root: Path) -> dict[str, str]:
    """Module name -> file for each module of ours under `root`.

    A folder without `__init__.py` is vLLM's own package and is not ours to
    hand out; this package, which lies beside them in a checkout, is skipped.
    """
    own = Path(__file__).absolute().parent
    return {
        module_name(path.relative_to(root).as_posix()): str(path)
        for path in sorted(root.rglob("*.py"))
        if own not in path.parents or root == own / "tree"
    }


def module_name(relative: str) -> str:
    """`a/b.py` -> `vllm.a.b`; `a/b/__init__.py` -> `vllm.a.b`."""
    parts = relative.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(["vllm", *parts])


def spec_for(name: str, location: str) -> ModuleSpec | None:
    """An ordinary spec: source, bytecode cache, reload and pickling all work."""
    folder = os.path.dirname(location)  # noqa: PTH120 - exactly as given
    is_package = location.endswith("__init__.py")
    return importlib.util.spec_from_file_location(
        name,
        location,
        loader=SourceFileLoader(name, location),
        submodule_search_locations=[folder] if is_package else None,
    )


def _vllm_roots(given: Iterable[str] | None) -> list[str]:
    # `vllm.x` is only asked for while or after `vllm` itself is imported.
    return list(sys.modules["vllm"].__path__ if given is None else given)


def _find(roots: Iterable[Path], name: str) -> Path | None:
    return next((root / name for root in roots if (root / name).is_file()), None)


def _sha256(path: Path | None) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else "no such file"


def _why_unknown(
    bases: tuple[Base, ...], digests: Mapping[str, str], roots: list[Path]
) -> str:
    """Name the file, both digests and the base's version."""
    version = _installed_version(roots)
    nearest = max(
        bases,
        key=lambda b: (
            b.version == version,
            sum(digests[name] == digest for name, digest in b.files.items()),
        ),
    )
    differing = "; ".join(
        f"vllm/{name} has sha256 {digests[name]}, recorded is {digest}"
        for name, digest in sorted(nearest.files.items())
        if digests[name] != digest
    )
    return (
        f"vLLM {version} differs from {nearest.version}, the nearest base that this "
        f"patch set knows: {differing}"
    )


def _installed_version(roots: list[Path]) -> str:
    """Version by the metadata beside the package; importing vLLM is too much."""
    for root in roots:
        for folder in sorted(root.parent.glob("vllm-*.dist-info")):
            return folder.name.removeprefix("vllm-").removesuffix(".dist-info")
    return "of unknown version"
