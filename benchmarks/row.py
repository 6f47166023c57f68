"""One line of a benchmark's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.measure import Summary


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table.

    Attributes:
        work: what was measured.
        must_reach: the target, or "".
        measured: the result of p2ptrain, as text.
        reached: whether the target was met; None without a target.
        rival: the result of the rival in the same run, as text.
        values: the numbers behind the text, by a name that ends in the unit.
    """

    work: str
    must_reach: str
    measured: str
    reached: bool | None = None
    rival: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


def limited_row(work: str, seconds: Sequence[float], limit_s: float) -> Row:
    """A row for durations of which none may exceed the limit."""
    took = Summary.of(seconds)
    return Row(
        work=work,
        must_reach=f"≤ {limit_s:g} s",
        measured=f"{took.median:.2f} s median, {took.maximum:.2f} s worst of {took.count}",
        reached=took.maximum <= limit_s,
        values={"median_s": took.median, "worst_s": took.maximum},
    )
