"""One value over time in bounded memory, by averaging old points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from p2ptrain.protocol.event_log.downsampling import coalesce

# More than the columns of a screen.
MOST_POINTS = 2048
# The newest points are never averaged: users look at them most closely.
FRESH_POINTS = 512


class Point(NamedTuple):
    """A value, or the mean of `weight` neighbours, at their mean time `t` (seconds)."""

    t: float
    value: float
    weight: int = 1


class Curve:
    """A bounded series of points, added in order of time; averages neighbouring old points when full."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return ((point.t, point.value) for point in self._points)

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self._points[-1].value if self._points else None

    def add(self, t: float, value: float) -> None:
        self._points.append(Point(t, value))
        if len(self._points) > MOST_POINTS:
            old = self._points[:-FRESH_POINTS]
            self._points[:-FRESH_POINTS] = coalesce(old, MOST_POINTS - 2 * FRESH_POINTS, _weight, _mean)


def _weight(point: Point) -> int:
    return point.weight


def _mean(a: Point, b: Point) -> Point:
    weight = a.weight + b.weight
    return Point((a.t * a.weight + b.t * b.weight) / weight, (a.value * a.weight + b.value * b.weight) / weight, weight)
