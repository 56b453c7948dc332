"""Each missing kernel is built once a node, whoever asks and whatever dies."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_deep_gemm_warmup import kernel_caches
from vllm_deep_gemm_warmup.compiling import locks
from vllm_deep_gemm_warmup.compiling.building import Builds, Outcome
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.locks import Locks, wait_for_group
from vllm_deep_gemm_warmup.compiling.session import Ended, Session
from vllm_deep_gemm_warmup.cubins import cubin

from ..processes import family_of, is_running, wait_for
from .conftest import make_kernel

Make = Callable[..., Config]
Compiled = Callable[[], list[str]]


def names(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


def run(config: Config, wanted: Iterable[str]) -> dict[str, Outcome]:
    with Session(config) as session:
        for name in wanted:
            session.add_kernel(make_kernel(name))
        session.settle()
        return {name.removeprefix("gemm."): it for name, it in session.outcomes.items()}


class Gate:
    """Compilers that wait until every session knows how much there is to build.

    Only then is it one moment: a session that is late finds what others have built.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "open"
        self.line = f"while [ ! -e {self._file} ]; do sleep 0.02; done"

    def settle(self, config: Config, count: int, wanted: list[str]) -> list[Session]:
        """Return so many sessions, all of which have had ``wanted`` built."""
        heard: list[int] = [0] * count

        def listen(number: int) -> Callable[[Mapping[str, object]], None]:
            def hear(event: Mapping[str, object]) -> None:
                missing = event.get("missing", 0)
                assert isinstance(missing, int)
                heard[number] = max(heard[number], missing)

            return hear

        sessions = [Session(config, listen(number)) for number in range(count)]
        for session in sessions:
            for name in wanted:
                session.add_kernel(make_kernel(name))
        waiting = [threading.Thread(target=session.settle) for session in sessions]
        for thread in waiting:
            thread.start()
        wait_for(lambda: heard == [len(wanted)] * count, 60.0)
        self._file.touch()
        for thread in waiting:
            thread.join()
        return sessions


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def test_entries_are_whole_and_nothing_else_is_left(config: Make) -> None:
    made = config()
    outcomes = run(made, names(3))
    assert all(outcome.built for outcome in outcomes.values())
    cache = kernel_caches.deep_gemm(made.root)
    assert cache.entries() == {"gemm.k0", "gemm.k1", "gemm.k2"}
    files = {path.name for path in (cache.folder / "gemm.k0").iterdir()}
    assert files == {"kernel.cu", "kernel.cubin", "meta.json", ".committed"}
    content = (cache.folder / "gemm.k0" / "kernel.cubin").read_bytes()
    assert content == cubin("kernel") + b"k0"
    assert list((made.root / "tmp").iterdir()) == []


def test_what_is_there_is_not_built_again(config: Make, compiled: Compiled) -> None:
    run(config(), names(2))
    outcomes = run(config(), names(3))
    assert [name for name, it in outcomes.items() if it.built] == ["k2"]
    assert sorted(compiled()) == names(3)


def test_eight_processes_build_each_kernel_once(
    config: Make, compiled: Compiled, gate: Gate
) -> None:
    """G49, G50, G52: one folder, one moment."""
    for session in gate.settle(config(gate.line), 8, names(10)):
        assert len(session.outcomes) == 10
        assert all(outcome.built for outcome in session.outcomes.values())
        session.close()
    assert sorted(compiled()) == sorted(names(10))


RANK = """
import json, sys
from pathlib import Path
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.compiling.session import Session
config, kernels = json.loads(sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
with Session(Config.from_json(config)) as session:
    for kernel in kernels:
        session.add_kernel(Kernel.from_json(kernel))
    session.settle()
    print(sum(outcome.failure is None for outcome in session.outcomes.values()))
"""


def run_from_a_barrier(config: Config, count: int, wanted: list[str]) -> list[int]:
    """How many kernels each of so many processes has, begun after all imports."""
    kernels = [make_kernel(name).to_json() for name in wanted]
    given = json.dumps([config.to_json(), kernels])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "here\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    return [int(rank.communicate()[0]) for rank in ranks]


