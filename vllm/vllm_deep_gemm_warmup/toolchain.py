"""Which CUDA compiler DeepGEMM will use here, and whether it can compile.

Facts come in as arguments; `read_facts` is the one function that reads them.
Nothing here imports torch or vLLM, and nothing happens at import.

Source of the lookup order: DeepGEMM 2.8.1 asks `CUDA_HOME`, `CUDA_PATH`,
`which nvcc`, then `/usr/local/cuda`; `DG_JIT_NVCC_COMPILER` replaces the
program but not the need for an existing home. It wants nvcc 12.9 or newer and
fixes its choice when the first kernel is constructed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

OLDEST_NVCC = (12, 9)
FALLBACK_HOME = Path("/usr/local/cuda")
LINKS_FOLDER = "deep_gemm_warmup"

_HOME_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_COMPILER_VARIABLE = "DG_JIT_NVCC_COMPILER"
_HOST_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_CACHE_VARIABLES = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME")
_VARIABLES = (
    *_HOME_VARIABLES,
    _COMPILER_VARIABLE,
    *_HOST_FLAG_VARIABLES,
    *_CACHE_VARIABLES,
    "NVCC_CCBIN",
    "PATH",
)
_DRIVER_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
)
PINS = (
    "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 "
    "nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96"
)
_PROBE_SOURCE = """\
#include <cuda_runtime.h>
#include <cuda/std/utility>
extern "C" __global__ void probe(int* out) { *out = 1; }
"""

Version = tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """What the lookup depends on. Hashable, so that answers can be cached.

    Attributes:
        variables: (name, value) of the environment variables that matter and
            are set to a non-empty value.
        pip_roots: toolkits that pip unpacked, best first.
        fallback: the home DeepGEMM takes when it is told nothing.
        driver_folders: where a driver's `libcuda.so.1` may lie.
        patience: seconds that `nvcc --version` may take (a cold network disk).

    """

    variables: tuple[tuple[str, str], ...]
    pip_roots: tuple[Path, ...] = ()
    fallback: Path = FALLBACK_HOME
    driver_folders: tuple[Path, ...] = ()
    patience: float = 60.0

    def get(self, name: str) -> str | None:
        return dict(self.variables).get(name)

    def with_home(self, home: Path) -> Facts:
        """The same facts with CUDA_HOME set to `home`."""
        rest = tuple(item for item in self.variables if item[0] != "CUDA_HOME")
        return replace(self, variables=(*rest, ("CUDA_HOME", str(home))))


@dataclass(frozen=True)
class Toolchain:
    """A compiler that nothing speaks against.

    Attributes:
        home: the CUDA home DeepGEMM derives.
        nvcc: the program it will run.
        origin: what decided (`CUDA_HOME`, `PATH`, `/usr/local/cuda`, ...).
        version: nvcc's release; None when nvcc did not answer in time.
        headers: release of `cuda_runtime_api.h` beside nvcc; None if not seen.

    """

    home: Path
    nvcc: Path
    origin: str
    version: Version | None
    headers: Version | None

    def __str__(self) -> str:
        release = _dotted(self.version) if self.version else "of unknown release"
        return f"nvcc {release} at {self.nvcc} ({self.origin})"


@dataclass(frozen=True)
class Rejected:
    """Why DeepGEMM cannot compile here, and what to do about it.

    Attributes:
        probed: the path looked at and what named it.
        reason: what is wrong with it, without the path.
        remedy: what the operator can do.

    """

    probed: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"DeepGEMM toolchain ({self.probed}): {self.reason}; {self.remedy}"


def read_facts(
    environ: Mapping[str, str] | None = None,
    search_path: Iterable[str] | None = None,
    fallback: Path = FALLBACK_HOME,
) -> Facts:
    """Read the facts of this process: environment, `sys.path`, driver folders."""
    environ = os.environ if environ is None else environ
    search_path = sys.path if search_path is None else search_path
    return Facts(
        variables=tuple((n, environ[n]) for n in _VARIABLES if environ.get(n)),
        pip_roots=pip_roots(search_path),
        fallback=fallback,
        driver_folders=tuple(map(Path, _DRIVER_FOLDERS)),
    )


def pip_roots(search_path: Iterable[str]) -> tuple[Path, ...]:
    """The `nvidia/cuNN` folders with an nvcc in them, newest CUDA first.

    Found by looking at folders: importing the `nvidia` namespace is not needed.
    """
    found = [
        root
        for entry in search_path
        for root in Path(entry, "nvidia").glob("cu[0-9]*")
        if entry and _is_program(root / "bin" / "nvcc")
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda r: -int(r.name[2:] or 0)))


def describe_current() -> Toolchain | Rejected:
    """What DeepGEMM will use in this process, given the environment as it is.

    Cheap after the first call: nvcc is asked once for each state of its file.
    """
    return describe(read_facts(search_path=()))


def describe(facts: Facts) -> Toolchain | Rejected:
    """What DeepGEMM will use for these facts. Does not consider pip's toolkits.

    Rejects only what is known to fail: no home, no executable nvcc, an nvcc
    whose `--version` fails or cannot be read (the library stops there as well),
    an older release than 12.9, headers of another release, no host compiler.
    """
    located = _locate(facts)
    if isinstance(located, Rejected):
        return located
    home, nvcc, origin = located
    probed = f"{nvcc} from {origin}"
    answer = _nvcc_version(str(nvcc), _file_state(nvcc), facts.patience)
    if isinstance(answer, str):
        return Rejected(probed, answer, _remedy_other())
    if answer is not None and answer < OLDEST_NVCC:
        return Rejected(
            probed,
            f"nvcc {_dotted(answer)} is too old, DeepGEMM needs "
            f"{_dotted(OLDEST_NVCC)} or newer",
            _remedy_other(),
        )
    headers = header_version(nvcc)
    if answer and headers and answer != headers:
        return Rejected(
            probed,
            f"nvcc {_dotted(answer)} does not fit the CUDA {_dotted(headers)} "
            "headers beside it, no kernel would compile",
            f"pip install {PINS}",
        )
    missing = _missing_host_compiler(facts)
    if missing:
        return Rejected(
            probed,
            f"nvcc needs a C++ compiler and there is no {missing} on PATH",
            "apt-get install g++, or set NVCC_CCBIN",
        )
    return Toolchain(home, nvcc, origin, answer, headers)


def choose(facts: Facts) -> tuple[Path | None, Toolchain | Rejected]:
    """The pip toolkit to point CUDA_HOME at, if any, and what then is used.

    An operator's own choice always wins, good or bad: CUDA_HOME, CUDA_PATH,
    DG_JIT_NVCC_COMPILER or an nvcc on PATH. Then the first pip toolkit that
    nothing speaks against; then DeepGEMM's own fallback.
    """
    if operator_choice(facts) is not None:
        return None, describe(facts)
    rejected: Rejected | None = None
    for root in facts.pip_roots:
        answer = describe(facts.with_home(root))
        if isinstance(answer, Toolchain):
            return root, answer
        rejected = rejected or answer
    fallback = describe(facts)
    if isinstance(fallback, Rejected) and rejected is not None:
        return None, rejected
    return None, fallback


def operator_choice(facts: Facts) -> str | None:
    """The name of what the operator chose the compiler with, or None."""
    for name in (*_HOME_VARIABLES, _COMPILER_VARIABLE):
        if facts.get(name):
            return name
    return "PATH" if _nvcc_on_path(facts) else None


def environment(facts: Facts) -> dict[str, str]:
    """Variables to set so that DeepGEMM and FlashInfer find a compiler.

    Empty when the operator chose one, or when there is nothing better to say
    than what DeepGEMM falls back to. Creates the folder of links if need be.
    """
    if operator_choice(facts) is not None:
        return {}
    root, _ = choose(facts)
    if root is None:
        return {}
    return {"CUDA_HOME": str(cuda_home_links(root, facts))}


def cuda_home_links(root: Path, facts: Facts) -> Path:
    """A folder shaped like a CUDA toolkit whose entries point into `root`.

    `lib64` carries each library under its full and its unversioned name, which
    is how FlashInfer links (`-L$CUDA_HOME/lib64 -lcudart`); `lib64/stubs` gets
    the driver's `libcuda.so` where a driver is installed. The folder is named
    by its content, published by rename, and shared by every process of a user.

    Returns `root` itself when no folder can be written: that is enough for
    DeepGEMM, though not for FlashInfer.
    """
    links = _toolkit_links(root, facts.driver_folders)
    text = "\n".join(f"{name} -> {target}" for name, target in sorted(links.items()))
    name = f"cuda-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    for parent in _link_parents(facts):
        try:
            return _publish(parent, name, links)
        except OSError:
            continue  # not writable, or not ours: the next place may be
    return root


def probe(toolchain: Toolchain, timeout: float = 300.0) -> Rejected | None:
    """Compile one tiny SM90 kernel for real; None when that works.

    Seconds of CPU time: for precompiling and for diagnosis, not for each start.
    """
    probed = f"{toolchain.nvcc} from {toolchain.origin}"
    with tempfile.TemporaryDirectory(prefix="deep-gemm-probe-") as folder:
        source, cubin = Path(folder, "probe.cu"), Path(folder, "probe.cubin")
        source.write_text(_PROBE_SOURCE)
        command = [
            *(str(toolchain.nvcc), "--cubin", "-arch=sm_90a"),
            *(str(source), "-o", str(cubin)),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Rejected(probed, f"cannot run a compile: {error}", _remedy_other())
        if done.returncode == 0 and cubin.is_file() and cubin.stat().st_size:
            return None
        lines = (done.stderr + done.stdout).strip().splitlines()
        said = next((line for line in lines if "error" in line), "no cubin, no message")
        return Rejected(
            probed, f"a test kernel does not compile: {said}", _remedy_other()
        )


def header_version(nvcc: Path) -> Version | None:
    """Release of the CUDA headers nvcc will include, or None if not seen.

    nvcc includes from the toolkit it lies in, wherever it was called from. A
    wrapper script lies in none, and nothing is known about its headers.
    """
    folder = nvcc.resolve().parent.parent
    places = (folder / "include", *sorted(folder.glob("targets/*/include")))
    for place in places:
        try:
            text = (place / "cuda_runtime_api.h").read_text(errors="replace")
        except OSError:
            continue
        match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        number = int(match[1]) if match else 0
        return (number // 1000, number % 1000 // 10) if match else None
    return None


def _locate(facts: Facts) -> tuple[Path, Path, str] | Rejected:
    """(home, nvcc, origin) by DeepGEMM's own order."""
    home, origin = _home(facts)
    override = facts.get(_COMPILER_VARIABLE)
    if not _is_there(home):
        if origin in _HOME_VARIABLES:
            also = f" ({_COMPILER_VARIABLE} alone is not enough)" if override else ""
            return Rejected(
                f"{origin}={home}",
                f"no such folder{also}",
                f"point {origin} at a CUDA toolkit, or unset it",
            )
        return Rejected(
            "no nvcc",
            "there is no CUDA toolkit: CUDA_HOME and CUDA_PATH are unset, no nvcc "
            f"on PATH, no {home}",
            f"pip install {PINS}, or set CUDA_HOME",
        )
    nvcc = Path(override) if override else home / "bin" / "nvcc"
    origin = _COMPILER_VARIABLE if override else origin
    if not _is_program(nvcc):
        return Rejected(
            f"{nvcc} from {origin}", "no executable program there", _remedy_other()
        )
    return home, nvcc, origin


