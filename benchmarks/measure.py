"""Measure a process from outside: CPU time, memory, and bytes on its TCP connections (Linux)."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.processes import descendants


@dataclass(frozen=True)
class Summary:
    """Statistics of some values, such as durations. The 99th percentile of few values is their maximum."""

    count: int
    median: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        """Summarise the values. Raises ValueError if there are none."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("nothing was measured")
        return cls(len(ordered), _quantile(ordered, 0.5), _quantile(ordered, 0.99), ordered[-1])

    def milliseconds(self) -> str:
        """The summary as text, for values in seconds."""
        return f"{milliseconds(self.median)} median, {milliseconds(self.p99)} p99 ({self.count})"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds, with three digits and no exponent."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def cpu_s(pids: Collection[int]) -> float:
    """CPU seconds used so far by these processes and their live descendants, such as a peer's p2pd."""
    total = 0.0
    for pid in pids:
        for process in descendants(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: resident now, its peak, and the anonymous part (not file pages) of what is resident now."""

    resident: int
    peak: int
    anonymous: int


def memory(pid: int) -> Memory:
    """Read the kernel's counters, summed over a process and its descendants (peaks are summed too)."""
    return Memory(*(sum(values) for values in zip(*(_memory(p.pid) for p in descendants(pid)), strict=True)))


def reset_peak_memory(pid: int) -> None:
    """Reset the peaks of a process and its descendants to what is resident now."""
    for process in descendants(pid):
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def _memory(pid: int) -> tuple[int, int, int]:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    resident, peak, anonymous = (1024 * int(fields[name]) for name in ("VmRSS", "VmHWM", "RssAnon"))
    return resident, peak, anonymous


@dataclass(frozen=True)
class Traffic:
    """Payload bytes of TCP connections, as the kernel counted them."""

    sent: int
    received: int


class TrafficMeter:
    """Counts the bytes on all TCP connections of some processes and their descendants, including loopback.

    The count includes encryption, multiplexing, heartbeats and the DHT, but not TCP headers and retransmissions. A
    connection between two of the processes is counted at both ends. The count of a closed connection is lost, so
    `since_start` raises then.

    Args:
        pids: processes that live at least as long as the meter.
    """

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = pids
        self._before = self._connections()

    def since_start(self) -> Traffic:
        """Bytes since the meter was created. Raises RuntimeError if a connection was closed in that time."""
        now = self._connections()
        if lost := self._before.keys() - now.keys():
            raise RuntimeError(f"{len(lost)} connections were closed while their bytes were counted")
        zero = Traffic(0, 0)
        return Traffic(
            sent=sum(traffic.sent - self._before.get(key, zero).sent for key, traffic in now.items()),
            received=sum(traffic.received - self._before.get(key, zero).received for key, traffic in now.items()),
        )

    def _connections(self) -> dict[tuple[str, str], Traffic]:
        tool = shutil.which("ss")
        if tool is None:
            raise RuntimeError("counting bytes needs the program ss (package iproute2)")
        lines = subprocess.run([tool, "-tinpHO"], check=True, capture_output=True, text=True).stdout.splitlines()
        owners = {str(process.pid) for pid in self._pids for process in descendants(pid)}
        found = {}
        for line in lines:
            if owners.isdisjoint(re.findall(r"pid=(\d+)", line)):
                continue
            local, remote = line.split()[3:5]
            found[local, remote] = Traffic(_counter(line, "bytes_acked"), _counter(line, "bytes_received"))
        return found


def _counter(line: str, name: str) -> int:
    match = re.search(rf"\b{name}:(\d+)", line)
    return int(match[1]) if match else 0
