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


@contextlib.contextmanager
def worker_of(config: "VllmConfig", world: World, rank: Rank) -> Iterator[Any]:
    """Yield vLLM's worker of ``rank`` with its model loaded; the process is spent.

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
