"""The finder on a fake base: what it answers for, and when it stands aside."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

WARMUP = "vllm.model_executor.warmup.deep_gemm_warmup"
LINEAR = "vllm.model_executor.kernels.linear.scaled_mm"
WHO = f"""
import importlib
for name in ({WARMUP!r}, '{LINEAR}.deep_gemm', '{LINEAR}.BlockScaledMMLinearKernel',
             'vllm.model_executor.warmup.kernel_warmup'):
    print(importlib.import_module(name).WHO)
"""
# Whether the new subpackage can be imported.
NEW = """
try:
    from vllm.model_executor.warmup.deep_gemm_jit.spec import Spec
    print('new')
except ModuleNotFoundError:
    print('no new')
"""
REASON = """
from vllm_deep_gemm_warmup import finder
print(finder.installed().decide().reason)
"""


def test_exactly_our_modules_are_ours(patched: Any) -> None:
    assert patched.run(WHO + NEW).split("\n") == ["ours", "ours", "ours", "base", "new"]


@pytest.mark.parametrize("options", [["-I"], ["-E"], ["-P"], ["-O"], ["-B"]])
def test_works_with_interpreter_options(patched: Any, options: list[str]) -> None:
    assert patched.run(WHO, *options).split("\n")[:3] == ["ours"] * 3


def test_interpreter_start_imports_only_sys(patched: Any) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    with_us = set(patched.run(code).split())
    (patched.site_packages / "vllm_deep_gemm_warmup.pth").unlink()
    without = set(patched.run(code).split())
    ours = {"vllm_deep_gemm_warmup", "vllm_deep_gemm_warmup.finder"}
    assert with_us - without == ours


def test_finder_is_first_and_only_once(patched: Any) -> None:
    code = (
        "import site, sys\n"
        "from vllm_deep_gemm_warmup.finder import OverlayFinder as F\n"
        "site.addsitedir(site.getsitepackages()[0])\n"
        "print([isinstance(f, F) for f in sys.meta_path].index(True),"
        " sum(isinstance(f, F) for f in sys.meta_path))"
    )
    assert patched.run(code) == "0 1"


def test_nothing_is_decided_before_vllm_is_asked_for(patched: Any) -> None:
    code = (
        "import sys, json, decimal\n"
        "print('vllm_deep_gemm_warmup.overlay' in sys.modules)\n"
        "import vllm\n"
        "print('vllm_deep_gemm_warmup.overlay' in sys.modules)"
    )
    assert patched.run(code).split() == ["False", "False"]


def test_a_question_before_vllm_is_there_settles_nothing(patched: Any) -> None:
    code = (
        "import sys\n"
        f"print([finder.find_spec({WARMUP!r}, None) for finder in sys.meta_path])\n"
    )
    answer, *who = patched.run(code + WHO).split("\n")
    assert answer.startswith("[None, ")
    assert who == ["ours", "ours", "ours", "base"]


def test_module_knows_its_file_and_its_source(patched: Any) -> None:
    code = f"""
import importlib, inspect, linecache
m = importlib.import_module({WARMUP!r})
print(m.__spec__.origin == m.__file__ and m.__spec__.name == m.__name__)
print('tree' in m.__file__)
print(inspect.getsource(m).strip() == open(m.__file__).read().strip())
print(linecache.getline(m.__file__, 1).strip())
print(importlib.reload(m) is m and m.WHO)
import vllm.model_executor.warmup.deep_gemm_jit as p
print(p.__path__ == [p.__file__.rsplit('/', 1)[0]], p.__spec__.parent == p.__name__)
from vllm.model_executor.warmup import deep_gemm_warmup
print(deep_gemm_warmup is m)
"""
    lines = patched.run(code).split("\n")
    assert lines == [
        "True",
        "True",
        "True",
        "WHO = 'ours'",
        "ours",
        "True True",
        "True",
    ]


def test_instances_pickle(patched: Any) -> None:
    code = (
        "import pickle\n"
        "from vllm.model_executor.warmup.deep_gemm_jit.spec import Spec\n"
        "print(pickle.loads(pickle.dumps(Spec())).whose())"
    )
    assert patched.run(code) == "ours"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("parent_imports", [False, True])
def test_child_processes(patched: Any, method: str, parent_imports: bool) -> None:
    script = patched.site_packages.parent / "children.py"
    script.write_text(f"""
import importlib, multiprocessing
def child(queue):
    queue.put([importlib.import_module(n).WHO for n in
        ({WARMUP!r}, '{LINEAR}.deep_gemm', 'vllm.model_executor.warmup.kernel_warmup')])
if __name__ == '__main__':
    if {parent_imports}:
        importlib.import_module({WARMUP!r})
    context = multiprocessing.get_context({method!r})
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(*queue.get())
    process.join()
""")
    code = (
        f"import os, sys as s; os.execv(s.executable, [s.executable, {str(script)!r}])"
    )
    assert patched.run(code) == "ours ours base"


def test_threads_that_ask_at_the_same_time(patched: Any) -> None:
    code = f"""
import importlib, threading, vllm.model_executor.kernels.linear.scaled_mm
import vllm.model_executor.warmup
names = [{WARMUP!r}, '{LINEAR}.deep_gemm', '{LINEAR}.BlockScaledMMLinearKernel',
         'vllm.model_executor.warmup.deep_gemm_jit'] * 4
