"""Which ranks of an engine are asked."""

from vllm.model_executor.warmup.deep_gemm_jit.offline.ranks import Rank, World


def test_one_of_a_stage_stands_for_all() -> None:
    assert World(tensor=8).distinct() == [Rank(0, 0, 0)]
    stages = World(data=2, pipeline=3, tensor=4, experts=256).distinct()
    assert stages == [Rank(0, stage, 0) for stage in range(3)]


def test_experts_that_do_not_divide_make_two_kinds() -> None:
    """256 of six ranks: 43 of the first four, 42 of the last two."""
    world = World(data=3, tensor=2, experts=256)
    assert world.distinct() == [Rank(0, 0, 0), Rank(2, 0, 1)]


def test_ranks_are_counted_as_vllm_counts_them() -> None:
    """Data, then stage, then tensor; the number is that within a data rank."""
    world = World(data=2, pipeline=2, tensor=2)
    numbers = [
        rank.data * world.ranks_of_engine + world.number(rank) for rank in world.every()
    ]
    assert numbers == list(range(8))
