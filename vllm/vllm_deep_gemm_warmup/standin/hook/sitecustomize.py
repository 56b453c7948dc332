"""Gives one result a meaning: how many tokens a request sampled (V2 model runner).

Loaded by the interpreter because the stand-in's environment puts this folder first on
``PYTHONPATH``; does nothing unless the stand-in is active. On a device, a kernel writes
that number (1 for a request whose prompt is complete, else 0). Here no kernel runs, the
number would read 0 for ever and no request would end. So ``Sampler.__call__`` of
``vllm.v1.worker.gpu.sample.sampler`` is followed by a copy of the same numbers, computed
from what the host already knows of the batch. Nothing else of vLLM is touched.
"""

import os
import sys

_TARGET = "vllm.v1.worker.gpu.sample.sampler"


def _give_meaning(module):
    import functools

    import torch

    original = module.Sampler.__call__

    @functools.wraps(original)
    def sample(self, logits, input_batch, *args, **kwargs):
        output = original(self, logits, input_batch, *args, **kwargs)
        count = input_batch.num_reqs
        lengths = input_batch.seq_lens_cpu_upper_bound[:count]
        prompts = torch.as_tensor(input_batch.prefill_len_np[:count])
        done = (lengths >= prompts).to(output.num_sampled.dtype)
        output.num_sampled[:count].copy_(done)
        output.num_rejected.zero_()
        return output

    module.Sampler.__call__ = sample


class _Finder:
    """Lets the other finders find the module and acts when it has been executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _TARGET:
            return None
        for finder in sys.meta_path:
            if finder is _Finder or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _give_meaning(module)

        spec.loader.exec_module = exec_module
        return spec


def _next_sitecustomize():
    """Runs the ``sitecustomize`` that this one stands in front of, if there is one."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("STANDIN_GPU"):
    sys.meta_path.insert(0, _Finder)
_next_sitecustomize()
