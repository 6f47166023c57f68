"""Cores and memory of this machine, within the limits of a container, and its addresses."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of a container, version 2
# "QUOTA PERIOD" in microseconds, or "max PERIOD".
CGROUP_QUOTA = CGROUP / "cpu.max"


def usable_cores() -> int:
    """The cores that this process may keep busy; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP_QUOTA).partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def free_memory_bytes() -> int | None:
    """The memory that this process may still take without swapping; None if the system does not say."""
    if sys.platform != "linux":
        return None
    lines = _read(Path("/proc/meminfo")).splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_read(CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():
        # Files that were read count as used, until the memory is needed.
        stat = (line.split() for line in _read(CGROUP / "memory.stat").splitlines())
        cached = sum(int(size) for name, size in stat if name == "inactive_file")
        free.append(max(0, int(limit) - int(used) + cached))
    return min(free, default=None)


def address_towards(host: str) -> str | None:
    """The address through which this machine would send to an IP address; None without a route. Sends nothing."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect((host, 9))  # a UDP socket only looks up the route
            return str(trial.getsockname()[0])
        except OSError:
            return None


def _read(path: Path) -> str:
    """The text of a file of the kernel; empty if there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""
