"""What a program asks the driver: right answers, or an error. No framework, so fast."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_deep_gemm_warmup.standin.device import POSES, parse_device

from .cubin import cubin

PRELUDE = """
import ctypes, json
c = ctypes
cuda = c.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
def ask(function, *arguments, kind=c.c_int):
    out = kind()
    return getattr(cuda, function)(c.byref(out), *arguments), out.value
def attribute(number, device=0):
    return ask("cuDeviceGetAttribute", number, device)
cuda.cudaSetDevice(0)
"""


@pytest.mark.parametrize("name", [*POSES, "60"])
def test_every_pose_answers_its_own_facts(
    name: str, standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = """
nvml = c.CDLL("libnvidia-ml.so.1")
assert nvml.nvmlInit() == 0 and nvml.nvmlInit_v2() == 0
count, handle, text = c.c_uint(), c.c_void_p(), c.create_string_buffer(96)
nvml.nvmlDeviceGetCount_v2(c.byref(count))
nvml.nvmlDeviceGetHandleByIndex_v2(1, c.byref(handle))
nvml.nvmlDeviceGetName(handle, text, 96)
major, minor = c.c_int(), c.c_int()
nvml.nvmlDeviceGetCudaComputeCapability(handle, c.byref(major), c.byref(minor))
memory = (c.c_ulonglong * 3)()
nvml.nvmlDeviceGetMemoryInfo(handle, memory)
print(json.dumps({
    "capability": [attribute(75)[1], attribute(76)[1]], "sms": attribute(16)[1],
    "optin": attribute(97)[1], "l2": attribute(38)[1],
    "total": ask("cuDeviceTotalMem_v2", 0, kind=c.c_size_t)[1],
    "nvml": [count.value, text.value.decode(), major.value, minor.value, memory[0]],
}))
"""
    found = json.loads(python(PRELUDE + code, standin(name, 2)))
    device = parse_device(name)
    assert found == {
        "capability": [device.major, device.minor],
        "sms": device.sms,
        "optin": 101376 if device.major == 12 else 232448,
        "l2": device.l2_bytes,
        "total": device.total_bytes,
        "nvml": [2, device.name, device.major, device.minor, device.board_bytes],
    }


def test_what_is_not_known_is_an_error(
    standin: Callable[..., dict[str, str]], python: Callable[..., str], tmp_path: Path
) -> None:
    code = """
def look_up(name):
    out = c.c_void_p()
    assert cuda.cuGetProcAddress_v2(name, c.byref(out), 13000, 0, None) == 0
    return out.value
unknown = c.CFUNCTYPE(c.c_int)(look_up(b"cuNoSuchThing"))()
versioned = look_up(b"cuMemAlloc") == c.cast(cuda.cuMemAlloc_v2, c.c_void_p).value
print(json.dumps({
    "unknown": unknown, "versioned": versioned, "declared": cuda.cuMulticastCreate(),
    "runtime": cuda.cudaImportExternalMemory(), "attribute": attribute(9999)[0],
    "device": attribute(16, 7)[0], "set": cuda.cudaSetDevice(3),
}))
"""
    assert json.loads(python(PRELUDE + code, standin())) == {
        "unknown": 801,
        "versioned": True,
        "declared": 801,
        "runtime": 801,
        "attribute": 1,
        "device": 101,
        "set": 101,
    }
    trace = (tmp_path / "trace").read_text()
    assert "looked up cuNoSuchThing" in trace
    assert "unsupported cuMulticastCreate" in trace
    assert "no value for device attribute 9999" in trace


def test_memory_is_counted_and_bounded(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = """
def free():
    a, b = c.c_size_t(), c.c_size_t()
    cuda.cuMemGetInfo_v2(c.byref(a), c.byref(b))
    return a.value
