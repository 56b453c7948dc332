"""Throw-away environments: a fake base, a small overlay, real wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LINEAR = "model_executor/kernels/linear/scaled_mm"
OVERLAID = (
    f"{LINEAR}/BlockScaledMMLinearKernel.py",
    f"{LINEAR}/deep_gemm.py",
    "model_executor/warmup/deep_gemm_warmup.py",
)
# What a fake base and a small overlay say of themselves; no text of the base's.
FAKE_BASE = {name: f"WHO = 'base'\nNAME = {name!r}\n" for name in OVERLAID}
SMALL_OVERLAY = {name: f"WHO = 'ours'\nNAME = {name!r}\n" for name in OVERLAID} | {
    "model_executor/warmup/deep_gemm_jit/__init__.py": "WHO = 'ours'\n",
    "model_executor/warmup/deep_gemm_jit/spec.py": (
        "class Spec:\n    def whose(self):\n        return 'ours'\n"
    ),
}


@dataclass(frozen=True)
class Env:
    """A virtual environment."""

    python: Path
    site_packages: Path

    def run(self, code: str, *options: str, **environ: str) -> str:
        """Standard output of `python -c code`; fails on any other outcome.

        Whatever this process was told about the overlay is forgotten first.
        """
        done = self.start(code, *options, **environ)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        return done.stdout.strip()

    def start(
        self, code: str, *options: str, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        rest = {k: v for k, v in os.environ.items() if "DEEP_GEMM" not in k}
        return subprocess.run(
            [str(self.python), *options, "-c", code],
            capture_output=True,
            text=True,
            env=rest | environ,
            cwd=self.site_packages.parent,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="session")
def checkout() -> Path:
    return CHECKOUT


@pytest.fixture(scope="session")
def overlaid() -> tuple[str, ...]:
    return OVERLAID


@pytest.fixture(scope="session")
def new_env() -> Callable[[Path], Env]:
    """Create an environment without pip; milliseconds."""

    def make(folder: Path) -> Env:
        venv.create(folder, symlinks=True, with_pip=False)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return Env(
            folder / "bin" / "python", folder / "lib" / version / "site-packages"
        )

    return make


@pytest.fixture(scope="session")
def build_wheel() -> Callable[[Path, Path], Path]:
    """Build the wheel of a source folder, offline."""

    def build(source: Path, out: Path) -> Path:
        pip(sys.executable, "wheel", "--wheel-dir", str(out), str(source))
        return next(out.glob("*.whl"))

    return build


@pytest.fixture(scope="session")
def run_pip() -> Callable[..., None]:
    """Run pip in an environment: `run_pip(env, "install", ...)`."""
    return lambda env, *words: pip(str(env.python), *words)


@pytest.fixture(scope="session")
def copy_checkout() -> Callable[[Path], Path]:
    """A copy to build in: a build writes beside its source."""
    return lambda folder: _copy_checkout(folder)


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout with the small overlay, written against the fake base."""
    source = _copy_checkout(tmp_path_factory.mktemp("small") / "source")
    shutil.rmtree(source / "vllm" / "model_executor", ignore_errors=True)
    write_files(source / "vllm", SMALL_OVERLAY)
    digests = {n: hashlib.sha256(t.encode()).hexdigest() for n, t in FAKE_BASE.items()}
    for base in (source / "vllm/vllm_deep_gemm_warmup/bases").glob("v*.py"):
        base.unlink()
    (source / "vllm/vllm_deep_gemm_warmup/bases/v0_33_0.py").write_text(
        "from . import Base\n"
        f"BASE = Base('0.33.0', {digests!r}, {{}}, {{}}, 32, lambda *facts: True)\n"
    )
    return source


@pytest.fixture(scope="session")
def small_wheel(
    small_source: Path,
    build_wheel: Callable[[Path, Path], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    return build_wheel(small_source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def patched(tmp_path: Path, new_env: Callable[[Path], Env], small_wheel: Path) -> Env:
    """An environment, in a path with spaces, with the fake base and our wheel."""
    env = new_env(tmp_path / "an environment")
    write_base(env.site_packages)
    with zipfile.ZipFile(small_wheel) as wheel:
        wheel.extractall(env.site_packages)
    return env


@pytest.fixture(scope="session")
def build_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this interpreter's setuptools and nothing else."""
    spec = importlib.util.find_spec("setuptools")
    if spec is None or spec.origin is None:
        pytest.fail("setuptools is missing: pip install -r requirements/test.txt")
    folder = tmp_path_factory.mktemp("tools")
    for pattern in ("setuptools*", "_distutils_hack"):
        for path in Path(spec.origin).parents[1].glob(pattern):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="session")
def installed_base() -> Path:
    """Folder of the installed `vllm`, found without importing it."""
    for entry in sys.path:
        if (Path(entry) / "vllm" / "__init__.py").is_file():
            return Path(entry) / "vllm"
    pytest.fail("the base is not installed: pip install -r requirements/base.txt")


@pytest.fixture(scope="session")
def write_fake_base() -> Callable[[Path], None]:
    return write_base


def pip(python: str, *words: str) -> None:
    command, *rest = words
    local = ["--no-deps", "--no-build-isolation"] if command != "uninstall" else ["-y"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "-q", command, *local, *rest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


def write_base(site_packages: Path) -> None:
    """A `vllm` package with the three files and a module that is not ours."""
    packages = [
        "",
        "model_executor",
        "model_executor/warmup",
        "model_executor/kernels",
        "model_executor/kernels/linear",
        LINEAR,
    ]
    inits = {f"{name}/__init__.py".lstrip("/"): "" for name in packages}
    other = {"model_executor/warmup/kernel_warmup.py": "WHO = 'base'\n"}
    write_files(site_packages / "vllm", inits | other | FAKE_BASE)
    metadata = site_packages / "vllm-0.33.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")


def write_files(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _copy_checkout(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    folder.mkdir(parents=True)
    for name in ("vllm", "requirements"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / name, folder / name)
    return folder
