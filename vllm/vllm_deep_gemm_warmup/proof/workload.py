"""Decides what is sent: prompt sizes that hit every row class, then batches."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

SIZES = 463
BATCHES = (2, 8, 16, 17, 32, 33, 64, 128, 256)
BATCH_TOKENS = 8
# More than the longest answer of a sized prompt and of a batch.
HEADROOM = 64


@dataclass(frozen=True)
class Request:
    """One completion to ask for.

    ``size`` is the number of prompt tokens, ``tokens`` the number of tokens that
    must come back, ``seed`` what the prompt's token ids are drawn from.
    """

    name: str
    size: int
    tokens: int
    seed: int

    def prompt(self, vocab_size: int) -> list[int]:
        """Return ``size`` token ids, each at least 0 and below ``vocab_size``."""
        return random.Random(self.seed).choices(range(vocab_size), k=self.size)


def class_ends(limit: int) -> Iterator[int]:
    """Yield both ends of every row class up to ``limit`` rows.

    The classes are those in which DeepGEMM's choice on SM90 was measured to be
    constant: 1-16, 17-32, then one per 64 rows (the first of them begins at 33).
    """
    first = chain([(1, 16), (17, 32), (33, 64)])
    rest = ((low + 1, low + 64) for low in range(64, limit, 64))
    for low, high in chain(first, rest):
        if low <= limit:
            yield low
            yield min(high, limit)


def prompt_sizes(limit: int, count: int = SIZES) -> list[int]:
    """Return ``count`` different prompt sizes, both ends of every class among them.

    What the ends leave free is filled with the middles of the classes, then with
    the smallest unused sizes, which pass ``limit`` when it is small: a prompt longer
    than the limit is computed in pieces of at most ``limit`` rows. A limit with more
    class ends than ``count`` gets all of them and nothing else.
    """
    ends = dict.fromkeys(class_ends(limit))
    count = max(count, len(ends))
    middles = range(97, limit, 64)
    candidates: Iterable[int] = chain(ends, middles, range(1, limit + count + 1))
    sizes: dict[int, None] = {}
    for size in candidates:
        if len(sizes) == count:
            break
        sizes[size] = None
    return sorted(sizes)


def sized_requests(limit: int, count: int = SIZES) -> list[Request]:
    """Return one request per prompt size, asking for one to three tokens."""
    return [
        Request(f"prompt of {size}", size, 1 + index % 3, seed=index)
        for index, size in enumerate(prompt_sizes(limit, count))
    ]


def batch_requests(sizes: Iterable[int] = BATCHES) -> list[list[Request]]:
    """Return batches of short prompts that are sent at the same time."""
    return [
        [
            Request(
                f"request {index} of a batch of {size}",
                1 + index % 7,
                BATCH_TOKENS,
                seed=1_000_000 + 1_000 * size + index,
            )
            for index in range(size)
        ]
        for size in sizes
    ]


def context_requests(context: int) -> list[list[Request]]:
    """Return a prompt of ``context`` tokens, then four at the same time.

    Longer than a step, they are computed in pieces, and for every piece but the first
    MLA computes what went before again. One alone passes the multiples of the step;
    four share it, and their pieces end anywhere.
    """
    sizes = [[context], [context - 97 * number for number in range(4)]]
    return [
        [
            Request(f"prompt of {size}", size, 1, seed=2_000_000 + size)
            for size in together
            if size > 0
        ]
        for together in sizes
    ]


def longest(limit: int, context: int = 0, count: int = SIZES) -> int:
    """Return the context length, in tokens, that the workload needs."""
    return max(*prompt_sizes(limit, count), context) + HEADROOM
