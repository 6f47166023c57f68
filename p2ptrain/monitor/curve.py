"""One value over time in bounded memory, by averaging old points."""

from __future__ import annotations

from collections.abc import Iterator

from p2ptrain.protocol.event_log.downsampling import coalesce

# More than the columns of a screen.
MOST_POINTS = 2048
# The newest points are never averaged: users look at them most closely.
FRESH_POINTS = 512


# Time in seconds, value, and of how many neighbours both are the mean.
Point = tuple[float, float, int]


class Curve:
    """A bounded series of points, added in order of time; averages neighbouring old points when full."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return ((t, value) for t, value, _ in self._points)

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self._points[-1][1] if self._points else None

    def add(self, t: float, value: float) -> None:
        self._points.append((t, value, 1))
        if len(self._points) > MOST_POINTS:
            old = self._points[:-FRESH_POINTS]
            self._points[:-FRESH_POINTS] = coalesce(old, MOST_POINTS - 2 * FRESH_POINTS, lambda point: point[2], _mean)


def _mean(a: Point, b: Point) -> Point:
    (t, value, weight), (t2, value2, weight2) = a, b
    total = weight + weight2
    return (t * weight + t2 * weight2) / total, (value * weight + value2 * weight2) / total, total
