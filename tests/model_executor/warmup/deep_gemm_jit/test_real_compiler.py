"""An entry that our processes build is the one that the library builds by itself."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from vllm.model_executor.warmup.deep_gemm_jit.kernels import json_of
from vllm.model_executor.warmup.deep_gemm_jit.machine import read_config
from vllm.model_executor.warmup.deep_gemm_jit.spec import RowRange, Target
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup import kernel_caches, toolchain
from vllm_deep_gemm_warmup.compiling.session import Session
from vllm_deep_gemm_warmup.settings import read_settings

from .specs import linear_spec

SWEEP = pathlib.Path(__file__).with_name("sweep.py")
SPEC = linear_spec(576, 7168, rows=RowRange(64, 64))
# nvcc names what no one outside a file sees by the file's path and its own process.
_PRIVATE = re.compile(rb"[0-9a-f]{8}_9_kernel_cu_[0-9a-f]{8}(_\d+)?")
# The same, where the number of a process has fewer digits than another's.
_LENGTH = re.compile(rb"_ZN\d+_INTERNAL_")


@pytest.mark.slow
def test_entries_of_the_real_compiler_are_equal(
    device: torch.device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME")
    for name, value in toolchain.variables(toolchain.read_facts()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP_WORKERS", "1")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    case = {"name": "one", "spec": SPEC.to_json(), "sms": None}
    subprocess.run(
        [sys.executable, SWEEP, json.dumps({"cases": [case], "sweep_first": False})],
        env={**os.environ, "DG_JIT_CACHE_DIR": str(theirs)},
        check=True,
    )
    deep_gemm_utils.is_deep_gemm_e8m0_used()
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(ours))
    config = read_config(Target(9, 0, 132), read_settings())
    with Session(config) as session:
        session.add_spec(json_of(SPEC))
        session.settle()
    found = kernel_caches.deep_gemm(ours)
    expected = kernel_caches.deep_gemm(theirs / "0")
    assert found.entries() == expected.entries() != frozenset()
    for entry in found.entries():
        one, other = found.folder / entry, expected.folder / entry
        assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}
        assert (one / "kernel.cu").read_bytes() == (other / "kernel.cu").read_bytes()
        assert code_of(one) == code_of(other)
        assert record_of(one) == record_of(other)


def code_of(entry: pathlib.Path) -> bytes:
    """The cubin without what differs between two runs of the compiler."""
    data = (entry / "kernel.cubin").read_bytes()
    return _LENGTH.sub(b"", _PRIVATE.sub(b"", data))


def record_of(entry: pathlib.Path) -> object:
    """What `meta.json` says, without the folder in which it was built."""
    text = (entry / "meta.json").read_text()
    return json.loads(re.sub(r"[^\s\"]*/tmp/[^/\s]+/kernel", "kernel", text))