@pytest.mark.parametrize(
    ("processes", "kernels", "seconds"),
    [
        pytest.param(8, 1, 3, id="G49"),
        pytest.param(16, 1, 1, id="G50", marks=pytest.mark.slow),
        pytest.param(8, 40, 1, id="G52", marks=pytest.mark.slow),
    ],
)
def test_processes_that_begin_together_build_each_kernel_once(
    config: Make, compiled: Compiled, processes: int, kernels: int, seconds: int
) -> None:
    """Not even the cache folder is there."""
    made = config(f"sleep {seconds}")
    found = run_from_a_barrier(made, processes, names(kernels))
    assert found == [kernels] * processes
    assert sorted(compiled()) == sorted(names(kernels))


def test_stages_do_not_wait_for_each_other(
    config: Make, compiled: Compiled, tmp_path: Path
) -> None:
    """G43: four stages, and no compiler ends before there is one of each."""
    all_run = f"[ $(wc -l < {tmp_path}/compiled) -ge 4 ]"
    made = config(f"until {all_run}; do sleep 0.05; done")
    sessions = [Session(made) for _ in range(4)]
    for name, session in zip(names(4), sessions, strict=True):
        session.add_kernel(make_kernel(name))
    for name, session in zip(names(4), sessions, strict=True):
        session.settle()
        session.meet()
        assert session.outcomes[f"gemm.{name}"].built
    for session in sessions:
        session.close()
    assert sorted(compiled()) == names(4)


def test_a_full_cpu_share_is_used_and_no_more(config: Make, tmp_path: Path) -> None:
    """Two processes of four workers start four compilers together, not eight."""
    count = f"mkdir -p {tmp_path}/now; touch {tmp_path}/now/$$; sleep 0.2; "
    count += f"ls {tmp_path}/now | wc -l >> {tmp_path}/most; rm {tmp_path}/now/$$"
    made = config(count, workers=4)
    sessions = [Session(made) for _ in range(2)]
    for number, session in enumerate(sessions):
        for name in names(8):
            session.add_kernel(make_kernel(f"{number}{name}"))
    for session in sessions:
        session.settle()
        session.close()
    most = [int(word) for word in (tmp_path / "most").read_text().split()]
    assert max(most) == 4


def test_compilers_give_way_to_the_engine(config: Make, tmp_path: Path) -> None:
    """A load of weights goes on beside them."""
    # In a shell of its own: the compiler's arguments stay.
    stat = f"(set -- $(cat /proc/$$/stat); echo ${{19}} >> {tmp_path}/nice)"
    assert run(config(stat), ["k0"])["k0"].built
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    (niceness,) = map(int, (tmp_path / "nice").read_text().split())
    assert niceness == min(ours + 10, 19)


