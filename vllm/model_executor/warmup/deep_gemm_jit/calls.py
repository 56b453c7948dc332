"""Decides what is remembered of one call of DeepGEMM."""

import dataclasses

# DeepGEMM 2.8.1 appends 8 kB of stack frames to what the compiler said.
_TRACE = "\nC++ trace"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of DeepGEMM.

    Attributes:
        rows: M.
        seconds: Wall time, with the compile if there was one.
        built: Cache entries that appeared meanwhile.
        failure: Why it failed, or None.

    """

    rows: int
    seconds: float
    built: tuple[str, ...]
    failure: str | None = None


def describe_failure(error: Exception) -> str:
    """Return what ``error`` says, without DeepGEMM's own stack frames."""
    return str(error).partition(_TRACE)[0].strip() or type(error).__name__
