"""Our three files against the installed base, which is read and not imported."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import itertools
import re
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
from vllm_deep_gemm_warmup import overlay, toolchain
from vllm_deep_gemm_warmup.bases import Base, known_bases


@pytest.fixture(scope="module")
def base() -> Base:
    """The recorded base of the version that is installed."""
    version = importlib.metadata.version("vllm")
    return next(base for base in known_bases() if base.version == version)


@pytest.fixture(scope="module")
def ours(overlaid: tuple[str, ...]) -> dict[str, Path]:
    """The overlaid files; each must be there, or nothing would be overlaid."""
    files = {name: overlay.tree_root() / name for name in overlaid}
    absent = [name for name, path in files.items() if not path.is_file()]
    assert not absent, f"not in our tree: {absent}"
    return files


def test_recorded_digests_are_those_of_the_installed_base(
    base: Base, installed_base: Path, overlaid: tuple[str, ...]
) -> None:
    assert set(base.files) == set(overlaid)
    for name, digest in base.files.items():
        found = hashlib.sha256((installed_base / name).read_bytes()).hexdigest()
        assert (name, found) == (name, digest)


def test_installed_base_is_recognised(installed_base: Path, base: Base) -> None:
    decision = overlay.decide({}, [str(installed_base)])
    assert decision.reason == ""
    assert decision.active
    assert decision.base == base.version


def test_recorded_versions_are_installed(base: Base, installed_base: Path) -> None:
    facts = dict(base.facts)
    text = (installed_base / "third_party/deep_gemm/__init__.py").read_text()
    assert f"__version__ = '{facts.pop('deep_gemm')}'" in text
    assert facts == {name: importlib.metadata.version(name) for name in facts}


def test_requirements_pin_the_base_and_the_toolchain(
    base: Base, checkout: Path
) -> None:
    lines = (checkout / "requirements" / "base.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["vllm"] == base.version
    for name in ("torch", "flashinfer-python", "compressed-tensors"):
        assert pins[name] == base.facts[name]
    for pin in toolchain.PINS.split():
        name, version = pin.split("==")
        assert pins[name] == version
    # Each pin has its reason on the line above it.
    for above, line in itertools.pairwise(lines):
        assert above.startswith("#") or not line or line.startswith("#")


def test_pins_are_what_is_installed(checkout: Path) -> None:
    lines = (checkout / "requirements" / "base.txt").read_text().splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert (name, importlib.metadata.version(name)) == (name, version)


def test_every_name_that_the_base_imports_is_in_ours(
    installed_base: Path, ours: dict[str, Path], overlaid: tuple[str, ...]
) -> None:
    wanted = imported_names(installed_base, overlaid)
    # The scan sees what is there: names known to be imported in this base.
    known = {
        overlaid[0]: {"FP8BlockParams", "Fp8BlockScaledMMLinearKernel"},
        overlaid[1]: {"DeepGemmFp8BlockScaledMMKernel", "fp8_gemm_nt"},
        overlaid[2]: {"deep_gemm_warmup"},
    }
    for name, path in ours.items():
        assert known[name] <= wanted[name]
        missing = wanted[name] - defined_names(path)
        assert (name, missing) == (name, set())


def test_every_overlaid_file_says_why_it_exists(ours: dict[str, Path]) -> None:
    for name, path in ours.items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        for word in ("Why", "How", "Upstream", "Removal"):
            found = re.search(rf"^{word}: *\S", text, re.MULTILINE)
            assert found, f"{name}: no `{word}: ...` line in its docstring"


def test_nothing_else_of_the_base_is_overlaid(
    installed_base: Path, ours: dict[str, Path], overlaid: tuple[str, ...]
) -> None:
    tree = overlay.tree_root()
    names = {
        Path(path).relative_to(tree).as_posix()
        for path in overlay.tree_modules(tree).values()
    }
    assert {n for n in names if (installed_base / n).exists()} == set(overlaid)
    # No `__init__.py` where vLLM has one.
    assert not [
        n
        for n in names
        if n.endswith("__init__.py") and (installed_base / n).parent.is_dir()
    ]


def imported_names(root: Path, files: tuple[str, ...]) -> dict[str, set[str]]:
    """File -> names that other modules under `root` import from it."""
    modules = {overlay.module_name(name): name for name in files}
    stems = tuple(Path(name).stem for name in files)
    wanted: dict[str, set[str]] = {name: set() for name in files}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root).as_posix()
        text = path.read_text(errors="replace")
        if relative in files or not any(stem in text for stem in stems):
            continue
        package = overlay.module_name(relative).split(".")
        if path.name != "__init__.py":
            package = package[:-1]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*start, *(node.module or "").split(".")]).strip(".")
                if source in modules:
                    wanted[modules[source]] |= {alias.name for alias in node.names}
    return wanted


def defined_names(path: Path) -> set[str]:
    """Names bound at the top level of a module, imports included."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def test_the_recorded_row_count_is_the_wrapper_s(
    base: Base, installed_base: Path
) -> None:
    """The base's dispatch compares the number of rows with exactly this number."""
    path = installed_base / "model_executor/kernels/linear/scaled_mm/flashinfer.py"
    limits = {
        node.comparators[0].value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and ast.unparse(node.left) == "input.shape[0]"
        and isinstance(node.ops[0], ast.Lt)
        and isinstance(node.comparators[0], ast.Constant)
    }
    assert limits == {base.wrapper_first_row}


@pytest.mark.parametrize("family", [80, 90, 100, 110, 120])
@pytest.mark.parametrize("scales", ["UE8M0", "FLOAT32", "FLOAT32_CEIL_UE8M0"])
def test_the_recorded_layout_of_experts_is_theirs(
    base: Base, installed_base: Path, family: int, scales: str
) -> None:
    """The base's own condition, cut out of its source and asked about everything."""
    moe = installed_base / "model_executor/layers/fused_moe"
    condition = assigned(
        moe / "experts/deep_gemm_moe.py", "DeepGemmExperts", "use_psum_layout"
    )
    activations = enumerated(moe / "activation.py", "MoEActivation")
    assert "SILU" in activations
    packed = {
        "DeepGemmQuantScaleFMT": SimpleNamespace(
            UE8M0="UE8M0", from_oracle=lambda: scales
        )
    }
    for activation in activations:
        facts = {
            "self": SimpleNamespace(mxfp8=False),
            "current_platform": SimpleNamespace(
                is_device_capability_family=lambda asked: asked == family
            ),
            "MoEActivation": SimpleNamespace(**{name: name for name in activations}),
            "activation": activation,
            **packed,
        }
        expected = eval(condition, facts)
        found = base.experts_use_prefix_sum(activation, family, scales == "UE8M0")
        assert (activation, found) == (activation, expected)


def class_body(path: Path, name: str) -> ast.ClassDef:
    return next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )


def assigned(path: Path, class_name: str, variable: str) -> CodeType:
    """The one expression that a class assigns to a variable, ready for `eval`."""
    (expression,) = (
        node.value
        for node in ast.walk(class_body(path, class_name))
        if isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == [variable]
    )
    return compile(ast.Expression(expression), str(path), "eval")


def enumerated(path: Path, class_name: str) -> list[str]:
    """The names of an enumeration's members."""
    return [
        node.targets[0].id
        for node in class_body(path, class_name).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
