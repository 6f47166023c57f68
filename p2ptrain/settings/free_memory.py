"""How much memory this process may still take."""

from __future__ import annotations

import sys
from pathlib import Path


def free_memory_bytes() -> int | None:
    """Memory available without swapping, within a container's limit; None if the system does not say."""
    if sys.platform != "linux":
        return None
    lines = (_read(Path("/proc/meminfo")) or "").splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit, used = (_read(Path("/sys/fs/cgroup") / name) or "" for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():  # limit of a container (cgroup version 2)
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