malloc = lambda size: ask("cudaMalloc", c.c_size_t(size), kind=c.c_void_p)
before = free()
code, address = malloc(60 << 30)
assert code == 0
taken = before - free()
too_much = malloc(60 << 30)[0]
data = c.create_string_buffer(b"x" * 4096)
cuda.cudaMemcpy(c.c_void_p(address + 8192), data, c.c_size_t(4096), 1)
cuda.cudaMemset(c.c_void_p(address), 0, c.c_size_t(60 << 30))
back = c.create_string_buffer(4096)
cuda.cudaMemcpy(back, c.c_void_p(address + 8192), c.c_size_t(4096), 2)
base, size = c.c_size_t(), c.c_size_t()
cuda.cuMemGetAddressRange_v2(c.byref(base), c.byref(size), c.c_size_t(address + 77))
assert (base.value, size.value) == (address, 60 << 30)
first, second = (cuda.cudaFree(c.c_void_p(address)) for _ in range(2))
print(json.dumps([taken == 60 << 30, too_much, back.raw == bytes(4096), first, second,
                  before == free()]))
"""
    assert json.loads(python(PRELUDE + code, standin())) == [
        True,
        2,
        True,
        0,
        1,
        True,
    ]


def test_images_are_read_as_a_driver_reads_them(
    standin: Callable[..., dict[str, str]], python: Callable[..., str], tmp_path: Path
) -> None:
    images = {
        "good": cubin("first", "second"),
        "text": b"this is not a cubin, it is text" * 8,
        "host": cubin("first", machine=62),
        "blackwell": cubin("first", architecture=100),
        "truncated": cubin("first", "second")[:200],
    }
    for name, image in images.items():
        (tmp_path / name).write_bytes(image)
    code = f"""
def load(name):
    out = c.c_void_p()
    path = ({str(tmp_path)!r} + "/" + name).encode()
    return cuda.cuLibraryLoadFromFile(c.byref(out), path, 0, 0, 0, 0, 0, 0), out
codes = {{name: load(name)[0] for name in {[*images, "absent"]!r}}}
library = load("good")[1]
count = c.c_uint()
cuda.cuLibraryGetKernelCount(c.byref(count), library)
kernels = (c.c_void_p * count.value)()
cuda.cuLibraryEnumerateKernels(kernels, count, library)
def name(kernel):
    out = c.c_char_p()
    cuda.cuKernelGetName(c.byref(out), c.c_void_p(kernel))
    return out.value.decode()
kernel = c.c_void_p(kernels[0])
missing = cuda.cuLibraryGetKernel(c.byref(c.c_void_p()), library, b"third")
threads = ask("cuFuncGetAttribute", 0, kernel)[1]
shared = [cuda.cuFuncSetAttribute(kernel, 8, size) for size in (232448, 232449)]
print(json.dumps([codes, [name(k) for k in kernels], missing, threads, shared]))
"""
    assert json.loads(python(PRELUDE + code, standin())) == [
        {
            "good": 0,
            "text": 200,
            "host": 200,
            "blackwell": 209,
            "truncated": 200,
            "absent": 301,
        },
        ["first", "second"],
        500,
        1024,
        [0, 1],
    ]


def test_a_tensor_map_outside_the_documented_limits_is_refused(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = """
def encode(address=4096, size=(256, 64), stride=512, box=(64, 64), swizzle=3):
    u64, u32 = c.c_ulonglong, c.c_uint
    return cuda.cuTensorMapEncodeTiled(
        (c.c_char * 128)(), 9, 2, c.c_void_p(address), (u64 * 2)(*size),
        (u64 * 1)(stride), (u32 * 2)(*box), (u32 * 2)(1, 1), 0, swizzle, 0, 0)
print(json.dumps([
    encode(), encode(address=4100), encode(stride=500), encode(box=(64, 257)),
    encode(box=(128, 64)), encode(size=(0, 64))]))
"""
    assert json.loads(python(PRELUDE + code, standin())) == [0, 1, 1, 1, 1, 1]


def test_rows_over_each_other_are_refused_where_that_is_asked_for(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = """
def encode(size, *strides):
    u64, u32, rank = c.c_ulonglong, c.c_uint, len(size)
    return cuda.cuTensorMapEncodeTiled(
        (c.c_char * 128)(), 9, rank, c.c_void_p(4096), (u64 * rank)(*size),
        (u64 * len(strides))(*strides), (u32 * rank)(*[8] * rank),
        (u32 * rank)(*[1] * rank), 0, 3, 0, 0)
