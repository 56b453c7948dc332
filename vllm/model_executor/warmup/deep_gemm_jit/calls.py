"""Decides what is remembered of one call of DeepGEMM."""

import dataclasses


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
