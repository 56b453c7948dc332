"""Gives two results of sampling a meaning, and lets CuTeDSL's kernels do nothing.

Loaded by the interpreter because the stand-in's environment puts this folder first on
``PYTHONPATH``; does nothing unless the stand-in is active. What it substitutes:

* V2 model runner (``vllm.v1.worker.gpu.sample.sampler``): how many tokens a request
  sampled, which a kernel writes on a device (``get_num_sampled_and_rejected``): 1 for
  a request whose prompt is complete, else 0. It would read 0 for ever here and no
  request would end. The same numbers follow from what the host knows of the batch.
* both runners with speculation: every drafted token is rejected, so that a step with
  drafts also yields one token a request.
* both runners: the sampled token ids, which would be whatever the memory held before;
  they are 0 instead, so that no answer depends on chance;
* functions that CuTeDSL compiled (``cutlass.cutlass_dsl.tvm_ffi_provider``): calling
  one does nothing. Their launcher has a CUDA runtime of its own linked in, which asks
  the driver for private tables (``cuGetExportTable``) that no header describes.

Nothing else is touched.
"""

import os
import sys
from collections.abc import Callable
from typing import Any


def _write_zeros(tensor: Any) -> None:
    """By a copy from the host, since ``zero_`` is a kernel and does nothing here."""
    import torch

    tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype))


def _one_token_each(output: Any, input_batch: Any) -> None:
    import torch

    count = input_batch.num_reqs
    lengths = input_batch.seq_lens_cpu_upper_bound[:count]
    prompts = torch.as_tensor(input_batch.prefill_len_np[:count])
    done = (lengths >= prompts).to(output.num_sampled.dtype)
    ends = torch.as_tensor(input_batch.cu_num_logits_np[: count + 1])
    logits = (ends[1:] - ends[:-1]).to(done.dtype)
    output.num_sampled[:count].copy_(done)
    output.num_rejected[:count].copy_((logits - 1) * done)
    _write_zeros(output.sampled_token_ids)


def _v2(cls: Any) -> None:
    import functools

    original = cls.__call__

    @functools.wraps(original)
    def sample(
        self: Any, logits: Any, input_batch: Any, *rest: Any, **named: Any
    ) -> Any:
        output = original(self, logits, input_batch, *rest, **named)
        _one_token_each(output, input_batch)
        return output

    cls.__call__ = sample


def _v1(module: Any) -> None:
    import functools

    original = module.Sampler.forward

    @functools.wraps(original)
    def forward(*rest: Any, **named: Any) -> Any:
        output = original(*rest, **named)
        _write_zeros(output.sampled_token_ids)
        return output

    module.Sampler.forward = forward


def _cutedsl(module: Any) -> None:
    def launch(self: Any, *arguments: Any, **named: Any) -> None:
        """Nothing, as any kernel on the stand-in."""

    module.TVMFFIJitCompiledFunction.__call__ = launch
    module.TVMFFIJitCompiledFunctionWithKwargs.__call__ = launch


def _v1_speculative(module: Any) -> None:
    import functools

    original = module.RejectionSampler.forward

    @functools.wraps(original)
    def forward(*rest: Any, **named: Any) -> Any:
        output = original(*rest, **named)
        ids = output.sampled_token_ids
        rejected = ids.new_full(ids.shape, module.PLACEHOLDER_TOKEN_ID, device="cpu")
        rejected[:, 0] = 0
        ids.copy_(rejected)
        return output

    module.RejectionSampler.forward = forward


_SUBSTITUTES: dict[str, Callable[[Any], None]] = {
    "vllm.v1.worker.gpu.sample.sampler": lambda module: _v2(module.Sampler),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": (
        lambda module: _v2(module.RejectionSampler)
    ),
    "vllm.v1.sample.sampler": _v1,
    "cutlass.cutlass_dsl.tvm_ffi_provider": _cutedsl,
    "vllm.v1.sample.rejection_sampler": _v1_speculative,
}


class _Finder:
    """Lets the other finders find a module and acts when it has been executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        substitute = _SUBSTITUTES.get(name)
        if substitute is None:
            return None
        for finder in sys.meta_path:
            if finder is _Finder or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            substitute(module)

        spec.loader.exec_module = exec_module
        return spec


def _next_sitecustomize() -> None:
    """Runs the ``sitecustomize`` that this one stands in front of, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    here = Path(__file__).resolve().parent
    rest = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("STANDIN_GPU"):
    sys.meta_path.insert(0, _Finder)
_next_sitecustomize()
