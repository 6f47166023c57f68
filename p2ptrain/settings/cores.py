"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# "QUOTA PERIOD" in microseconds, or "max PERIOD": what a container may use.
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """The cores that this process may keep busy, within the quota of its container; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, UnicodeDecodeError):
        quota, _, period = CGROUP_QUOTA.read_text().partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores
