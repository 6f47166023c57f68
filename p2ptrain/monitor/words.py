"""Numbers as people read them."""

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


def clock(seconds: float) -> str:
    """`1:05` for 65 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
