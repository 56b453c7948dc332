"""Which CUDA compiler DeepGEMM will use here, and whether it can compile.

`facts` are read once and handed on; `lookup` follows DeepGEMM to its compiler and
`check` asks that one; where nobody chose one, `choice` prefers pip's, by `links`; where
there is none, `recorded` answers for the one that built the cache.
Nothing here imports torch or vLLM, and nothing happens at import.
"""

from .check import describe, describe_current
from .choice import choose, variables
from .facts import Facts, breaks_shell, read_facts
from .lookup import operator_choice
from .recorded import recorded_variables
from .verdict import PINS, Toolchain, Unusable, needs

__all__ = [
    "PINS",
    "Facts",
    "Toolchain",
    "Unusable",
    "breaks_shell",
    "choose",
    "describe",
    "describe_current",
    "needs",
    "operator_choice",
    "read_facts",
    "recorded_variables",
    "variables",
]
