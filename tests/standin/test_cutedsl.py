"""A function that CuTeDSL compiled is called and does nothing, as DeepSeek-V4 needs."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

# The package puts this folder on the path by a .pth file, which a virtual environment
# on top of another one does not read.
PACKAGES = "dsl_packages"

CODE = """
import cutlass.cute as cute

@cute.kernel
def empty():
    pass

@cute.jit
def launch():
    empty().launch(grid=[1, 1, 1], block=[32, 1, 1])

compiled = cute.compile(launch, options="--enable-tvm-ffi")
print(type(compiled).__name__, compiled())
"""


def test_a_compiled_function_can_be_called(
    standin: Callable[..., dict[str, str]],
    python: Callable[..., str],
    tmp_path: Path,
) -> None:
    """Its launcher would ask the driver for tables that the stand-in does not have."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    assert package is not None
    assert package.submodule_search_locations is not None
    (folder,) = package.submodule_search_locations
    program = tmp_path / "program.py"
    program.write_text(CODE)  # the compiler reads its source
    env = standin()
    env["PYTHONPATH"] += f":{Path(folder) / PACKAGES}"
    said = python(f"import runpy; runpy.run_path({str(program)!r})", env)
    assert said.split() == ["TVMFFIJitCompiledFunction", "None"]
