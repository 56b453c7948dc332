"""A GPU that is not there: the real vLLM and DeepGEMM start, build and serve on it.

What device memory holds is meaningless; what the host decides on is right or an error.

Two variables steer the library itself, both read at each call: ``STANDIN_GPU_TRACE``,
a file for calls without a meaning, and ``STANDIN_GPU_REFUSE_OVERLAP=1``, a driver that
refuses tensor maps whose rows lie over each other. No driver documents that it does; a
program that makes such maps has to cope with one.
"""

from .device import Device, parse_device
from .environment import environment, without

__all__ = ["Device", "environment", "parse_device", "without"]