def _home(facts: Facts) -> tuple[Path, str]:
    for name in _HOME_VARIABLES:
        value = facts.get(name)
        if value:
            return Path(value), name
    on_path = _nvcc_on_path(facts)
    if on_path:
        return on_path.parent.parent, "PATH"
    return facts.fallback, str(facts.fallback)


def _nvcc_on_path(facts: Facts) -> Path | None:
    found = shutil.which("nvcc", path=facts.get("PATH") or "")
    return Path(found) if found else None


def _missing_host_compiler(facts: Facts) -> str | None:
    """Name of the host compiler nvcc will not find, or None.

    nvcc runs `gcc`, which needs the C++ front end that comes with `g++`.
    """
    flags = " ".join(facts.get(name) or "" for name in _HOST_FLAG_VARIABLES)
    if facts.get("NVCC_CCBIN") or "-ccbin" in flags or "--compiler-bindir" in flags:
        return None
    path = facts.get("PATH") or ""
    return next((n for n in ("g++", "gcc") if not shutil.which(n, path=path)), None)


def _is_there(path: Path) -> bool:
    """Whether this user can see the path; `Path.exists` raises where it cannot."""
    return os.access(path, os.F_OK)


def _is_program(path: Path) -> bool:
    return os.access(path, os.X_OK) and path.is_file()