HOLDER = """
import os, sys, types
from pathlib import Path
from vllm_deep_gemm_warmup.compiling.locks import Locks
path, host, cpus, *names = sys.argv[1:]
node = host or os.uname().nodename
os.uname = lambda: types.SimpleNamespace(nodename=node)
locks, cpus = Locks(Path(path)), int(cpus)
assert all([locks.take_cpu(cpus) is not None for _ in range(cpus)])
assert all([locks.take(name) for name in names])
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(
    config: Config, cpus: int, entries: Iterable[str] = (), host: str = ""
) -> Iterator[None]:
    """Another process holds CPUs of a host, this one by default, and entries."""
    config.work.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(config.locks), host, str(cpus), *entries],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    yield
    holder.communicate()


def test_nodes_that_share_a_folder_share_kernels_and_not_cpus(
    config: Make, compiled: Compiled
) -> None:
    """A network file system: another node has its CPUs, and builds one kernel."""
    made = config(workers=2)
    with held(made, 2, ["gemm.k0"], host="another"), Session(made) as session:
        for name in names(3):
            session.add_kernel(make_kernel(name))
        wait_for(lambda: len(session.outcomes) == 2)
        assert sorted(compiled()) == ["k1", "k2"]
        assert "gemm.k0" not in session.outcomes
    with held(config(workers=2, work=made.root / "other"), 2):
        ours = Locks(made.root / "other" / "locks")
        assert ours.take_cpu(2) is None
        ours.close()


@pytest.mark.parametrize(("cpus", "entries", "calls"), [(8, 0, 8), (0, 100, 101)])
def test_what_others_hold_is_asked_for_once_a_step(
    config: Make,
    compiled: Compiled,
    monkeypatch: pytest.MonkeyPatch,
    cpus: int,
    entries: int,
    calls: int,
) -> None:
    """100 kernels and 8 CPUs: no CPU is free, or others build every kernel."""
    asked: list[int] = []
    lock = fcntl.lockf

    def count(file: int, kind: int, length: int, offset: int) -> None:
        if kind != fcntl.LOCK_UN:
            asked.append(offset)
        lock(file, kind, length, offset)

    monkeypatch.setattr(fcntl, "lockf", count)
    made = config()
    kernels = [make_kernel(name) for name in names(100)]
    with held(made, cpus, [kernel.entry for kernel in kernels[:entries]]):
        ours = Locks(made.locks)
        cache = kernel_caches.deep_gemm(made.root)
        builds = Builds(cache, made.nvcc, made.library, ours, 8, 60.0, made.work / "no")
        for kernel in kernels:
            builds.add(kernel)
        assert list(builds.step()) == []
        assert len(asked) == calls
        assert builds.missing == 100
        assert compiled() == []
        # The CPU that was taken for nothing is free again.
        assert ours.take_cpu(1) == (None if cpus else 0)
        ours.close()


def test_a_kernel_that_fails_is_named_and_the_others_are_built(
    config: Make, compiled: Compiled, gate: Gate
) -> None:
    """G26: the compiler ends with 1 for one kernel."""
    fails = 'if [ $name = k1 ]; then echo "no such type" >&2; false; fi'
    made = config(f"{gate.line}; {fails}")
    for session in gate.settle(made, 2, names(3)):
        failure = session.outcomes["gemm.k1"].failure
        assert failure is not None
        assert "no such type" in failure
        assert session.outcomes["gemm.k2"].built
        session.close()
    assert sorted(compiled()) == names(3)
    # Another start tries again.
    assert "no such type" in (run(made, ["k1"])["k1"].failure or "")
    assert compiled().count("k1") == 2


def test_a_compiler_that_hangs_is_stopped_with_its_children(
    config: Make, tmp_path: Path
) -> None:
    hang = f"if [ $name = k0 ]; then sleep 600 & echo $! > {tmp_path}/pid; wait; fi"
    outcomes = run(config(hang, limit=1.0), names(2))
    stopped = f"{tmp_path}/nvcc did not end within 1 s, it was stopped"
    assert outcomes["k0"].failure == stopped
    assert outcomes["k1"].built
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(pid))


@pytest.mark.parametrize(
    "left",
    [
        "true",
        'touch "$4"',
        'echo "not an ELF file" > "$4"',
        'head -c 300 {folder}/empty.cubin > "$4"',
    ],
)
def test_what_is_no_whole_cubin_is_not_published(
    config: Make, tmp_path: Path, left: str
) -> None:
    """G59: validate before publish."""
    made = config(f"{left.format(folder=tmp_path)}; exit 0")
    outcome = run(made, ["k0"])["k0"]
    assert outcome.failure == "the compiler left no whole kernel.cubin"
    assert outcome.final
    assert kernel_caches.deep_gemm(made.root).entries() == frozenset()


def test_a_damaged_entry_in_the_way_is_replaced(config: Make) -> None:
    made = config()
    (made.root / "cache" / "gemm.k0").mkdir(parents=True)
    (made.root / "cache" / "gemm.k0" / "kernel.cubin").touch()
    assert run(made, ["k0"])["k0"].built
    assert kernel_caches.deep_gemm(made.root).entries() == {"gemm.k0"}
    assert list((made.root / "tmp").iterdir()) == []


PARENT = """
import json, sys
from pathlib import Path
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.compiling.session import Session
config, kernels = json.loads(sys.argv[1])
session = Session(Config.from_json(config))
for kernel in kernels:
    session.add_kernel(Kernel.from_json(kernel))
print(session._child.pid, flush=True)
session.settle()
"""


def start_parent(
    config: Config, wanted: Iterable[str]
) -> tuple[subprocess.Popen[str], int]:
    """A process with a session; its coordinator's pid."""
    kernels = [make_kernel(name).to_json() for name in wanted]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps([config.to_json(), kernels])],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("victim", ["engine", "coordinator"])
