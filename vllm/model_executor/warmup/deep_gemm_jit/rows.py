"""Decides which row counts stand for all of them when DeepGEMM is asked."""

from .spec import RowRange, Target

# DeepGEMM 2.8.1 takes one kernel for all M of a window. On SM90 the windows end
# at 16, 32 and every multiple of 64; on SM100 at every multiple of 16
# (TensorRT-LLM #18813). test_exhaustive.py keeps checking SM90 against the sweep
# of every M.
_FIRST_SM90_WINDOWS = (16, 32)
_SM90_WINDOW = 64
_OTHER_WINDOW = 16

# The scale's layout depends on M % 4 and on M == 1: four rows in a row have all
# of it.
_LAYOUT_SAMPLES = 4


def window_ends(rows: RowRange, target: Target) -> list[int]:
    """Return the largest M of every window that ``rows`` meets, ascending.

    Args:
        rows: Row counts M that serving sends.
        target: The windows depend on its architecture.

    """
    is_sm90 = target.major == 9
    step = _SM90_WINDOW if is_sm90 else _OTHER_WINDOW
    small = _FIRST_SM90_WINDOWS if is_sm90 else ()
    ends = [end for end in small if rows.first <= end <= rows.last]
    first_multiple = -(-rows.first // step) * step
    ends.extend(range(first_multiple, rows.last + 1, step))
    if rows and (not ends or ends[-1] != rows.last):
        ends.append(rows.last)
    return ends


def rows_to_run(rows: RowRange, target: Target, *, every_row: bool) -> list[int]:
    """Return the row counts M to call DeepGEMM with, ascending, each once.

    Args:
        rows: Row counts M that serving sends; may be empty.
        target: The windows depend on its architecture.
        every_row: Skip the sampling and return all of ``rows``.

    """
    if every_row:
        return list(range(rows.first, rows.last + 1))
    layout = range(rows.first, min(rows.last, rows.first + _LAYOUT_SAMPLES - 1) + 1)
    return sorted({*window_ends(rows, target), *layout})
