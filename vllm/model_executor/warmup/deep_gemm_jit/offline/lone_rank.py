"""Decides how one process is one rank of many: its peers answer, and are not there.

PyTorch's ``fake`` backend completes every collective at once and moves nothing. What
vLLM's groups tell a rank (sizes, its place) is right, what travels between ranks is
not, and a plan does not depend on it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from .ranks import Rank, World

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FAKE = "fake"
# vLLM keeps one for itself.
_BLOCKS = 2


@contextlib.contextmanager
def worker_of(config: "VllmConfig", world: World, rank: Rank) -> Iterator[Any]:
    """Yield vLLM's worker of ``rank``, model in it; the process is spent.

    Args:
        config: As the API server made it; changed as an engine changes it.
        world: Of that configuration.
        rank: Which of its ranks this process becomes.

    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _take_data_parallel_rank(config, world, rank)
    with _fake_groups(world, rank):
        number = world.number(rank)
        worker = WorkerWrapperBase(rpc_rank=0, global_rank=number)
        worker.init_worker(
            [
                {
                    "vllm_config": config,
                    # Its GPU: all are alike, and here is one.
                    "local_rank": 0,
                    "rank": number,
                    "distributed_init_method": "tcp://127.0.0.1:1",
                    "is_driver_worker": rank.tensor == 0,
                    "shared_worker_lock": contextlib.nullcontext(),
                }
            ]
        )
        worker.init_device()
        worker.load_model()
        yield worker.worker


def bind_caches(config: "VllmConfig", worker: Any) -> None:
    """Give layers their caches, as few blocks as can be.

    What an indexer runs is decided by the shape of a block and the bytes from block
    to block, which the engine's core plans: as ``UniProcExecutor`` after the load and
    ``EngineCore._initialize_kv_caches`` (vLLM 0.33.0), but for the memory of a device.
    Layers of other stages are not seen: where theirs need larger blocks, an engine's
    lie further apart.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    current_platform.update_block_size_for_backend(config)
    register_all_kvcache_specs(config)
    specs = worker.get_kv_cache_spec()
    if not specs:
        return
    layouts = [worker.get_supported_kv_cache_layouts()]
    layout = resolve_kv_cache_layout(config, layouts, specs.values())
    groups = get_global_kv_cache_groups(config, [specs])
    config.adjust_dcp_kv_cache_interleave_size(groups)
    worker.set_kv_cache_layout(
        layout.name, config.parallel_config.cp_kv_cache_interleave_size
    )
    planned = get_kv_cache_config_builder(config).get_kv_cache_config_from_groups(
        config, groups, num_blocks=_BLOCKS
    )
    planned.kv_cache_layout = config.cache_config.kv_cache_layout
    # A connector would look for its peers.
    config.kv_transfer_config = None
    worker.initialize_from_config(planned)


def _take_data_parallel_rank(config: "VllmConfig", world: World, rank: Rank) -> None:
    """As ``run_engine_core`` of the base's ``v1/engine/core.py``."""
    parallel = config.parallel_config
    parallel.data_parallel_index = rank.data
    # get_local_gpu_index would look for a GPU of that data-parallel rank.
    parallel.data_parallel_rank_local = 0
    if world.data > 1:
        parallel.data_parallel_rank = rank.data
    elif parallel.data_parallel_size > 1:
        parallel.reconfigure_for_independent_dp_rank()


@contextlib.contextmanager
def _fake_groups(world: World, rank: Rank) -> Iterator[None]:
    """Make every process group of this process a fake one.

    vLLM makes its groups with ``new_group``, one of them by the name ``gloo``, which
    waits for its peers, as do a message queue and the question who shares a node.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.platforms import current_platform

    torch.distributed.init_process_group(
        backend=_FAKE,
        store=FakeStore(),
        rank=rank.data * world.ranks_of_engine + world.number(rank),
        world_size=world.data * world.ranks_of_engine,
    )
    new_group = torch.distributed.new_group

    @functools.wraps(new_group)
    def new_fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": _FAKE})

    with (
        mock.patch.object(torch.distributed, "new_group", new_fake_group),
        mock.patch.object(current_platform, "dist_backend", _FAKE),
        mock.patch.object(MessageQueue, "create_from_process_group", _no_queue),
        mock.patch.object(parallel_state, "in_the_same_node_as", _one_node),
    ):
        yield


def _no_queue(*args: Any, **options: Any) -> None:
    return None


def _one_node(group: Any, source_rank: int = 0) -> list[bool]:
    return [True] * torch.distributed.get_world_size(group)
