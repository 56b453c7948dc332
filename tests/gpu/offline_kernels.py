"""On a Hopper GPU: do kernels that were built without one work there?

    python tests/gpu/offline_kernels.py DIR [--library FOLDER] [--report FILE]

DIR was made by `vllm-deep-gemm compile`. It needs torch with CUDA, the base's folder
`third_party/deep_gemm` and this package; nothing of vLLM is imported. The driver loads
every kernel; every GEMM of the plan is compared with float64; every number of rows is
called with a compiler that only counts; the same calls are timed. A table says what
came out.

0: all is well; 1: something is wrong, and is named; 2: there is no GPU, or the command
line cannot be followed; 3: what could be checked is well, and something could not be.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_deep_gemm_warmup import toolchain
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.cpus import available_cpus
from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.compiling.session import Ended, Session
from vllm_deep_gemm_warmup.compiling.store import Context
from vllm_deep_gemm_warmup.kernel_caches import FOLDER, EntryState, deep_gemm
from vllm_deep_gemm_warmup.offline.manifest import Manifest, ManifestError
from vllm_deep_gemm_warmup.proof.fake_nvcc import kernel_name
from vllm_deep_gemm_warmup.toolchain.facts import COMPILER_VARIABLE

# In processes of their own: this one needs no torch, and outlives a call that crashes.
CALLS = Path(__file__).with_name("call_gemms.py")
# The output's bfloat16 alone gives about 2e-3.
MOST_ERROR = 1e-2
NVCC_LIMIT_S = 300.0
SHOWN = 20


class UsageError(Exception):
    """Nothing can be checked; the message says why."""


class Driver:
    """The CUDA driver, and the first GPU's context.

    Raises:
        UsageError: there is no driver or no GPU.

    """

    def __init__(self) -> None:
        # A kernel that is loaded when it is first launched is not yet accepted.
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UsageError(f"GPU: there is no CUDA driver here ({error})") from error
        count, context = ctypes.c_int(), ctypes.c_void_p()
        for name, *arguments in (
            ("cuInit", 0),
            ("cuDeviceGetCount", ctypes.byref(count)),
        ):
            if refusal := self._call(name, *arguments):
                raise UsageError(f"GPU: {name} answers {refusal}")
        if not count.value:
            raise UsageError("GPU: the driver has none")
        for name in ("cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"):
            given = (ctypes.byref(context), 0) if "Retain" in name else (context,)
            if refusal := self._call(name, *given):
                raise UsageError(f"GPU: {name} answers {refusal}")

    @property
    def name(self) -> str:
        """What the board is called."""
        text = ctypes.create_string_buffer(96)
        self._call("cuDeviceGetName", text, len(text), 0)
        return text.value.decode()

    @property
    def cuda(self) -> str:
        """The CUDA version that the driver is for."""
        value = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self._attribute(75), self._attribute(76)

    @property
    def sm_count(self) -> int:
        """SMs of the GPU."""
        return self._attribute(16)

    def refusal(self, cubin: Path) -> str | None:
        """Load a kernel as DeepGEMM does, and unload it; why it is not taken."""
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        count, function = ctypes.c_uint(), ctypes.c_void_p()
        nothing = (None, None, 0, None, None, 0)
        path = os.fsencode(cubin)
        at = ctypes.byref(library)
        if error := self._call("cuLibraryLoadFromFile", at, path, *nothing):
            return error
        try:
            at = ctypes.byref(count)
            if error := self._call("cuLibraryGetKernelCount", at, library):
                return error
            if count.value != 1:
                return f"it has {count.value} kernels, and DeepGEMM wants one"
            at = ctypes.byref(kernel)
            return self._call("cuLibraryEnumerateKernels", at, 1, library) or (
                self._call("cuKernelGetFunction", ctypes.byref(function), kernel)
            )
        finally:
            self._call("cuLibraryUnload", library)

    def close(self) -> None:
        """Give the context back: a GPU may be one process's at a time."""
        self._call("cuDevicePrimaryCtxRelease_v2", 0)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def _call(self, name: str, *arguments: Any) -> str | None:
        """Call it; the name of the error, or None."""
        function = getattr(self._cuda, name, None)
        if function is None:
            return f"this driver has no {name}"
        code = function(*arguments)
        if not code:
            return None
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        return f"{text.value.decode() if text.value else name} (error {code})"


