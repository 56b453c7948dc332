"""Decides what an engine's config says of compiling kernels, before and after ready."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class JitConfig:
    """What one engine was told.

    Attributes:
        warmup: ``kernel_config.enable_jit_warmup``. vLLM takes it back by itself
            where the operator asked for eager execution.
        eager: ``enforce_eager``: nothing is captured at the start.

    """

    warmup: bool
    eager: bool

    @property
    def switched_off(self) -> str | None:
        """Why nothing is to be warmed up; None: the operator did not say so."""
        if self.warmup or self.eager:
            return None
        return "kernel_config.enable_jit_warmup is off"


def read_jit_config(config: Any) -> JitConfig | None:
    """Return what a ``VllmConfig`` says; None where there is none."""
    if config is None:
        return None
    model = config.model_config
    return JitConfig(
        warmup=bool(config.kernel_config.enable_jit_warmup),
        eager=bool(model is not None and model.enforce_eager),
    )
