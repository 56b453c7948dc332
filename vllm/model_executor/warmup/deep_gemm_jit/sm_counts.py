"""Decides for which SM counts kernels are built, and for how many tokens each.

The SM count is part of a GEMM's compile key. Dual-batch overlap leaves some SMs to
communication while it computes a part of a step, and gives them back after it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.utils import deep_gemm as deep_gemm_utils

from .spec import Target


@dataclasses.dataclass(frozen=True)
class Share:
    """SMs that DeepGEMM may use at a time, and the most tokens that it gets then."""

    target: Target
    max_tokens: int


def shares(
    target: Target, max_tokens: int, config: VllmConfig | None
) -> tuple[Share, ...]:
    """Return what serving uses, the whole step first.

    Args:
        target: What a step that is not split uses.
        max_tokens: Most tokens of a step.
        config: Of the engine; None: steps are not split.

    """
    whole = Share(target, max_tokens)
    if config is None or not config.parallel_config.use_ubatching:
        return (whole,)
    from vllm.v1.worker.ubatch_utils import create_sm_control_context

    parts = config.parallel_config.num_ubatches
    left = create_sm_control_context(config.parallel_config).compute_sms
    if left == target.sm_count:
        return (whole,)
    # The last part has what the equal ones before it leave.
    most = max_tokens - (parts - 1) * (max_tokens // parts)
    return whole, Share(dataclasses.replace(target, sm_count=left), most)


@contextlib.contextmanager
def in_use(target: Target) -> Iterator[None]:
    """Let DeepGEMM use the SMs of ``target`` and no more, then what it used before."""
    before = deep_gemm_utils.get_num_sms()
    if before == target.sm_count:
        yield
        return
    deep_gemm_utils.set_num_sms(target.sm_count)
    try:
        yield
    finally:
        deep_gemm_utils.set_num_sms(before)
