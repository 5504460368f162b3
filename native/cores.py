"""The cores that this process may use. Knows no torch."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def cores() -> int:
    """Returns how many cores this process may use: its affinity, or less under a cgroup v2 quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