def _file_state(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_mtime_ns, state.st_size


@functools.lru_cache(maxsize=64)
def _nvcc_version(
    nvcc: str, state: tuple[int, int], patience: float
) -> Version | str | None:
    """nvcc's release, or what is wrong with it, or None when it is too slow.

    Cached by path and file state. Runs it as DeepGEMM does: `nvcc --version 2>&1`
    by the shell, which also runs a script without a first line.
    """
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", '"$0" --version 2>&1', nvcc],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return f"`nvcc --version` failed with exit code {done.returncode}"
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if match is None:
        return "`nvcc --version` names no release"
    return int(match[1]), int(match[2])


def _toolkit_links(root: Path, driver_folders: Iterable[Path]) -> dict[str, str]:
    """Name in the folder of links -> absolute or relative target."""
    links = {
        name: str(root / name)
        for name in ("bin", "include", "nvvm")
        if (root / name).is_dir()
    }
    for library in sorted((root / "lib").glob("lib*")):
        stem = re.match(r"lib.+?\.(?:so|a)(?=\.|$)", library.name)
        if stem and library.is_file():
            links[f"lib64/{library.name}"] = str(library)
            # libnvrtc.alt.so.13 keeps its own short name, libnvrtc.alt.so.
            links.setdefault(f"lib64/{stem[0]}", library.name)
    for folder in driver_folders:
        if (folder / "libcuda.so.1").exists():
            links["lib64/stubs/libcuda.so"] = str(folder / "libcuda.so.1")
            break
    links["lib"] = "lib64"
    return links


def _link_parents(facts: Facts) -> Iterable[Path]:
    """Where a folder of links may lie: vLLM's cache, then a private temp folder."""
    root, xdg, home = (facts.get(name) for name in _CACHE_VARIABLES)
    if root:
        yield Path(root).expanduser() / LINKS_FOLDER
    elif xdg:
        yield Path(xdg) / "vllm" / LINKS_FOLDER
    elif home:
        yield Path(home) / ".cache" / "vllm" / LINKS_FOLDER
    yield Path(tempfile.gettempdir()) / f"vllm-deep-gemm-{os.getuid()}"


def _publish(parent: Path, name: str, links: Mapping[str, str]) -> Path:
    """Create `parent/name` with these links unless it is already whole.

    Raises:
        OSError: the folder cannot be written, or belongs to someone else.

    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = parent.lstat()
    # Links of another user could name any compiler.
    if state.st_uid not in (os.getuid(), 0) or state.st_mode & 0o002:
        raise PermissionError(f"{parent} is writable by another user")
    final = parent / name
    if _is_whole(final, links):
        return final
    staged = parent / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    for link, target in links.items():
        (staged / link).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (staged / link).symlink_to(target)
    try:
        return _move_in_place(staged, final, links)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _move_in_place(staged: Path, final: Path, links: Mapping[str, str]) -> Path:
    """Rename; when another process was first, its folder serves as well."""
    for _ in range(8):
        try:
            staged.rename(final)
        except OSError:
            if _is_whole(final, links):
                return final
            if not os.path.lexists(final):
                raise
            aside = final.with_name(f"{staged.name}.damaged")
            with contextlib.suppress(FileNotFoundError):  # someone else moved it
                final.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return final
    raise FileExistsError(f"{final} keeps changing")


def _is_whole(folder: Path, links: Mapping[str, str]) -> bool:
    try:
        return all(str((folder / n).readlink()) == t for n, t in links.items())
    except OSError:
        return False


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _remedy_other() -> str:
    return (
        f"set CUDA_HOME to a CUDA toolkit {_dotted(OLDEST_NVCC)} or newer, or unset "
        f"CUDA_HOME, CUDA_PATH and {_COMPILER_VARIABLE} and pip install {PINS}"
    )