@dataclasses.dataclass
class Findings:
    """What is known so far.

    Attributes:
        versions: (what, which), in the order in which they are printed.
        problems: what is wrong, a line each.
        unchecked: what could not be checked, and why.
        summary: (check, outcome).
        gemms: (GEMM, kernels, largest relative error, calls of the sweep).
        times: (how, seconds, kernels compiled).

    """

    versions: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    summary: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    gemms: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)
    times: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self.problems else 3 if self.unchecked else 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was planned under one context.

    Attributes:
        context: what decided it.
        gemms: (spec, its kernels).

    """

    context: Context
    gemms: tuple[tuple[Mapping[str, Any], tuple[Kernel, ...]], ...]

    @property
    def kernels(self) -> dict[str, Kernel]:
        """Every kernel by its entry."""
        return {k.entry: k for _, kernels in self.gemms for k in kernels}


def read_plans(root: Path) -> Iterator[Plan]:
    """Yield the plans that lie in a folder of kernels.

    Raises:
        UsageError: one is not what this package writes.

    """
    for folder in sorted((root / FOLDER / "plans").glob("*")):
        try:
            context = Context.from_json(
                json.loads((folder / "context.json").read_text())
            )
            files = sorted(folder.glob("*.json"))
            texts = [path.read_text() for path in files if path.stem != "context"]
            found = [
                (value["spec"], tuple(map(Kernel.from_json, value["kernels"])))
                for value in map(json.loads, texts)
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"plans ({folder}): {error!r}; make the folder again with this version"
            ) from error
        yield Plan(context, tuple(found))


def shapes(kernels: Sequence[Kernel]) -> list[dict[str, int]]:
    """The distinct calls that take them."""
    return [json.loads(text) for text in dict.fromkeys(k.shape for k in kernels)]


def title(spec: Mapping[str, Any]) -> str:
    """A spec in a few words."""
    sizes = [f"{n.upper()}={spec[n]}" for n in ("n", "k") if n in spec]
    groups = spec.get("groups", 1)
    sizes += [f"{groups} groups"] if groups > 1 else []
    rows = spec["rows"]
    return " ".join((spec["entry_point"], *sizes, f"{rows['first']}..{rows['last']}"))


def check_cubins(root: Path, manifest: Manifest, driver: Driver, to: Findings) -> None:
    """Have the driver load everything that lies there."""
    cache, taken, count = deep_gemm(root), 0, 0
    for name, state in cache.judge_all():
        if state is EntryState.FOREIGN:
            continue
        count += 1
        refusal = driver.refusal(cache.folder / name / cache.cubin)
        if refusal is not None:
            to.problems.append(f"{name}: the driver does not take it: {refusal}")
        taken += refusal is None
    to.problems += manifest.problems(root)
    to.summary.append(("kernels that the driver takes", f"{taken} of {count}"))


class Counter:
    """A compiler that gives a recorded answer, compiles nothing, and keeps sources.

    Args:
        home: a folder that becomes a CUDA home.
        answer: what `nvcc --version` said where the kernels were built.

    """

    def __init__(self, home: Path, answer: str) -> None:
        self._asked = home / "asked"
        self.home = home
        self.program = home / "bin" / "nvcc"
        self.program.parent.mkdir(parents=True)
        self._asked.mkdir()
        (home / "version").write_text(answer, errors="surrogateescape")
        quoted = shlex.quote(str(home))
        self.program.write_text(
            "#!/bin/sh\n"
            f'case "$1" in --version) exec cat {quoted}/version ;; esac\n'
            "for word; do case $word in *.cu)\n"
            f'  cp "$word" {quoted}/asked/"$(sha256sum < "$word" | cut -c -32)" ;;\n'
            "esac; done\n"
            'echo "this kernel is not in the folder, and nothing is compiled" >&2\n'
            "exit 1\n"
        )
        self.program.chmod(0o755)

    def sources(self) -> list[str]:
        """Of the kernels that were to be compiled, each once."""
        return [path.read_text() for path in sorted(self._asked.iterdir())]

    def variables(self, cache: Path) -> dict[str, str]:
        """By which DeepGEMM takes this compiler and that cache folder."""
        return {
            "CUDA_HOME": str(self.home),
            COMPILER_VARIABLE: str(self.program),
            "DG_JIT_CACHE_DIR": str(cache),
        }


@dataclasses.dataclass(frozen=True)
class Machine:
    """What calls are made with.

    Attributes:
        library: DeepGEMM's folder.
        scratch: a private folder.
        environ: of a process that has no variables of DeepGEMM's.

    """

    library: Path
    scratch: Path
    environ: Mapping[str, str]

    def call(
        self, plan: Plan, variables: Mapping[str, str], *, check: bool, stride: int
    ) -> list[dict[str, Any]]:
        """Make a plan's calls in a process of its own; what it told.

        The last event has `ended`, why the process died, if it did.
        """
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            request, answer = Path(name, "request"), Path(name, "answer")
            request.write_text(json.dumps({
                "library": str(self.library), "sm_count": plan.context.sm_count,
                "check": check, "stride": stride,
                "gemms": [
                    {"spec": spec, "shapes": shapes(kernels)}
                    for spec, kernels in plan.gemms
                ],
            }))  # fmt: skip
            done = subprocess.run(
                [sys.executable, str(CALLS), str(request), str(answer)],
                env={**self.environ, **dict(plan.context.variables), **variables},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
            lines = answer.read_text().splitlines() if answer.exists() else []
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            events.append({"ended": f"it ended with {done.returncode}: {said}"})
        return events


def called(events: Sequence[Mapping[str, Any]], to: Findings) -> bool:
    """Whether calls were made; why not is noted, and the versions that were told."""
    for event in events:
        for name in ("torch", "cuda", "library"):
            version = (name, str(event.get(name)))
            if name in event and version not in to.versions:
                to.versions.append(version)
        if "not_loaded" in event:
            reason = " ".join(event["not_loaded"].split())
            line = f"calls: the library does not load in this torch: {reason}"
        elif "ended" in event:
            line = f"calls: the process that makes them failed: {event['ended']}"
        else:
            continue
        # A missing library cannot be judged; a process that died in a call can.
        loaded = any("library" in other for other in events)
        (to.problems if loaded else to.unchecked).append(line)
        return False
    return True


def check_calls(
    root: Path,
    plan: Plan,
    machine: Machine,
    stride: int,
    standing_in: bool,
    to: Findings,
) -> bool:
    """Compare every GEMM with float64, call every number of rows; whether all went."""
    cache, counter = _copy(root, plan, machine)
    events = machine.call(plan, counter.variables(cache), check=True, stride=stride)
    before = len(to.problems)
    sources = counter.sources()
    known = {kernel.source: kernel.entry for kernel in plan.kernels.values()}
    for source in sources:
        name = known.get(source) or f"{kernel_name(source)}, which was not planned"
        to.problems.append(f"{name}: it had to be compiled")
    done = called(events, to)
    # Without the library there is nothing to judge.
    if any("library" in event for event in events):
        judge(events, plan, standing_in, to)
        to.summary.append(("kernels that had to be compiled", str(len(sources))))
    return done and len(to.problems) == before


def judge(
    events: Sequence[Mapping[str, Any]], plan: Plan, standing_in: bool, to: Findings
) -> None:
    """Note what came of the calls; on a stand-in no result is right or wrong."""
    errors: dict[int, list[float]] = {}
    swept: dict[int, int] = {}
    for event in events:
        if "gemm" not in event:
            continue
        number, where = event["gemm"], title(plan.gemms[event["gemm"]][0])
        if "not_called" in event:
            line = f"{where}: loaded and not called: {event['not_called']}"
            to.unchecked.append(line)
            continue
        sizes = (f"{name} {value}" for name, value in event["shape"].items())
        where = f"{where} at {' '.join(sizes)}"
        if "swept" in event:
            swept[number] = swept.get(number, 0) + 1
        if "failure" in event:
            to.problems.append(f"{where}: {event['failure']}")
        elif "error" in event:
            errors.setdefault(number, []).append(event["error"])
            # A NaN is not below the limit.
            if not standing_in and not event["error"] <= MOST_ERROR:
                to.problems.append(f"{where}: relative error {event['error']:.1e}")
    for number, (spec, kernels) in enumerate(plan.gemms):
        worst = max(errors.get(number, []), default=None, key=lambda e: (e != e, e))
        text = "not compared" if worst is None else f"{worst:.1e}"
        text = "meaningless" if standing_in and worst is not None else text
        calls = str(swept.get(number, "none"))
        to.gemms.append((title(spec), str(len(kernels)), text, calls))
    compared = sum(map(len, errors.values()))
    outcome = f"{compared} calls, an error of at most {MOST_ERROR:.0e} allowed"
    if standing_in:
        outcome = f"not checked: {compared} calls on a GPU that is not there"
    to.summary.append(("GEMMs against float64", outcome))
    to.summary.append(("calls of the sweep", str(sum(swept.values()))))


def _copy(root: Path, plan: Plan, machine: Machine) -> tuple[Path, Counter]:
    """A private copy of the folder, since a hit touches a marker, and a compiler."""
    place = Path(tempfile.mkdtemp(dir=machine.scratch))
    shutil.copytree(deep_gemm(root).folder, deep_gemm(place).folder)
    return place, Counter(place / "cuda", plan.context.compiler)


def time_calls(root: Path, plan: Plan, machine: Machine, to: Findings) -> None:
    """Time the plan's calls: on an empty cache, stock and ours, and on the folder."""
    environ = {**machine.environ}
    environ |= toolchain.variables(toolchain.read_facts(environ))
    compiler = toolchain.describe(toolchain.read_facts(environ, search_path=()))
    cache, counter = _copy(root, plan, machine)
    run = functools.partial(machine.call, plan, check=False, stride=0)
    _time("loaded from the folder", lambda: run(counter.variables(cache)), cache, to)
    if isinstance(compiler, toolchain.Unusable) or compiler.recorded:
        to.unchecked.append(f"times on an empty cache: {compiler}")
        return
    empty = Path(tempfile.mkdtemp(dir=machine.scratch))
    there = dataclasses.replace(machine, environ=environ)
    given = {"DG_JIT_CACHE_DIR": str(empty)}
    _time(
        "stock: the library compiles, one after the other, when it is called",
        lambda: there.call(plan, given, check=False, stride=0),
        empty,
        to,
    )
    built = Path(tempfile.mkdtemp(dir=machine.scratch))
    workers = available_cpus()
    start = time.perf_counter()
    problem = _build(plan, built, compiler.nvcc, workers, machine)
    seconds = time.perf_counter() - start
    if problem is not None:
        to.unchecked.append(f"times of parallel building: {problem}")
        return
    _time(
        f"ours: compiled before, {workers} at a time, then loaded",
        lambda: run(counter.variables(built)),
        built,
        to,
        seconds,
        len(deep_gemm(built).entries()),
    )


