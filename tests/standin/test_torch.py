"""The device as PyTorch, Triton and vLLM see it: few processes, many questions."""

import json
from collections.abc import Callable
from pathlib import Path

FACTS = """
import json, torch
p = torch.cuda.get_device_properties(1)
torch.cuda.set_device(1)
x = torch.arange(1000, device="cuda")
free = [torch.cuda.mem_get_info(i)[0] for i in (0, 1)]
big = torch.empty(4 << 30, dtype=torch.uint8, device="cuda:1")
less = [torch.cuda.mem_get_info(i)[0] for i in (0, 1)]
try:
    torch.empty(200 << 30, dtype=torch.uint8, device="cuda")
    memory = "fits"
except torch.OutOfMemoryError:
    memory = "out of memory"
print(json.dumps({
    "count": torch.cuda.device_count(), "name": p.name, "sms": p.multi_processor_count,
    "capability": [p.major, p.minor], "total": p.total_memory,
    "copies": torch.arange(1000).cuda().cpu().tolist() == list(range(1000)),
    "device": str(x.device), "taken": [a - b for a, b in zip(free, less)],
    "memory": memory,
    "product": list((torch.ones(3, 5).cuda() @ torch.ones(5, 2).cuda()).shape),
}))
"""

GRAPHS = """
import ctypes, json, torch, warnings
warnings.simplefilter("error")
x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
side, calls = torch.cuda.Stream(), []
host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: calls.append(1))
runtime = ctypes.CDLL("libcuda.so.1")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    main = torch.cuda.current_stream()
    y = x @ x
    side.wait_stream(main)
    with torch.cuda.stream(side):
        joined = torch.cuda.is_current_stream_capturing()
        z = x + 1
    main.wait_stream(side)
    runtime.cudaLaunchHostFunc(ctypes.c_void_p(main.cuda_stream), host, None)
    forbidden = runtime.cudaStreamSynchronize(ctypes.c_void_p(main.cuda_stream))
recorded = len(calls)
graph.replay()
graph.replay()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    after = torch.cuda.is_current_stream_capturing()
empty = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(empty):
        pass
    noticed = False
except UserWarning:
    noticed = True
print(json.dumps([joined, forbidden, recorded, len(calls), after, noticed]))
"""

# Triton reads a kernel's source, so it must be in a file.
KERNEL = """
import torch, triton, triton.language as tl
@triton.jit
def add(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at) + 1)
def run():
    x = torch.ones(1024, device="cuda")
    return add[(1,)](x, x, 1024, num_warps=8)
"""

TRITON = """
import json, sys
sys.path.insert(0, sys.argv[1])
import kernel
compiled = kernel.run()
import vllm.v1.worker.gpu.sample.sampler as v2, vllm.v1.sample.sampler as v1
print(json.dumps([
    compiled.n_regs > 0, compiled.metadata.num_warps,
    hasattr(v2.Sampler.__call__, "__wrapped__"),
    hasattr(v1.Sampler.forward, "__wrapped__"),
]))
"""


def test_two_devices_as_torch_sees_them(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    found = json.loads(python(FACTS, standin("h20", 2)))
    assert found == {
        "count": 2,
        "name": "NVIDIA H20",
        "sms": 78,
        "capability": [9, 0],
        "total": 97_256 << 20,
        "copies": True,
        "device": "cuda:1",
        "taken": [0, 4 << 30],
        "memory": "out of memory",
        "product": [3, 2],
    }


def test_a_graph_holds_what_was_captured(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    """Side streams join, a wait inside is an error, host functions run on replay."""
    assert json.loads(python(GRAPHS, standin())) == [True, 900, 0, 2, False, True]


def test_compiled_kernels_load_and_both_samplers_are_given_a_meaning(
    standin: Callable[..., dict[str, str]], python: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    code = TRITON.replace("sys.argv[1]", repr(str(tmp_path)))
    assert json.loads(python(code, standin())) == [True, 8, True, True]