barrier, found = threading.Barrier(16), []
def work(name):
    barrier.wait()
    found.append(importlib.import_module(name).WHO)
threads = [threading.Thread(target=work, args=(n,)) for n in names]
[t.start() for t in threads]; [t.join(20) for t in threads]
print(len(found), set(found))
"""
    assert patched.run(code) == "16 {'ours'}"


def test_switch_stands_aside_in_every_process(patched: Any) -> None:
    out = patched.run(WHO + NEW, VLLM_DEEP_GEMM_OVERLAY="0")
    assert out.split("\n") == ["base"] * 4 + ["no new"]
    reason = patched.run("import vllm" + REASON, VLLM_DEEP_GEMM_OVERLAY="0")
    assert reason == "VLLM_DEEP_GEMM_OVERLAY=0"


def test_switch_set_to_one_is_on(patched: Any) -> None:
    out = patched.run(WHO, VLLM_DEEP_GEMM_OVERLAY="1")
    assert out.split("\n")[:3] == ["ours"] * 3


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_changed_byte_and_all_three_stand_aside(
    patched: Any, overlaid: tuple[str, ...], index: int
) -> None:
    changed = patched.site_packages / "vllm" / overlaid[index]
    changed.write_text(changed.read_text() + "\n")
    assert patched.run(WHO + NEW).split("\n") == ["base"] * 4 + ["no new"]
    reason = patched.run("import vllm" + REASON)
    assert f"vllm/{overlaid[index]} has sha256 " in reason
    assert "recorded is" in reason
    assert "vLLM 0.33.0" in reason
    assert reason.count("has sha256") == 1


def test_missing_base_file_stands_aside(
    patched: Any, overlaid: tuple[str, ...]
) -> None:
    (patched.site_packages / "vllm" / overlaid[1]).unlink()
    code = f"import importlib; print(importlib.import_module({WARMUP!r}).WHO)"
    assert patched.run(code) == "base"
    assert "has sha256 no such file" in patched.run("import vllm" + REASON)


def test_missing_overlay_file_stands_aside(
    patched: Any, overlaid: tuple[str, ...]
) -> None:
    tree = patched.site_packages / "vllm_deep_gemm_warmup" / "tree"
    (tree / overlaid[0]).unlink()
    assert patched.run(WHO + NEW).split("\n") == ["base"] * 4 + ["no new"]
    assert "damaged" in patched.run("import vllm" + REASON)


@pytest.mark.parametrize("damage", ["overlay.py", "bases/v0_33_0.py", "bases"])
def test_damaged_install_leaves_stock(patched: Any, damage: str) -> None:
    path = patched.site_packages / "vllm_deep_gemm_warmup" / damage
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.write_text("half a line (")
    assert patched.run(WHO + NEW).split("\n") == ["base"] * 4 + ["no new"]
    assert "damaged" in patched.run("import vllm" + REASON)


@pytest.mark.parametrize("damage", ["finder.py", "__init__.py", "."])
def test_damaged_finder_is_silent_at_start(patched: Any, damage: str) -> None:
    path = patched.site_packages / "vllm_deep_gemm_warmup" / damage
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.write_text("half a line (")
    # `run` fails on anything on standard error.
    assert patched.run("print('an unrelated program')") == "an unrelated program"
    assert patched.run(WHO).split("\n") == ["base"] * 4


def test_absent_base_is_no_error(patched: Any) -> None:
    shutil.rmtree(patched.site_packages / "vllm")
    done = patched.start("import vllm.model_executor")
    assert "No module named 'vllm'" in done.stderr


def test_base_warmup_is_diverted_not_lost(patched: Any) -> None:
    code = f"""
import importlib, inspect
from vllm_deep_gemm_warmup.diversion import base_deep_gemm_warmup
ours, base = importlib.import_module({WARMUP!r}), base_deep_gemm_warmup()
print(ours.WHO, base.WHO, base is base_deep_gemm_warmup())
print(base.__name__, base.__package__ == ours.__package__)
print(base.__file__.endswith('/vllm/model_executor/warmup/deep_gemm_warmup.py'))
print('tree' in base.__file__, "WHO = 'base'" in inspect.getsource(base))
"""
    assert patched.run(code).split("\n") == [
        "ours base True",
        "vllm.model_executor.warmup._deep_gemm_warmup_base True",
        "True",
        "False True",
    ]


def test_no_diversion_when_standing_aside(patched: Any) -> None:
    code = (
        "from vllm_deep_gemm_warmup.diversion import base_deep_gemm_warmup\n"
        "try:\n    base_deep_gemm_warmup()\n"
        "except ModuleNotFoundError as e:\n    print(e.name)"
    )
    out = patched.run(code, VLLM_DEEP_GEMM_OVERLAY="0")
    assert out == "vllm.model_executor.warmup._deep_gemm_warmup_base"


def test_folder_named_vllm_in_the_current_directory(patched: Any) -> None:
    """The checkout's own `vllm/` has no `__init__.py` and shadows nothing."""
    (patched.site_packages.parent / "vllm" / "model_executor").mkdir(parents=True)
    assert (
        patched.run("import sys; sys.path.insert(0, '')\n" + WHO).split("\n")[:3]
        == ["ours"] * 3
    )