def _time(
    how: str,
    call: Callable[[], list[dict[str, Any]]],
    cache: Path,
    to: Findings,
    before: float = 0.0,
    compiled: int = 0,
) -> None:
    """Add a line of times; `before` are seconds that came before the calls."""
    present = deep_gemm(cache).entries()
    events = call()
    calls = [event for event in events if "seconds" in event]
    failures = [event["failure"] for event in calls if "failure" in event]
    if failures or not any("done" in event for event in events):
        reason = (failures or ["no call was made"])[0]
        to.unchecked.append(f"times ({how}): {reason}")
        return
    seconds = before + sum(event["seconds"] for event in calls)
    compiled += len(deep_gemm(cache).entries() - present)
    to.times.append((how, f"{seconds:.2f}", str(compiled)))


def _build(
    plan: Plan, root: Path, nvcc: Path, workers: int, machine: Machine
) -> str | None:
    """Build every kernel of the plan as an engine's start does; what went wrong."""
    config = Config(
        context=plan.context,
        root=root,
        work=root / FOLDER,
        nvcc=nvcc,
        library=machine.library,
        workers=workers,
        limit=NVCC_LIMIT_S,
        group=f"times {os.getpid()}",
    )
    try:
        with Session(config) as session:
            for kernel in plan.kernels.values():
                session.add_kernel(kernel)
            session.settle()
            outcomes = dict(session.outcomes)
    except (Ended, OSError) as error:
        return str(error)
    failures = (outcome.failure for outcome in outcomes.values())
    return next(filter(None, failures), None)


