"""The process that works: the CPUs it may use, the memory it has taken, whom it tells how far it is, and how it writes
sizes and counts."""

import os
import resource
import sys
from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


def cpus() -> int:
    """The CPUs that this process may use; macOS has no affinity, where that is all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_bytes() -> int:
    """The largest resident set so far: getrusage counts in bytes on macOS, in KiB elsewhere."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def size(nbytes: float) -> str:
    """1.23 GB, 45.6 MB: three digits, or as many as a number of terabytes has."""
    unit = "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if nbytes < 999.5:
            break
        nbytes, unit = nbytes / 1000, larger
    return f"{nbytes:.3g} {unit}" if nbytes < 999.5 else f"{nbytes:.0f} {unit}"


def counted(number: int, what: str) -> str:
    """1 window, 2 windows."""
    return f"{number} {what}{'s' * (number != 1)}"