def test_no_compiler_outlives_who_wanted_it(
    config: Make, tmp_path: Path, victim: str, compiled: Compiled
) -> None:
    """G34: kill the parent in mid-compile; nothing is left."""
    made = config(f"echo $$ >> {tmp_path}/pids; exec sleep 600", workers=2)
    parent, coordinator = start_parent(made, names(3))
    wait_for(lambda: len(compiled()) == 2 and (tmp_path / "pids").exists())
    os.kill(parent.pid if victim == "engine" else coordinator, signal.SIGKILL)
    pids = [coordinator, *map(int, (tmp_path / "pids").read_text().split())]
    wait_for(lambda: not any(map(is_running, pids)), 5.0)
    parent.kill()
    parent.communicate()
    # What they held is free: the next one builds all.
    outcomes = run(config(), names(3))
    assert all(outcome.built for outcome in outcomes.values())


FAMILY = """
import json, multiprocessing, os, sys, time
from vllm_deep_gemm_warmup import lineage
from vllm_deep_gemm_warmup.compiling.coordinator import Config
from vllm_deep_gemm_warmup.compiling.kernel import Kernel
from vllm_deep_gemm_warmup.compiling.session import Session
config, kernel, depth, busy = json.loads(sys.argv[1])
def run(depth):
    if depth:
        child = multiprocessing.Process(target=run, args=(depth - 1,))
        child.start()
        child.join()
        return
    session = Session(Config.from_json(config))
    session.add_kernel(Kernel.from_json(kernel))
    if busy:
        time.sleep(600)
    session.settle()
lineage.begin(os.environ)
multiprocessing.set_start_method("fork")
run(depth)
"""


Family = Callable[[int, bool], tuple[subprocess.Popen[bytes], list[int]]]


@pytest.fixture
def start_family(config: Make, tmp_path: Path) -> Iterator[Family]:
    """Starts a launcher, and below it so many processes, what builds and a compiler."""
    started: list[int] = []

    def start(depth: int, busy: bool) -> tuple[subprocess.Popen[bytes], list[int]]:
        made = config(f"echo $$ > {tmp_path}/pid; exec sleep 600")
        given = [made.to_json(), make_kernel("k0").to_json(), depth, busy]
        launcher = subprocess.Popen([sys.executable, "-c", FAMILY, json.dumps(given)])
        wait_for((tmp_path / "pid").exists)
        family = family_of(launcher.pid)[1:]
        started.extend(family)
        assert len(family) == depth + 2
        return launcher, family

    yield start
    for pid in filter(is_running, started):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("depth", [1, 2], ids=["engine", "worker"])
def test_who_was_started_by_a_dead_process_ends(
    start_family: Family, depth: int
) -> None:
    """G34: an API server dies; the engine, or its worker, waits for a compiler."""
    launcher, family = start_family(depth, False)
    launcher.kill()
    wait_for(lambda: not any(map(is_running, family)), 5.0)
    launcher.wait()


def test_nothing_is_compiled_for_an_engine_whose_server_is_dead(
    start_family: Family,
) -> None:
    """G34: it loads weights, and will hear of it later."""
    launcher, (engine, *others) = start_family(1, True)
    launcher.kill()
    wait_for(lambda: not any(map(is_running, others)), 5.0)
    assert is_running(engine)
    launcher.wait()


def test_a_launcher_outlives_its_shell(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, time\n"
        "from vllm_deep_gemm_warmup import lineage\n"
        "lineage.begin(os.environ)\n"
        "ours, parent = lineage.Lineage(), os.getppid()\n"
        "while os.getppid() == parent: time.sleep(0.02)\n"
        "ours.check()\n"
        "pathlib.Path('alive').touch()\n"
    )
    line = f"{sys.executable} -c '{code.replace(chr(39), chr(34))}' & sleep 1"
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    wait_for((tmp_path / "alive").exists)


def test_who_waits_for_a_coordinator_that_is_killed_is_told(config: Make) -> None:
    session = Session(config("sleep 600"))
    session.add_kernel(make_kernel("k0"))
    session._child.kill()
    with pytest.raises(Ended, match="ended with -9"):
        session.settle()
    session.close()


