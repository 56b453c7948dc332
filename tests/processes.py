"""What is known of other processes."""

import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether it has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def family_of(leader: int) -> list[int]:
    """The leader and every process that descends from it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(words[1])
    found = [leader]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.02)
