"""Prompt sizes: enough of them, all different, both ends of every row class."""

import pytest
from vllm_deep_gemm_warmup.proof import workload


@pytest.mark.parametrize("limit", [1, 2, 31, 64, 65, 1000, 1024, 8000, 8192])
def test_sizes_hold_both_ends_of_every_class(limit: int) -> None:
    sizes = workload.prompt_sizes(limit)

    ends = {1, 16, 17, 32} | {64 * k + d for k in range(1, 129) for d in (0, 1)} | {33}
    assert len(sizes) == len(set(sizes)) == 463
    assert {end for end in ends if end <= limit} <= set(sizes)
    assert limit in sizes
    assert max(sizes) + 8 <= workload.longest(limit)


def test_middles_of_classes_are_hit_too() -> None:
    sizes = set(workload.prompt_sizes(8192))

    assert all(any(64 * k + 1 < s < 64 * k + 64 for s in sizes) for k in range(1, 128))


def test_a_limit_with_more_ends_gets_them_all() -> None:
    sizes = workload.prompt_sizes(16384)

    assert sizes == sorted(set(workload.class_ends(16384)))
    assert len(sizes) == 4 + 2 * 256 > 463


def test_prompts_share_no_beginning() -> None:
    prompts = [r.prompt(151936) for r in workload.sized_requests(256) if r.size >= 16]

    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)
    assert all(0 <= token < 151936 for prompt in prompts for token in prompt)


def test_batches_are_concurrent_requests_of_the_stated_number() -> None:
    batches = workload.batch_requests((2, 17))

    assert [len(batch) for batch in batches] == [2, 17]
    assert len({request.seed for batch in batches for request in batch}) == 19


def test_prompts_of_a_context_are_sent_alone_and_together() -> None:
    alone, together = workload.context_requests(4096)

    assert [request.size for request in alone] == [4096]
    assert [request.size for request in together] == [4096, 3999, 3902, 3805]
    assert workload.longest(512, 4096) >= 4096 + 1
    assert workload.longest(512) < 4096
