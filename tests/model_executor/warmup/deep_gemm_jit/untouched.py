"""Run as a program on devices: warm a model of which nothing else may be touched.

    untouched.py FOLDER

Two ranks of a tensor-parallel group, forked as vLLM forks its workers, with a KV
connector that was configured, attention whose KV cache cannot be touched, and modules
that cannot be called. The second rank takes part in nothing until the first has warmed
its model: a collective would not end. Prints JSON: what each rank logged of the warmup,
and the bytes that it left on the device.
"""

import functools
import json
import logging
import pathlib
import sys
import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

sys.path.insert(0, str(pathlib.Path(__file__).parents[4]))
from tests.model_executor.children import fork_ranks
from tests.model_executor.real_layers import (
    FP8,
    load,
    make_experts,
    make_linear,
    make_mla,
    one_rank,
    prepare_ranks,
    resident_bytes,
)
from tests.model_executor.warmup.deep_gemm_jit.begin import Log

RANKS, LIMIT = 2, 96
PATIENCE = 400.0


class Untouchable:
    """Any use of an instance fails from the moment that this is armed."""

    armed = False

    def __getattribute__(self, name: str) -> Any:
        if Untouchable.armed:
            raise AssertionError(f"touched: {type(self).__name__}.{name}")
        return super().__getattribute__(name)


class Cache(Untouchable):
    """A layer's KV cache."""


class Connector(Untouchable, KVConnectorBase_V1):  # type: ignore[misc]
    """Moves no KV cache."""

    def _touched(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("touched")

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _touched
    get_num_new_matched_tokens = update_state_after_alloc = _touched
    build_connector_meta = _touched

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)


def connect(config: Any) -> None:
    """Configure the connector as a worker does."""
    from vllm.config import KVTransferConfig
    from vllm.distributed import kv_transfer
    from vllm.v1.kv_cache_interface import KVCacheConfig

    config.kv_transfer_config = KVTransferConfig(
        kv_connector="Connector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    kv_transfer.ensure_kv_transfer_initialized(config, cache)
    assert type(kv_transfer.get_kv_transfer_group()) is Connector


def called(module: torch.nn.Module, given: Any) -> None:
    raise AssertionError(f"called: {type(module).__name__}")


def wait_for(file: pathlib.Path) -> None:
    end = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < end, f"{file.name} did not come"
        time.sleep(0.05)


def start(folder: pathlib.Path, rank: int) -> Any:
    """Start one rank and return what is to be printed."""
    log = Log(None, folder / "signal")
    logging.getLogger("vllm").addHandler(log)
    logging.getLogger("vllm").setLevel(logging.INFO)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with one_rank(folder, rank, RANKS) as config:
        config.kernel_config.moe_backend = "deep_gemm"
        attention = make_mla(config, device, FP8, "layers.0")
        experts = make_experts(config, device, 4, 2, 512, 256, FP8, "layers.0.experts")
        proj = load(make_linear(config, device, 960, 384, FP8, "layers.0.proj"))
        connect(config)
        attention.kv_cache = Cache()
        model = torch.nn.ModuleList([attention, experts, proj])
        # Both are here; from now on each is alone.
        torch.distributed.barrier()
        if rank > 0:
            wait_for(folder / f"warm-{rank - 1}")
        hook = torch.nn.modules.module.register_module_forward_pre_hook(called)
        before = resident_bytes(device)
        Untouchable.armed = True
        deep_gemm_warmup(model, LIMIT)
        Untouchable.armed = False
        hook.remove()
        (folder / f"warm-{rank}").touch()
        left = resident_bytes(device) - before
        wait_for(folder / f"warm-{RANKS - 1}")
    return {
        "said": log.lines(logging.NOTSET),
        "warned": log.lines(logging.WARNING),
        "left": left,
    }


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    prepare_ranks(folder)
    start_rank = functools.partial(start, folder)
    print(json.dumps(fork_ranks(folder, RANKS, start_rank)))


if __name__ == "__main__":
    main()