def usable(plans: Sequence[Plan], driver: Driver, to: Findings) -> list[Plan]:
    """The plans for this GPU; others are named."""
    found = []
    for plan in plans:
        context, there = plan.context, driver.capability
        if (
            context.major,
            context.minor,
        ) != there or context.sm_count > driver.sm_count:
            to.unchecked.append(
                f"plan for sm{context.major}{context.minor} and {context.sm_count} "
                f"SMs: this GPU is sm{there[0]}{there[1]} with {driver.sm_count}"
            )
            continue
        found.append(plan)
    if not plans:
        to.unchecked.append("calls: there is no plan in the folder")
    return found


def describe(findings: Findings) -> str:
    """The table, in Markdown."""
    lines = [f"- {name}: {text}" for name, text in findings.versions]
    lines += ["", "| check | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in findings.summary]
    if findings.gemms:
        lines += [
            "",
            "| GEMM | kernels | largest relative error | calls of the sweep |",
        ]
        lines += ["|---|---|---|---|", *map(_row, findings.gemms)]
    if findings.times:
        lines += ["", "| the plan's calls, not vLLM's own warmup | s | compiled |"]
        lines += ["|---|---|---|", *map(_row, findings.times)]
    for heading, named in (
        ("wrong", findings.problems),
        ("not checked", findings.unchecked),
    ):
        lines += ["", f"{heading}: {len(named)}"] if named else []
        lines += [f"- {line}" for line in named[:SHOWN]]
        lines += [f"- and {len(named) - SHOWN} more"] if len(named) > SHOWN else []
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def library_folder(given: Path | None) -> Path:
    """DeepGEMM's folder: as told, or that of the vLLM that is installed.

    Raises:
        UsageError: there is none.

    """
    # Finds the package and does not import it.
    spec = None if given else importlib.util.find_spec("vllm")
    places = list((spec and spec.submodule_search_locations) or ())
    folders = [given] if given else [Path(p, "third_party/deep_gemm") for p in places]
    for folder in folders:
        if (folder / "__init__.py").is_file():
            return folder.resolve()
    where = ", ".join(map(str, folders)) or "vllm is not installed"
    raise UsageError(f"DeepGEMM ({where}): not there; name its folder with --library")


def note_versions(manifest: Manifest, driver: Driver, to: Findings) -> None:
    """Note which machine this is, and what the kernels were built with."""
    release = re.search(r"\bV(\d[\d.]*)", manifest.compiler)
    to.versions += [
        ("machine", platform.node()),
        ("time", f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"),
        ("GPU", f"{driver.name}, {driver.sm_count} SMs"),
        ("driver", f"{_driver_release()}, CUDA {driver.cuda}"),
        ("package", _package()),
        ("kernels of", f"{manifest.purpose}, {manifest.target}"),
        ("built with", f"nvcc {release[1] if release else 'of unknown release'}, "
            + ", ".join(f"{name} {text}" for name, text in manifest.versions.items())),
    ]  # fmt: skip


def _package() -> str:
    try:
        return importlib.metadata.version("vllm-deep-gemm-warmup")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, imported from a folder"


def _driver_release() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "release unknown"
    found = re.search(r"\d+\.\d[\d.]*", text)
    return found[0] if found else "release unknown"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR",
        help="made by `vllm-deep-gemm compile`")  # fmt: skip
    parser.add_argument("--library", type=Path, metavar="FOLDER",
        help="third_party/deep_gemm of the base (default: that of the "
        "installed vLLM)")  # fmt: skip
    parser.add_argument("--stride", type=int, default=1, metavar="ROWS",
        help="between calls of the sweep; 0: no sweep (default: 1)")  # fmt: skip
    parser.add_argument("--no-times", action="store_true", help="time nothing")
    parser.add_argument("--report", type=Path, metavar="FILE",
        help="write the table, with this machine's name; on a GPU only")  # fmt: skip
    given = parser.parse_args(argv)
    # `vllm-deep-gemm standin` sets it.
    standing_in = "STANDIN_GPU" in os.environ
    findings = Findings()
    # Before the driver is told how this process loads kernels.
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("DG_") or name == COMPILER_VARIABLE
    }
    try:
        if given.report and standing_in:
            raise UsageError("--report: this is a stand-in and no GPU")
        manifest = Manifest.read(given.folder)
        library = library_folder(given.library)
        driver = Driver()
        plans = list(read_plans(given.folder))
    except (UsageError, ManifestError) as error:
        print(error, file=sys.stderr)
        return 2
    if standing_in:
        findings.unchecked.append(
            "results: this is a stand-in and no GPU; its driver is not NVIDIA's, "
            "numbers are meaningless, times are not a GPU's"
        )
    note_versions(manifest, driver, findings)
    check_cubins(given.folder, manifest, driver, findings)
    driver.close()
    with tempfile.TemporaryDirectory(prefix="offline-kernels-") as name:
        machine = Machine(library, Path(name), environ)
        for plan in usable(plans, driver, findings):
            went = check_calls(
                given.folder, plan, machine, given.stride, standing_in, findings
            )
            if went and not given.no_times:
                time_calls(given.folder, plan, machine, findings)
            elif not given.no_times:
                findings.unchecked.append("times: not taken, the calls did not go well")
    text = describe(findings)
    print(text, end="")
    if given.report:
        given.report.write_text(f"# Kernels built offline, on a GPU\n\n{text}")
    return findings.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
