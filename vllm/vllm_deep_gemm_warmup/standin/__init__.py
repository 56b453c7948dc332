"""A GPU that is not there: the real vLLM and DeepGEMM start, build and serve on it.

What device memory holds is meaningless; what the host decides on is right or an error.
"""

from .device import Device, parse_device
from .environment import environment, without

__all__ = ["Device", "environment", "parse_device", "without"]
