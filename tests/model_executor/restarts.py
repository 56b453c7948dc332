"""Run as a program on a device: what does a start make of a cache that is there?

    restarts.py FOLDER

Fills a cache in FOLDER with a compiler that writes FOLDER/compiled. Each case then is
a start with a copy of it, as `CASES` says, in a forked child, and a line of JSON: its
name, how many kernels were compiled, whether the cache is as it was before, and what
vLLM logged of DeepGEMM.
"""

import importlib
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup import plugin
from vllm_deep_gemm_warmup.kernel_caches import FOLDER, deep_gemm
from vllm_deep_gemm_warmup.offline.manifest import Manifest, cubin_digest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "overlay" / "caches"))
import start  # type: ignore[import-not-found]
from entries import (  # type: ignore[import-not-found]
    as_it_is,
    make_read_only,
    obey_rights,
)
from real_layers import FP8, quantization_config  # type: ignore[import-not-found]

# Sizes N of the layers; K is 256.
FILLED = [256, 512]


def remove_plans(root: pathlib.Path) -> None:
    shutil.rmtree(root / FOLDER / "plans")


def lose_an_entry(root: pathlib.Path) -> None:
    shutil.rmtree(next((root / "cache").glob("sm90_*")))


def list_in_manifest(root: pathlib.Path) -> None:
    """As an offline compile of all that is there leaves it."""
    cache = deep_gemm(root)
    Manifest(
        model="m",
        arguments=(),
        device="h100",
        target="sm90-132sm",
        versions={},
        library="",
        compiler="",
        variables={},
        specs=1,
        kernels={name: cubin_digest(cache, name) for name in cache.entries()},
    ).write(root)


def library_at_another_path(root: pathlib.Path) -> None:
    (root.parent / "site").mkdir()
    (root.parent / "site" / "deep_gemm").symlink_to(_library())


def _library() -> pathlib.Path:
    return pathlib.Path(deep_gemm_utils.__file__).parents[1] / "third_party/deep_gemm"


def nothing(root: pathlib.Path) -> None:
    """Leave it as it is."""


@dataclass(frozen=True)
class Case:
    """A start: what is done to the cache before, and what the start is given.

    Attributes:
        change: to the copy of the cache.
        sizes: of the layers.
        variables: set for the start.
        read_only: the cache, for a user without a home.
        library_first: imported before vLLM names the cache, if it is to.
        named: the cache, by the user; else vLLM's own is empty and not there yet.

    """

    change: Callable[[pathlib.Path], None] = nothing
    sizes: tuple[int, ...] = tuple(FILLED)
    variables: tuple[tuple[str, str], ...] = ()
    read_only: bool = False
    library_first: bool = False
    named: bool = True


CASES = {
    "as it is": Case(),
    "NVRTC": Case(variables=(("DG_JIT_USE_NVRTC", "1"),)),
    "another variable": Case(variables=(("DG_JIT_WITH_LINEINFO", "1"),)),
    "library at another path": Case(library_at_another_path),
    "no plans": Case(remove_plans),
    "another size": Case(list_in_manifest, sizes=(*FILLED, 768)),
    "library first": Case(library_first=True),
    "library first and no name": Case(library_first=True, named=False),
    "read-only": Case(read_only=True),
    "read-only with a gap": Case(lose_an_entry, read_only=True),
}


class Restarts:
    """Starts in forked children, each with a folder of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._log = folder / "compiled"

    def run(self, name: str, root: pathlib.Path, case: Case) -> None:
        """Start, and print what came of it."""
        self._log.write_text("")
        if case.read_only:
            make_read_only(root)
        before = as_it_is(root) if root.exists() else {}
        answer = root.parent / "answer"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answer.write_text(json.dumps(self._start(root, case)))
                status = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name}: the start failed")
        line = {
            "case": name,
            "compiled": len(self._log.read_text().split()),
            "same": not before or as_it_is(root) == before,
            **json.loads(answer.read_text()),
        }
        print(json.dumps(line), flush=True)

    def _start(self, root: pathlib.Path, case: Case) -> dict[str, Any]:
        os.environ.update(case.variables, DG_JIT_CACHE_DIR=str(root))
        if not case.named:
            del os.environ["DG_JIT_CACHE_DIR"]
            os.environ["VLLM_CACHE_ROOT"] = str(root.parent / "vllm")
        if case.library_first:
            importlib.import_module("vllm.third_party.deep_gemm")
        sys.path.insert(0, str(root.parent / "site"))
        if case.read_only:
            (root.parent / "tmp").mkdir()
            tempfile.tempdir = str(root.parent / "tmp")
            os.environ.pop("HOME", None)
            obey_rights()
        log = start.Log()
        logging.getLogger("vllm").addHandler(log)
        plugin.register()
        options = start.parse([str(size) for size in case.sizes])
        with tempfile.TemporaryDirectory() as folder:
            start.start(pathlib.Path(folder), options)
        lines = {
            level: [line for line in log.lines(number) if "DeepGEMM" in line]
            for level, number in (("said", logging.INFO), ("warned", logging.WARNING))
        }
        cache = os.environ["DG_JIT_CACHE_DIR"]
        entries = len(deep_gemm(pathlib.Path(cache)).entries())
        return {**lines, "cache": cache, "entries": entries}


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    quantization_config(FP8)  # what it imports, the children need not
    restarts = Restarts(folder)
    base = folder / "base" / "root"
    base.parent.mkdir()
    restarts.run("fill", base, Case())
    for number, (name, case) in enumerate(CASES.items()):
        root = folder / f"case-{number}" / "root"
        shutil.copytree(base, root)
        case.change(root)
        restarts.run(name, root, case)


if __name__ == "__main__":
    main()
