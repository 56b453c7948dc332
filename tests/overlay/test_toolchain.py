"""The compiler lookup, against fake executables and, once, the real one."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup import toolchain
from vllm_deep_gemm_warmup.toolchain import Facts, Rejected, Toolchain

NOWHERE = Path("/nonexistent/cuda")
SAYS = "echo 'nvcc: NVIDIA (R) Cuda compiler driver'\necho 'release {0}, V{0}.88'\n"


def script(path: Path, body: str, first_line: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(first_line + body)
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path: Path) -> Callable[..., Path]:
    """Make a fake toolkit: `toolkit("13.0")`, or with a body and headers."""

    def make(
        release: str = "13.0",
        name: str = "cuda",
        body: str | None = None,
        headers: int | None = None,
    ) -> Path:
        home = tmp_path / name
        script(home / "bin" / "nvcc", SAYS.format(release) if body is None else body)
        if headers is not None:
            include = home / "include"
            include.mkdir()
            (include / "cuda_runtime_api.h").write_text(
                f"#define CUDART_VERSION  {headers}\n"
            )
        return home

    return make


@pytest.fixture
def compilers(tmp_path: Path) -> Path:
    """A folder for PATH with gcc and g++ and no nvcc."""
    for name in ("gcc", "g++"):
        script(tmp_path / "host" / name, "exit 0\n")
    return tmp_path / "host"


@pytest.fixture
def facts(compilers: Path, tmp_path: Path) -> Callable[..., Facts]:
    """Facts of a machine with a host compiler and nothing of CUDA."""

    def make(
        pip: tuple[Path, ...] = (), fallback: Path = NOWHERE, **variables: object
    ) -> Facts:
        given = {"PATH": compilers, "VLLM_CACHE_ROOT": tmp_path / "cache"} | variables
        items = tuple((n, str(v)) for n, v in given.items() if v is not None)
        return Facts(items, pip, fallback)

    return make


def one_line(answer: Toolchain | Rejected) -> str:
    assert isinstance(answer, Rejected), answer
    text = str(answer)
    assert "\n" not in text
    assert text.startswith("DeepGEMM toolchain (")
    assert "; " in text
    return text


@pytest.mark.parametrize("release", ["12.1", "12.3", "12.8", "11.8"])
def test_too_old(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], release: str
) -> None:
    home = toolkit(release)
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    assert f"{home}/bin/nvcc from CUDA_HOME" in text
    assert f"nvcc {release} is too old, DeepGEMM needs 12.9 or newer" in text


@pytest.mark.parametrize("release", ["12.9", "13.0", "13.5", "14.0"])
def test_new_enough(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], release: str
) -> None:
    home = toolkit(release)
    found = toolchain.describe(facts(CUDA_HOME=home))
    assert isinstance(found, Toolchain)
    assert found.nvcc == home / "bin" / "nvcc"
    assert found.version == tuple(map(int, release.split(".")))
    assert found.headers is None


def test_no_toolkit_anywhere(facts: Callable[..., Facts]) -> None:
    text = one_line(toolchain.describe(facts()))
    assert "there is no CUDA toolkit" in text
    assert "nvidia-cuda-nvcc==13.0.88" in text
    assert "set CUDA_HOME" in text


def test_nvcc_that_exits_one(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit(body="echo 'release 13.0, V13.0.88'\nexit 1\n")
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    assert "`nvcc --version` failed with exit code 1" in text


def test_nvcc_that_prints_nothing(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit(body="exit 0\n")
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    assert "`nvcc --version` names no release" in text


def test_nvcc_that_does_not_answer_is_not_rejected(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    """Only what is known to fail disqualifies; a slow disk is no evidence."""
    home = toolkit(body="exec sleep 30\n")
    given = facts(CUDA_HOME=home)
    found = toolchain.describe(Facts(given.variables, fallback=NOWHERE, patience=0.2))
    assert isinstance(found, Toolchain)
    assert found.version is None


def test_compiler_variable_that_points_nowhere(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], tmp_path: Path
) -> None:
    nowhere = tmp_path / "no" / "nvcc"
    given = facts(CUDA_HOME=toolkit(), DG_JIT_NVCC_COMPILER=nowhere)
    text = one_line(toolchain.describe(given))
    assert f"{nowhere} from DG_JIT_NVCC_COMPILER" in text
    assert "no executable program there" in text


def test_compiler_variable_alone_is_not_enough(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    nvcc = toolkit() / "bin" / "nvcc"
    one_line(toolchain.describe(facts(DG_JIT_NVCC_COMPILER=nvcc)))
    gone = facts(DG_JIT_NVCC_COMPILER=nvcc, CUDA_HOME="/nonexistent")
    assert "alone is not enough" in one_line(toolchain.describe(gone))


def test_not_executable(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit()
    (home / "bin" / "nvcc").chmod(0o644)
    assert "no executable" in one_line(toolchain.describe(facts(CUDA_HOME=home)))


def test_home_that_is_not_there(facts: Callable[..., Facts]) -> None:
    text = one_line(toolchain.describe(facts(CUDA_PATH="/nonexistent")))
    assert "CUDA_PATH=/nonexistent" in text


@pytest.mark.parametrize("headers", [13000, 12090])
def test_headers_that_do_not_fit(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], headers: int
) -> None:
    home = toolkit("13.5", headers=headers)
    text = one_line(toolchain.describe(facts(CUDA_HOME=home)))
    expected = f"{headers // 1000}.{headers % 1000 // 10}"
    assert f"nvcc 13.5 does not fit the CUDA {expected} headers" in text
    assert "pip install nvidia-cuda-nvcc==" in text


def test_headers_that_fit(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit("13.0", headers=13000)
    found = toolchain.describe(facts(CUDA_HOME=home))
    assert isinstance(found, Toolchain)
    assert found.headers == (13, 0)


@pytest.mark.parametrize("absent", ["g++", "gcc"])
def test_no_host_compiler(
    toolkit: Callable[..., Path],
    facts: Callable[..., Facts],
    compilers: Path,
    absent: str,
) -> None:
    (compilers / absent).unlink()
    given = facts(CUDA_HOME=toolkit())
    text = one_line(toolchain.describe(given))
    assert f"no {absent} on PATH" in text
    assert "apt-get install g++" in text


@pytest.mark.parametrize(
    "variable",
    [("NVCC_CCBIN", "/opt/g++-13"), ("NVCC_APPEND_FLAGS", "-ccbin /opt/g++-13")],
)
def test_host_compiler_named_to_nvcc(
    toolkit: Callable[..., Path],
    facts: Callable[..., Facts],
    compilers: Path,
    variable: tuple[str, str],
) -> None:
    (compilers / "g++").unlink()
    given = facts(CUDA_HOME=toolkit(), **dict([variable]))
    assert isinstance(toolchain.describe(given), Toolchain)


def test_script_without_a_first_line(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit()
    script(home / "bin" / "nvcc", SAYS.format("13.0"), first_line="")
    assert isinstance(toolchain.describe(facts(CUDA_HOME=home)), Toolchain)


def test_replaced_nvcc_is_asked_again(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    home = toolkit("12.8")
    given = facts(CUDA_HOME=home)
    one_line(toolchain.describe(given))
    script(home / "bin" / "nvcc", SAYS.format("13.0") + "# longer\n")
    assert isinstance(toolchain.describe(given), Toolchain)


def test_nvcc_is_asked_once(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    home = toolkit(body=f"echo x >> {log}\n" + SAYS.format("13.0"))
    for _ in range(5):
        toolchain.describe(facts(CUDA_HOME=home))
    assert log.read_text() == "x\n"


def test_order_is_that_of_the_library(
    toolkit: Callable[..., Path], facts: Callable[..., Facts], compilers: Path
) -> None:
    homes = {n: toolkit(name=n) for n in ("a", "b", "path", "fallback")}
    variables: dict[str, object] = {
        "CUDA_HOME": homes["a"],
        "CUDA_PATH": homes["b"],
        "PATH": f"{homes['path'] / 'bin'}:{compilers}",
    }
    expected = [("CUDA_HOME", "a"), ("CUDA_PATH", "b"), ("PATH", "path")]
    for origin, name in expected:
        given = facts(fallback=homes["fallback"], **variables)
        found = toolchain.describe(given)
        assert isinstance(found, Toolchain)
        assert (found.origin, found.home) == (origin, homes[name])
        assert toolchain.operator_choice(given) == origin
        variables[origin] = compilers if origin == "PATH" else None
    found = toolchain.describe(facts(fallback=homes["fallback"]))
    assert isinstance(found, Toolchain)
    assert found.origin == str(homes["fallback"])


@pytest.mark.parametrize(
    "name", ["CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "PATH"]
)
def test_operator_wins_over_pip_even_with_a_bad_choice(
    toolkit: Callable[..., Path],
    facts: Callable[..., Facts],
    compilers: Path,
    name: str,
) -> None:
    own, pip = toolkit("12.1", name="own"), toolkit("13.0", name="pip")
    value = {
        "PATH": f"{own / 'bin'}:{compilers}",
        "DG_JIT_NVCC_COMPILER": own / "bin" / "nvcc",
    }.get(name, own)
    given = facts(pip=(pip,), fallback=own, **{name: value})
    root, answer = toolchain.choose(given)
    assert root is None
    assert "12.1 is too old" in one_line(answer)
    assert toolchain.environment(given) == {}


def test_pip_wins_over_the_fallback(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    pip, fallback = toolkit(name="pip"), toolkit(name="fallback")
    given = facts(pip=(pip,), fallback=fallback)
    root, answer = toolchain.choose(given)
    assert root == pip
    assert isinstance(answer, Toolchain)
    (name, links) = toolchain.environment(given).popitem()
    assert name == "CUDA_HOME"
    assert (Path(links) / "bin" / "nvcc").resolve() == pip / "bin" / "nvcc"


def test_bad_pip_leaves_the_fallback(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    pip = toolkit("13.5", name="pip", headers=13000)
    fallback = toolkit(name="fallback")
    given = facts(pip=(pip,), fallback=fallback)
    root, answer = toolchain.choose(given)
    assert (root, toolchain.environment(given)) == (None, {})
    assert isinstance(answer, Toolchain)
    assert answer.home == fallback
    # And where there is no fallback, the message is about what is there.
    _, answer = toolchain.choose(facts(pip=(pip,)))
    assert "does not fit" in one_line(answer)


def test_empty_variable_is_an_unset_one(toolkit: Callable[..., Path]) -> None:
    given = toolchain.read_facts({"CUDA_HOME": "", "PATH": ""}, (), NOWHERE)
    assert given.variables == ()


def test_pip_roots_prefer_the_newest(tmp_path: Path) -> None:
    for name in ("cu12", "cu13", "cu9", "cudnn"):
        script(tmp_path / "nvidia" / name / "bin" / "nvcc", "")
    (tmp_path / "nvidia" / "cu14").mkdir()
    names = [r.name for r in toolchain.pip_roots(["", str(tmp_path), str(tmp_path)])]
    assert names == ["cu13", "cu12", "cu9"]


@pytest.fixture
def pip_root(tmp_path: Path) -> Path:
    """A toolkit as pip unpacks it: versioned names in `lib`."""
    root = tmp_path / "site" / "nvidia" / "cu13"
    script(root / "bin" / "nvcc", SAYS.format("13.0"))
    for folder in ("include", "nvvm", "lib/cmake"):
        (root / folder).mkdir(parents=True)
    for name in (
        "libcudart.so.13",
        "libcudart_static.a",
        "libnvrtc.so.13",
        "libnvrtc.alt.so.13",
        "libnvrtc-builtins.so.13.0",
        "libcufile.so.0",
        "libcheckpoint.so",
    ):
        (root / "lib" / name).write_text(name)
    return root


def test_links_look_like_a_toolkit(
    pip_root: Path, facts: Callable[..., Facts], tmp_path: Path
) -> None:
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "libcuda.so.1").write_text("driver")
    given = Facts(facts().variables, driver_folders=(tmp_path, driver))
    links = toolchain.cuda_home_links(pip_root, given)
    assert links.parent == tmp_path / "cache" / "deep_gemm_warmup"
    for folder in ("bin", "include", "nvvm"):
        assert (links / folder).resolve() == pip_root / folder
    read = {p.name: p.read_text() for p in (links / "lib64").iterdir() if p.is_file()}
    for name, target in {
        "libcudart.so": "libcudart.so.13",
        "libcudart.so.13": "libcudart.so.13",
        "libcudart_static.a": "libcudart_static.a",
        "libnvrtc.so": "libnvrtc.so.13",
        "libnvrtc.alt.so": "libnvrtc.alt.so.13",
        "libnvrtc-builtins.so": "libnvrtc-builtins.so.13.0",
        "libcufile.so": "libcufile.so.0",
        "libcheckpoint.so": "libcheckpoint.so",
    }.items():
        assert (name, read[name]) == (name, target)
    assert (links / "lib" / "libcudart.so").read_text() == "libcudart.so.13"
    assert (links / "lib64" / "stubs" / "libcuda.so").read_text() == "driver"


def test_links_are_named_by_content_and_made_once(
    pip_root: Path, facts: Callable[..., Facts]
) -> None:
    first = toolchain.cuda_home_links(pip_root, facts())
    state = first.stat().st_ino
    assert toolchain.cuda_home_links(pip_root, facts()) == first
    assert first.stat().st_ino == state
    (pip_root / "lib" / "libcurand.so.10").write_text("")
    second = toolchain.cuda_home_links(pip_root, facts())
    assert second != first
    assert first.is_dir()
    assert {p.name for p in first.parent.iterdir()} == {first.name, second.name}


def test_damaged_links_are_replaced(
    pip_root: Path, facts: Callable[..., Facts]
) -> None:
    links = toolchain.cuda_home_links(pip_root, facts())
    (links / "lib64" / "libcudart.so").unlink()
    (links / "bin").unlink()
    (links / "bin").symlink_to("/elsewhere")
    assert toolchain.cuda_home_links(pip_root, facts()) == links
    assert (links / "lib64" / "libcudart.so").exists()
    assert (links / "bin" / "nvcc").exists()
    assert [p.name for p in links.parent.iterdir()] == [links.name]


def _make_links(root: Path, given: Facts, start: Path) -> str:
    while not start.exists():  # all at once, without a lock to inherit
        pass
    return str(toolchain.cuda_home_links(root, given))


def test_links_made_by_many_processes_at_once(
    pip_root: Path, facts: Callable[..., Facts], tmp_path: Path
) -> None:
    start, given = tmp_path / "start", facts()
    with multiprocessing.get_context("fork").Pool(16) as pool:
        jobs = [
            pool.apply_async(_make_links, (pip_root, given, start)) for _ in range(16)
        ]
        start.touch()
        made = {job.get(60) for job in jobs}
    (links,) = made
    assert Path(links, "bin", "nvcc").exists()
    assert [p.name for p in Path(links).parent.iterdir()] == [Path(links).name]


def test_cache_that_cannot_be_written(
    pip_root: Path,
    facts: Callable[..., Facts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    (tmp_path / "file").write_text("")  # works for root too, unlike a mode
    given = facts(VLLM_CACHE_ROOT=tmp_path / "file")
    links = toolchain.cuda_home_links(pip_root, given)
    assert links.parent.parent == tmp_path / "temp"
    assert links.parent.stat().st_mode & 0o777 == 0o700
    # Nowhere at all: the toolkit itself, which is enough for DeepGEMM.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert toolchain.cuda_home_links(pip_root, given) == pip_root


def test_folder_that_others_can_write_is_not_used(
    pip_root: Path,
    facts: Callable[..., Facts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "cache" / "deep_gemm_warmup"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert folder not in toolchain.cuda_home_links(pip_root, facts()).parents


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"VLLM_CACHE_ROOT": "v", "XDG_CACHE_HOME": "x", "HOME": "h"}, "v"),
        ({"XDG_CACHE_HOME": "x", "HOME": "h"}, "x/vllm"),
        ({"HOME": "h"}, "h/.cache/vllm"),
    ],
)
def test_links_lie_where_vllm_keeps_its_cache(
    pip_root: Path, tmp_path: Path, variables: dict[str, str], place: str
) -> None:
    given = Facts(tuple((n, str(tmp_path / v)) for n, v in variables.items()))
    links = toolchain.cuda_home_links(pip_root, given)
    assert links.parent == tmp_path / place / "deep_gemm_warmup"


def test_probe_names_the_first_error(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    body = 'case "$1" in --version) ' + SAYS.format("13.0").replace("\n", ";")
    body += (
        " exit 0;; esac\necho 'a warning'; echo 'fatal error: crt/x.h' >&2; exit 2\n"
    )
    found = toolchain.describe(facts(CUDA_HOME=toolkit(body=body)))
    assert isinstance(found, Toolchain)
    problem = toolchain.probe(found)
    assert problem is not None
    assert "a test kernel does not compile: fatal error: crt/x.h" in one_line(problem)


def test_probe_wants_a_cubin(
    toolkit: Callable[..., Path], facts: Callable[..., Facts]
) -> None:
    found = toolchain.describe(facts(CUDA_HOME=toolkit()))
    assert isinstance(found, Toolchain)
    problem = toolchain.probe(found)
    assert problem is not None
    assert "no cubin" in problem.reason


def test_pip_toolchain_compiles_with_the_system_nvcc_hidden(tmp_path: Path) -> None:
    """A new process with no CUDA variable, no nvcc on PATH and no /usr/local/cuda."""
    code = f"""
import os
from pathlib import Path
from vllm_deep_gemm_warmup import toolchain as t
facts = t.read_facts(fallback=Path({str(NOWHERE)!r}))
assert t.operator_choice(facts) is None
os.environ.update(t.environment(facts))
found = t.describe_current()
assert isinstance(found, t.Toolchain), str(found)
print(found.nvcc.resolve(), t.probe(found))
"""
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("gcc", "g++", "cc", "as", "ld", "sh"):
        program = shutil.which(name)
        assert program, f"{name} is missing: apt-get install g++"
        (path / name).symlink_to(program)
    environ = {"PATH": str(path), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        if name in os.environ:
            environ[name] = os.environ[name]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nvcc, problem = done.stdout.strip().split(" ", 1)
    assert problem == "None"
    assert nvcc.endswith("/nvidia/cu13/bin/nvcc")
