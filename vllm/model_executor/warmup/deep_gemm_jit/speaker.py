"""Decides which rank speaks for those that have the same layers, and when."""

from .progress import Turn


def speaks() -> bool:
    """Whether this rank reports: the first of its pipeline stage.

    The others of a stage have the same layers; another stage has its own.
    """
    from vllm.distributed.parallel_state import (
        get_dp_group,
        get_tensor_model_parallel_rank,
    )

    return get_tensor_model_parallel_rank() == 0 and get_dp_group().rank_in_group == 0


def take_turns() -> Turn:
    """Return this rank's turn to say how far it is, among those of the node."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm_deep_gemm_warmup.node import meeting_folder

    first = speaks() and get_pp_group().is_first_rank
    return Turn(meeting_folder(), first=first)
