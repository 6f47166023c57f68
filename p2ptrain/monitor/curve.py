"""One value over time, in little memory: a day is drawn as well as a minute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from p2ptrain.protocol.event_log.downsampling import coalesce

# More than a screen has columns.
MOST_POINTS = 2048
# Of those, the newest are kept as they came: what happens now is looked at closely.
FRESH_POINTS = 512


class Point(NamedTuple):
    """A value, or the mean of `weight` neighbours, at their mean time `t` (seconds)."""

    t: float
    value: float
    weight: int = 1


class Curve:
    """Takes points in order of time; neighbours are averaged where there are too many."""

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
