"""Decides how a spec's kernels are loaded, or built: by calling DeepGEMM."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.utils import deep_gemm as deep_gemm_utils
from vllm_deep_gemm_warmup.compiling.kernel import shape_text
from vllm_deep_gemm_warmup.kernel_caches import KernelCache

from .cache import CacheWatch
from .calls import Call, describe_failure
from .entry_points import STRATEGIES, Shape, Strategy
from .kernels import Kernel
from .operands import dense_substitute_bytes
from .provider import Weights
from .ready import Ready
from .spec import EntryPoint, GemmSpec, Spec, Target

# For what is dense, such as A and D where a driver refuses rows that overlap: of the
# free memory, and bytes.
_DENSE_SHARE = 0.5
_DENSE_BYTES = 224 << 20
# Neighbouring row counts share a kernel, and one kernel that does not build is not
# the compiler: after so many failures in a row, row counts far away are tried, and
# only where they fail as well the rest is left.
_MAX_FAILURES_NEARBY = 3
_FAR_AWAY = (1.0, 0.5)


def read_target(device: torch.device) -> Target:
    """Read from ``device`` and DeepGEMM what the kernels are built for."""
    major, minor = torch.cuda.get_device_capability(device)
    return Target(major, minor, deep_gemm_utils.get_num_sms())


class Backend:
    """Builds specs on one device by calling DeepGEMM as serving does.

    Args:
        device: The CUDA device in use.
        target: What it is.
        caches: Where the kernels appear.

    """

    def __init__(
        self, device: torch.device, target: Target, caches: Iterable[KernelCache]
    ) -> None:
        self._device = device
        self.target = target
        self._overlaps: dict[EntryPoint, bool] = {}
        self._caches = [CacheWatch(cache) for cache in caches]
        self._loaded: set[str] = set()

    def run(
        self,
        spec: Spec,
        weights: Weights | None,
        *,
        every_row: bool,
        listener: Callable[[Spec, Call], None],
    ) -> tuple[list[Call], list[int]]:
        """Call DeepGEMM until every kernel of ``spec`` is built and loaded.

        Args:
            spec: What to cover.
            weights: The weight and block scale of a layer that has this spec.
            every_row: Call with every row count and not one of each window.
            listener: Told of each call.

        Returns:
            The calls made, and the row counts of those that were not. One that
            failed says why and the rest go on, until several have failed, near
            each other and far away.

        """
        try:
            strategy = STRATEGIES[spec.entry_point]
            shapes = strategy.shapes(spec, self.target, every_row=every_row)
        # Engine start: whatever keeps this spec from being built, the others go on.
        except Exception as error:
            return _failed(spec, error, listener), []
        return self._make_calls(spec, weights, shapes, listener)

    def load(
        self,
        spec: Spec,
        weights: Weights | None,
        ready: Ready,
        *,
        every_row: bool,
        listener: Callable[[Spec, Call], None],
    ) -> tuple[list[Call], list[int]]:
        """Call DeepGEMM once for each kernel of ``spec`` that is not loaded yet.

        Args:
            spec: It has a plan.
            weights: See ``run``, as for what follows and is returned.
            ready: The plan, and what became of its kernels. A call that takes one
                that could not be built is not made: the library would try again.
            every_row: What the plan was made with.
            listener: Told of each call.

        """
        try:
            strategy = STRATEGIES[spec.entry_point]
            shapes = strategy.shapes(spec, self.target, every_row=every_row)
            wanted = _by_call(
                kernel
                for kernel in ready.plan.kernels[spec]
                if kernel.entry not in self._loaded
            )
            chosen = [shape for shape in shapes if _text(shape) in wanted]
            if len(chosen) < len(wanted):
                raise ValueError("its plan names a call that is none of its own")
        except Exception as error:
            return _failed(spec, error, listener), []
        self._loaded |= {kernel.entry for kernel in ready.plan.kernels[spec]}
        calls, failures = [], ready.failures
        for shape in list(chosen):
            entries = [kernel.entry for kernel in wanted[_text(shape)]]
            failed = next((e for e in entries if e in failures), None)
            if failed is not None:
                chosen.remove(shape)
                failure = f"{failed}: {failures[failed]}"
                calls.append(Call(shape.rows, 0.0, (), failure))
                listener(spec, calls[-1])
        made, left = self._make_calls(
            spec,
            weights,
            chosen,
            listener,
            lambda shape: self._built_before(ready, shape, wanted),
        )
        return calls + made, left

    @staticmethod
    def _built_before(
        ready: Ready, shape: Shape, wanted: Mapping[str, Sequence[Kernel]]
    ) -> tuple[str, ...]:
        return tuple(
            kernel.entry
            for kernel in wanted[_text(shape)]
            if kernel.entry in ready.built
        )

    def _make_calls(
        self,
        spec: Spec,
        weights: Weights | None,
        shapes: Sequence[Shape],
        listener: Callable[[Spec, Call], None],
        built_before: Callable[[Shape], tuple[str, ...]] = lambda shape: (),
    ) -> tuple[list[Call], list[int]]:
        calls: list[Call] = []
        left = list(shapes)
        if not left:
            return calls, []
        try:
            caller = self._allocate(spec, shapes, weights)
        except Exception as error:
            return _failed(spec, error, listener), []
        while left and (position := _next_position(calls, len(left))) is not None:
            shape = left.pop(position)
            start = time.perf_counter()
            failure = caller.call(shape)
            calls.append(
                Call(
                    shape.rows,
                    time.perf_counter() - start,
                    (*built_before(shape), *self._new_entries()),
                    failure,
                )
            )
            listener(spec, calls[-1])
        return calls, [shape.rows for shape in left]

    def finish(self) -> None:
        """Wait for the device, so that a fault of ours shows here and not later.

        Raises:
            RuntimeError: A kernel that was called has failed on the device.

        """
        torch.cuda.synchronize(self._device)
        if not all(self._overlaps.values()):
            # Dense operands can be large, and the KV cache is sized already.
            torch.cuda.empty_cache()

    def _new_entries(self) -> tuple[str, ...]:
        return tuple(name for cache in self._caches for name in cache.new_entries())

    def _allocate(
        self, spec: Spec, shapes: Sequence[Shape], weights: Weights | None
    ) -> "_Caller":
        strategy = STRATEGIES[spec.entry_point]
        max_rows = max(shape.rows for shape in shapes)
        overlapping = strategy.takes_strided_rows and self._rows_may_overlap(
            spec, shapes, weights
        )
        budget = self._budget(spec, weights, overlapping=overlapping)
        if not overlapping:
            limit = budget // strategy.dense_bytes(spec)
            max_rows = min(max_rows, max(1, limit))
        return _Caller.allocate(
            spec, max_rows, weights, self._device, overlapping=overlapping
        )

    def _budget(self, spec: Spec, weights: Weights | None, *, overlapping: bool) -> int:
        """Return the bytes for rows that are dense, beside weights that stand in.

        Raises:
            RuntimeError: Those weights alone need more.

        """
        strategy, needed = STRATEGIES[spec.entry_point], 0
        if isinstance(spec, GemmSpec) and (
            strategy.reads_every_weight or not overlapping
        ):
            needed = dense_substitute_bytes(spec, weights, self._device)
        if overlapping and not needed:
            return _DENSE_BYTES
        # The spec before left its rows in PyTorch's cache, where they are not free.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        budget = min(int(free * _DENSE_SHARE), _DENSE_BYTES)
        if needed > budget:
            raise RuntimeError(
                "the layer's weights are not on the device, and what stands in for "
                f"them {_describe_excess(needed)}"
            )
        return budget - needed

    def _rows_may_overlap(
        self, spec: Spec, shapes: Sequence[Shape], weights: Weights | None
    ) -> bool:
        """Find out once for each entry point, by its first spec's smallest call.

        A driver could refuse a tensor map whose rows lie over each other. One row
        lies over no other, so it tells nothing and costs nothing. A call that fails
        in both forms has another reason, and memory is saved.
        """
        shape = next((shape for shape in shapes if shape.rows > 1), None)
        if shape is None:
            return False
        if spec.entry_point not in self._overlaps:
            self._overlaps[spec.entry_point] = self._works(
                spec, shape, weights, overlapping=True
            ) or not self._works(spec, shape, weights, overlapping=False)
        return self._overlaps[spec.entry_point]

    def _works(
        self, spec: Spec, shape: Shape, weights: Weights | None, *, overlapping: bool
    ) -> bool:
        self._budget(spec, weights, overlapping=overlapping)
        caller = _Caller.allocate(
            spec, shape.rows, weights, self._device, overlapping=overlapping
        )
        if caller.call(shape) is not None:
            return False
        torch.cuda.synchronize(self._device)
        return True


@dataclasses.dataclass(frozen=True)
class _Caller:
    """A spec with operands for calls of up to ``max_rows`` rows."""

    spec: Spec
    strategy: Strategy[Any, Any, Any]
    operands: Any
    max_rows: int

    @classmethod
    def allocate(
        cls,
        spec: Spec,
        max_rows: int,
        weights: Weights | None,
        device: torch.device,
        *,
        overlapping: bool,
    ) -> "_Caller":
        strategy = STRATEGIES[spec.entry_point]
        operands = strategy.allocate(
            spec, max_rows, weights, device, overlapping=overlapping
        )
        return cls(spec, strategy, operands, max_rows)

    def call(self, shape: Shape) -> str | None:
        """Make one call and return why it failed, or None."""
        if shape.rows > self.max_rows:
            return _describe_excess(shape.rows * self.strategy.dense_bytes(self.spec))
        try:
            self.strategy.call(self.operands, shape)
        # Engine start: DeepGEMM raises RuntimeError, FlashInfer's build also
        # OSError and what its tools raise.
        except Exception as error:
            return describe_failure(error)
        return None


def _describe_excess(needed: int) -> str:
    return f"needs {needed >> 20} MiB, more than a warmup may take"


def _failed(
    spec: Spec, error: Exception, listener: Callable[[Spec, Call], None]
) -> list[Call]:
    call = Call(spec.rows.first, 0.0, (), describe_failure(error))
    listener(spec, call)
    return [call]


def _by_call(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.shape, []).append(kernel)
    return found


def _text(shape: Shape) -> str:
    return shape_text(dataclasses.asdict(shape))


def _next_position(calls: Sequence[Call], left: int) -> int | None:
    """Return which of the calls that are left to make, or None to make no more."""
    in_a_row = itertools.takewhile(lambda call: call.failure, reversed(calls))
    tried_far = sum(1 for _ in in_a_row) - _MAX_FAILURES_NEARBY
    if tried_far < 0:
        return 0
    if tried_far == len(_FAR_AWAY):
        return None
    return int(_FAR_AWAY[tried_far] * (left - 1))
