"""Who belongs together on a node is told by what the launcher is named."""

from pathlib import Path

from vllm_deep_gemm_warmup import node
from vllm_deep_gemm_warmup.compiling.environment import process_group


def test_two_launchers_with_one_parent_are_two_groups() -> None:
    """Also in containers that share a host's name, process numbers and a cache."""
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    for environ in (first, second):
        assert isinstance(node.announce(environ), Path)
    assert process_group(first) == process_group(dict(first))
    assert process_group(first) != process_group(second)


def test_without_a_name_it_is_the_parent_s() -> None:
    assert process_group({}) == process_group({})
