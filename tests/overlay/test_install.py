"""Wheel, editable install and uninstall, in throw-away environments, offline."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "vllm_deep_gemm_warmup"
MODULES = f"""
import vllm
from {PACKAGE} import finder
decision = finder.installed().decide()
for name, path in sorted(decision.modules.items()):
    print(name, path, sep='\\t')
"""
WHO = """
from vllm.model_executor.warmup import deep_gemm_warmup, kernel_warmup
print(deep_gemm_warmup.WHO, kernel_warmup.WHO)
"""


@pytest.fixture
def env(
    tmp_path: Path,
    new_env: Callable[[Path], Any],
    write_fake_base: Callable[[Path], None],
    build_tools: Path,
) -> Any:
    """An environment with the fake base and, last on its path, setuptools."""
    made = new_env(tmp_path / "env")
    write_fake_base(made.site_packages)
    (made.site_packages / "zz_tools.pth").write_text(f"{build_tools}\n")
    return made


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below `folder`, bytecode aside."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def served(env: Any) -> dict[str, str]:
    """Module name -> content of the file that the finder hands out."""
    lines = env.run(MODULES).splitlines()
    return {
        name: Path(path).read_text()
        for name, path in (line.split("\t") for line in lines)
    }


@pytest.mark.parametrize("editable", [False, True])
def test_install_and_uninstall(
    env: Any, small_source: Path, run_pip: Callable[..., None], editable: bool
) -> None:
    before = snapshot(env.site_packages)
    run_pip(env, "install", *(["-e"] if editable else []), str(small_source))
    assert env.run(WHO) == "ours base"
    assert (env.python.parent / "vllm-deep-gemm").is_file()
    after = snapshot(env.site_packages)
    # Nothing of the base, and nothing else in site-packages, was written to.
    added = set(after) - set(before)
    assert {after[name] for name in before} == set(before.values())
    assert {name.split("/")[0].split("-")[0] for name in added} == {
        PACKAGE,
        f"{PACKAGE}.pth",
    }
    run_pip(env, "uninstall", "vllm-deep-gemm-warmup")
    assert snapshot(env.site_packages) == before
    assert env.run(WHO) == "base base"
    assert not (env.python.parent / "vllm-deep-gemm").exists()


def test_editable_and_wheel_hand_out_the_same_files(
    env: Any, small_source: Path, run_pip: Callable[..., None]
) -> None:
    run_pip(env, "install", str(small_source))
    wheel = served(env)
    run_pip(env, "install", "-e", str(small_source))
    assert served(env) == wheel
    assert len(wheel) == 6  # three files, two of a new subpackage, one diverted


def test_editable_sees_a_change_and_keeps_vllm_off_the_path(
    env: Any, tmp_path: Path, copy_checkout: Callable[[Path], Path], run_pip: Any
) -> None:
    source = copy_checkout(tmp_path / "source")
    run_pip(env, "install", "-e", str(source))
    code = "import sys; print(*sys.path, sep='\\n')"
    assert str(source) not in env.run(code)
    assert env.run(f"import {PACKAGE}.cli as c; print(c.__file__)").startswith(
        str(source)
    )
    (source / "vllm" / PACKAGE / "added.py").write_text("X = 1\n")
    assert env.run(f"from {PACKAGE}.added import X; print(X)") == "1"


def test_wheel_holds_our_package_one_pth_and_nothing_of_vllm(
    tmp_path: Path,
    checkout: Path,
    copy_checkout: Callable[[Path], Path],
    build_wheel: Callable[[Path, Path], Path],
) -> None:
    source = copy_checkout(tmp_path / "source")
    built = build_wheel(source, tmp_path / "out")
    with zipfile.ZipFile(built) as wheel:
        names = [name for name in wheel.namelist() if "dist-info" not in name]
        text = {name: wheel.read(name) for name in names}
    assert {name.split("/")[0] for name in names} == {PACKAGE, f"{PACKAGE}.pth"}
    ours = {
        path.relative_to(checkout / "vllm").as_posix(): path.read_bytes()
        for path in (checkout / "vllm").rglob("*")
        if path.suffix in {".py", ".c", ".h", ".sh", ".map", ".typed"}
    }
    expected = {
        name if name.startswith(PACKAGE) else f"{PACKAGE}/tree/{name}": content
        for name, content in ours.items()
    }
    del text[f"{PACKAGE}.pth"]
    assert text == expected
    assert built.stat().st_size < 1_000_000


def test_a_module_deleted_since_the_last_build_is_gone(
    tmp_path: Path,
    copy_checkout: Callable[[Path], Path],
    build_wheel: Callable[[Path, Path], Path],
) -> None:
    source = copy_checkout(tmp_path / "source")
    left_over = source / "build" / "lib" / PACKAGE / "tree" / "model_executor" / "x.py"
    left_over.parent.mkdir(parents=True)
    left_over.write_text("")
    with zipfile.ZipFile(build_wheel(source, tmp_path / "out")) as wheel:
        assert not [name for name in wheel.namelist() if name.endswith("/x.py")]


def test_metadata(small_wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(small_wheel) as wheel:
        read = {
            Path(name).name: wheel.read(name).decode()
            for name in wheel.namelist()
            if "dist-info" in name
        }
    lines = read["METADATA"].splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    # Installing must never replace an operator's vLLM: no hard dependency.
    assert all("extra ==" in line for line in required)
    pins = (checkout / "requirements" / "base.txt").read_text().splitlines()
    for pin in (line for line in pins if line and not line.startswith("#")):
        assert f'Requires-Dist: {pin}; extra == "base"' in required
    assert "License-Expression: Apache-2.0" in lines
    points = read["entry_points.txt"]
    assert "[vllm.general_plugins]\ndeep_gemm_warmup = " in points
    assert "vllm-deep-gemm = vllm_deep_gemm_warmup.cli:main" in points
