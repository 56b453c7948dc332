"""Build the wheel: our package, the overlay tree inside it, and one `.pth` line.

`data_files` and `extra_path` work in a wheel and silently do nothing with `-e`,
so both kinds of install have a command class here (setuptools 80 to 84).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PACKAGE = "vllm_deep_gemm_warmup"
SOURCE = Path("vllm")
PTH_NAME = f"{PACKAGE}.pth"
# One line, as site wants it. Where files are half removed it says nothing: an
# interpreter that has nothing to do with vLLM must start as if we were not there.
PTH_LINE = (
    f'import sys; exec("try:\\n from {PACKAGE}.finder import install\\n install()'
    '\\nexcept Exception:\\n pass")\n'
)


def overlay_files() -> list[Path]:
    """Our modules at vLLM's own paths, relative to `vllm/`."""
    return [
        path.relative_to(SOURCE)
        for path in sorted(SOURCE.rglob("*.py"))
        if SOURCE / PACKAGE not in path.parents
    ]


class BuildPy(build_py):
    """Adds the overlay tree and the `.pth` file to the wheel."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        # A module deleted since the last build would live on in `build/`.
        shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)
        super().run()
        for target, source in self._added().items():
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(source), target)
        Path(self.build_lib, PTH_NAME).write_text(PTH_LINE)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return outputs
        return [*outputs, *self._added(), str(Path(self.build_lib, PTH_NAME))]

    def get_source_files(self) -> list[str]:
        """What an sdist carries."""
        added = [str(SOURCE / path) for path in overlay_files()]
        requirements = [str(path) for path in sorted(Path("requirements").iterdir())]
        return [*super().get_source_files(), *added, *requirements]

    def _added(self) -> dict[str, Path]:
        tree = Path(self.build_lib, PACKAGE, "tree")
        return {str(tree / path): SOURCE / path for path in overlay_files()}


class OnePackage:
    """Editable files: a package that points at the checkout, and the `.pth` line.

    The checkout's `vllm/` itself stays off `sys.path`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> OnePackage:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(
        self, wheel: Any, files: list[str], mapping: Mapping[str, str]
    ) -> None:
        wheel.writestr(f"{PACKAGE}/__init__.py", f"__path__ = [{str(self.folder)!r}]\n")
        wheel.writestr(PTH_NAME, PTH_LINE)


class EditableWheel(editable_wheel):
    """Replaces the choice of strategy, which would put `vllm/` on `sys.path`."""

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> OnePackage:
        return OnePackage(Path(self.project_dir, SOURCE, PACKAGE).resolve())


setup(
    # Namespace packages: folders of C sources and of a `sitecustomize.py` have no
    # `__init__.py`, and must not have one.
    packages=find_namespace_packages(
        str(SOURCE), include=[PACKAGE, f"{PACKAGE}.*"], exclude=["*.__pycache__*"]
    ),
    package_dir={"": str(SOURCE)},
    package_data={"": ["*.c", "*.h", "*.sh", "*.map", "py.typed"]},
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
)
