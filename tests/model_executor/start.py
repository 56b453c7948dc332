"""Run as a program: construct, load and warm one layer for each N of its argument.

Prints JSON: the kernel that each layer got, which are stamped, whether the library
was imported, what was logged as a warning, and what a forward raised. A process of
its own, because vLLM and DeepGEMM settle on their device, compiler and switches once.
"""

import json
import logging
import pathlib
import sys
import tempfile

import torch
from vllm.utils import deep_gemm as deep_gemm_utils

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from real_layers import (  # type: ignore[import-not-found]
    FP8,
    load,
    make_linear,
    one_rank,
)
from vllm.model_executor.warmup.deep_gemm_warmup import deep_gemm_warmup

LIMIT = 64


class Warnings(logging.Handler):
    """Keeps the text of what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def forward(layer: torch.nn.Module, device: torch.device) -> str:
    """Run the layer as the profiling run does; return the error, or nothing."""
    try:
        layer(torch.ones(LIMIT, 256, dtype=torch.bfloat16, device=device))
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    warnings = Warnings()
    logging.getLogger("vllm").addHandler(warnings)
    device = torch.device("cuda", 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        one_rank(pathlib.Path(folder)) as config,
    ):
        layers = [
            load(make_linear(config, device, int(n), 256, FP8, prefix=f"layers.{n}"))
            for n in sys.argv[1:]
        ]
        # As kernel_warmup does.
        if deep_gemm_utils.is_deep_gemm_supported():
            deep_gemm_warmup(torch.nn.ModuleList(layers), LIMIT)
        print(
            json.dumps(
                {
                    "forward": [forward(layer, device) for layer in layers],
                    "kernels": [
                        type(layer.quant_method.fp8_linear).__name__ for layer in layers
                    ],
                    "stamped": [
                        hasattr(layer, "deep_gemm_warmup_provider") for layer in layers
                    ],
                    "warnings": [line for line in warnings.lines if "DeepGEMM" in line],
                    "library": any(
                        name.endswith("deep_gemm._C") for name in sys.modules
                    ),
                }
            )
        )


if __name__ == "__main__":
    main()
