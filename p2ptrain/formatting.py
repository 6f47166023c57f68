"""Format numbers, sizes, times and ids for people."""

from __future__ import annotations


def count(number: int, thing: str) -> str:
    """`1 peer`, `4 peers`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def size(size_bytes: float) -> str:
    """`640 B`, `3.1 kB`, `28 kB`, `1.2 MB`: two digits or more, powers of 1000."""
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "B" else f"{value:.0f} {unit}"


def speed_text(steps_s: float) -> str:
    """Steps per second: `2.4`, `0.017`, or an empty text for none."""
    return f"{steps_s:.1f}" if steps_s >= 0.95 else f"{steps_s:.2g}" if steps_s else ""


def clock(seconds: float) -> str:
    """`1:05` for 65 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """`48 s`, `12 min`, `3 h 05 min`, `4 d 03 h`: for estimates."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def seconds(value: float) -> str:
    """`0.3 s`, `24 s`, `12 min`."""
    return f"{value:.1f} s" if value < 9.95 else duration(value)


def short_id(peer_id: str) -> str:
    """The last characters of a peer id; the first ones are often the same."""
    return f"…{peer_id[-6:]}"
