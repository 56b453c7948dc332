"""Decides which ranks of an engine are asked, so that every distinct one is."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, order=True)
class Rank:
    """One process of an engine, by its place in each parallel group.

    Attributes:
        data: Data-parallel rank.
        pipeline: Pipeline stage.
        tensor: Rank in what splits tensors of a stage: tensor parallel, and prefill
            context parallel outside it.

    """

    data: int
    pipeline: int
    tensor: int

    def __str__(self) -> str:
        return f"data {self.data}, stage {self.pipeline}, tensor {self.tensor}"


@dataclasses.dataclass(frozen=True)
class World:
    """Sizes of an engine's parallel groups.

    Attributes:
        data: Data-parallel ranks that work as one engine (of a dense model: 1, since
            those are engines of their own).
        pipeline: Stages.
        tensor: Tensor-parallel times prefill-context-parallel ranks of a stage.
        experts: Routed experts of a layer that the ranks share out; 0 where none.

    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    experts: int = 0

    @property
    def ranks_of_engine(self) -> int:
        """Processes of one data-parallel rank."""
        return self.pipeline * self.tensor

    def every(self) -> Iterator[Rank]:
        """Yield every rank in vLLM's order: data, then stage, then tensor."""
        for data in range(self.data):
            for stage in range(self.pipeline):
                for tensor in range(self.tensor):
                    yield Rank(data, stage, tensor)

    def distinct(self) -> list[Rank]:
        """Return ranks that together have every spec of the engine.

        Ranks of one stage split tensors evenly, so one of them stands for all. Where
        experts do not divide, the first ranks have one more (``determine_expert_map``
        of the base): the first and the last rank of a stage then have both counts.
        """
        uneven = self.experts % (self.data * self.tensor) if self.experts else 0
        first = [Rank(0, stage, 0) for stage in range(self.pipeline)]
        last = [
            Rank(self.data - 1, stage, self.tensor - 1)
            for stage in range(self.pipeline)
        ]
        return sorted({*first, *last}) if uneven else first

    def number(self, rank: Rank) -> int:
        """Return the rank's number in its data-parallel rank, as vLLM counts."""
        return rank.pipeline * self.tensor + rank.tensor