def test_a_listener_that_fails_is_named_and_all_is_built(
    config: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: object) -> None:
        raise ValueError("no such event")

    with Session(config(), fail) as session:
        for name in names(2):
            session.add_kernel(make_kernel(name))
        session.settle()
        assert all(outcome.built for outcome in session.outcomes.values())
    (said,) = caplog.messages
    assert "no such event" in said


def test_what_is_not_understood_is_named_and_does_not_hang(
    config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with Session(config()) as session, pytest.raises(Ended, match="not understood"):
        session.settle()


def test_it_says_once_when_it_is_idle_and_when_it_is_not(config: Make) -> None:
    heard: list[object] = []

    def hear(event: Mapping[str, object]) -> None:
        heard.extend(event[key] for key in event if key == "idle")

    with Session(config(), hear) as session:

        def build(name: str) -> None:
            session.add_kernel(make_kernel(name))
            # The second answer comes after all that followed from the first.
            session.settle()
            session.settle()

        session.settle()
        session.settle()
        assert heard == [True]
        build("k0")
        assert heard == [True, False, True]
        build("k0")
        assert heard == [True, False, True]
        build("k1")
        assert heard == [True, False, True, False, True]


def test_a_rank_waits_for_the_ranks_of_its_engine_only(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G27, G35: none goes on while one builds; a rank that died holds nobody up."""
    made = config(f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    fast_idle: list[object] = []

    def note_idle(event: Mapping[str, object]) -> None:
        fast_idle.extend(event[key] for key in event if key == "idle")

    with (
        Session(made) as slow,
        Session(made, note_idle) as fast,
        Session(
            config(
                f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done", group="another"
            )
        ) as other,
    ):
        slow.add_kernel(make_kernel("k0"))
        wait_for(lambda: (tmp_path / "compiled").exists())
        other.settle()
        other.meet()
        fast.settle()
        fast._send({"meet": 100})
        # Each answer is a step's, and 100 could have come in the first one's.
        fast.settle()
        fast.settle()
        assert 100 not in fast._marks
        assert fast_idle[-1] is False
        # One with nothing to do at all has no coordinator; it waits when it has looked.
        waits = threading.Event()

        def sleep(seconds: float) -> None:
            waits.set()
            time.sleep(seconds)

        monkeypatch.setattr(locks, "time", SimpleNamespace(sleep=sleep))
        idle = threading.Thread(
            target=wait_for_group, args=(made.locks, made.group), daemon=True
        )
        idle.start()
        assert waits.wait(20.0)
        slow._child.kill()
        wait_for(lambda: 100 in fast._marks)
        idle.join(20.0)
        assert not idle.is_alive()


def test_no_rank_goes_on_before_the_slowest(config: Make, tmp_path: Path) -> None:
    """G35: 16 ranks; 15 have had their kernel and the last one's takes long."""
    slow = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    made = config(f"if [ $name = k0 ]; then {slow}; fi")
    ranks = [Session(made) for _ in range(16)]
    try:
        for name, rank in zip(names(16), ranks, strict=True):
            rank.add_kernel(make_kernel(name))
        wait_for(lambda: len(kernel_caches.deep_gemm(made.root).entries()) == 15)
        for rank in ranks[1:]:
            rank.settle()
            rank._send({"meet": 100})
            # Each answer is a step's, and 100 could have come in the first one's.
            rank.settle()
            rank.settle()
        assert not any(100 in rank._marks for rank in ranks)
        (tmp_path / "go").touch()
        wait_for(lambda: all(100 in rank._marks for rank in ranks[1:]))
        assert ranks[0].usable
    finally:
        for rank in ranks:
            rank.close()


def test_a_folder_that_cannot_be_written_is_said_and_is_not_final(
    config: Make, tmp_path: Path
) -> None:
    """The library may find a way; the kernel is no worse than before."""
    made = config(work=tmp_path / "work")
    made.root.mkdir()
    (made.root / "tmp").touch()
    outcome = run(made, ["k0"])["k0"]
    assert "it cannot be built here" in (outcome.failure or "")
    assert not outcome.final
