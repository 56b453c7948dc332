"""Decides which rank speaks for those that have the same layers."""


def speaks() -> bool:
    """Whether this rank reports: the first of its pipeline stage.

    The others of a stage have the same layers; another stage has its own.
    """
    from vllm.distributed.parallel_state import (
        get_dp_group,
        get_tensor_model_parallel_rank,
    )

    return get_tensor_model_parallel_rank() == 0 and get_dp_group().rank_in_group == 0