print(json.dumps([encode((256, 64), 512), encode((256, 64), 496), encode((256, 1), 16),
                  encode((256, 4, 2), 512, 2048), encode((256, 4, 2), 512, 2032),
                  encode((256, 4, 2), 1024, 512), encode((256, 4, 2), 1024, 496)]))
"""
    plain = standin()
    assert json.loads(python(PRELUDE + code, plain)) == [0] * 7
    refusing = plain | {"STANDIN_GPU_REFUSE_OVERLAP": "1"}
    assert json.loads(python(PRELUDE + code, refusing)) == [0, 1, 0, 0, 1, 0, 1]


def test_visible_devices_are_honoured(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = """
text = c.create_string_buffer(32)
cuda.cudaDeviceGetPCIBusId(text, 32, 0)
print(json.dumps([ask("cuDeviceGetCount")[1], text.value.decode()]))
"""
    env = standin("h100", 4) | {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert json.loads(python(PRELUDE + code, env)) == [2, "0000:03:00.0"]


def test_memory_is_mapped_into_reserved_ranges(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = """
mib = 1 << 20
class Properties(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("where", c.c_int),
                ("device", c.c_int), ("rest", c.c_char * 16)]
def free():
    a, b = c.c_size_t(), c.c_size_t()
    cuda.cuMemGetInfo_v2(c.byref(a), c.byref(b))
    return a.value
wanted = Properties(1, 0, 1, 0)
start = free()
size = c.c_size_t(4 * mib)
base, handle = c.c_size_t(), c.c_size_t()
codes = [
    cuda.cuMemAddressReserve(c.byref(base), size, c.c_size_t(0), c.c_size_t(0), 0),
    cuda.cuMemCreate(c.byref(handle), size, c.byref(wanted), 0),
    cuda.cuMemMap(base, size, c.c_size_t(0), handle, 0),
    cuda.cuMemsetD8_v2(base, 7, size),
]
held = start - free()
back = c.create_string_buffer(1)
cuda.cuMemcpyDtoH_v2(back, c.c_size_t(base.value + 4 * mib - 1), c.c_size_t(1))
codes += [cuda.cuMemRelease(handle)]
mapped = start - free()
codes += [cuda.cuMemUnmap(base, size), cuda.cuMemAddressFree(base, size)]
wanted.handles = 8
odd = cuda.cuMemCreate(c.byref(handle), c.c_size_t(5), c.byref(wanted), 0)
fabric = cuda.cuMemCreate(c.byref(handle), size, c.byref(wanted), 0)
print(json.dumps([codes, held // mib, back.raw[0], mapped // mib, start == free(),
                  odd, fabric]))
"""
    found = json.loads(python(PRELUDE + code, standin()))
    assert found == [[0] * 7, 4, 7, 4, True, 1, 801]


def test_a_memory_handle_opens_in_another_process(
    standin: Callable[..., dict[str, str]], python: Callable[..., str]
) -> None:
    code = """
import subprocess, sys
address, handle = c.c_void_p(), (c.c_char * 64)()
cuda.cudaMalloc(c.byref(address), c.c_size_t(1 << 20))
assert cuda.cudaIpcGetMemHandle(handle, address) == 0
class Handle(c.Structure):
    _fields_ = [("reserved", c.c_char * 64)]
def open_handle(raw):
    out = c.c_void_p()
    code = cuda.cudaIpcOpenMemHandle(c.byref(out), Handle.from_buffer_copy(raw), 1)
    size = c.c_size_t()
    cuda.cuMemGetAddressRange_v2(None, c.byref(size), out)
    return code, size.value
if len(sys.argv) > 1:
    print(*open_handle(bytes.fromhex(sys.argv[1])))
else:
    source = open("/proc/self/cmdline").read().split("\\0")[2]
    other = subprocess.run([sys.executable, "-c", source, bytes(handle).hex()],
                           capture_output=True, text=True, check=True).stdout
    print(json.dumps([other.split(), open_handle(bytes(handle))[0],
                      open_handle(bytes(64))[0]]))
"""
    found = json.loads(python(PRELUDE + code, standin()))
    assert found == [["0", str(1 << 20)], 201, 400]
