"""Curves on a common time grid of bounded size, for the charts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.monitor.liveswarm import LiveSwarm

Json = dict[str, Any]
Floats = npt.NDArray[np.float64]

# The selectable time ranges, in seconds; 0 for all.
RANGES = (600, 3600, 0)
# One point per three pixels of a chart. Event logs keep at least as many points over a run of any length.
POINTS = 240
# Event logs merge the steps of two seconds.
FINEST_S = 2.5
# Shorter gaps are long steps, and are interpolated; in longer gaps the peer was away.
HOLE_S = 30.0
HOLE_POINTS = 3


def curves(live: LiveSwarm, range_s: int, now_s: float) -> Json:
    """Loss of every peer, and the correlation of their weights, at common times.

    Args:
        live: the observed swarm.
        range_s: length of the time range, in seconds; 0 for all.
        now_s: seconds since the epoch.

    Returns:
        `t`: times in seconds since the epoch; `loss`, `held_out`: values by peer number, None where unknown;
        `correlation`: values for the swarm.
    """
    peers = live.swarm.peers.values()
    begun = [peer.began_t for peer in peers if peer.began_t]
    # A clock may be ahead of ours.
    start = min(now_s, max(min(begun, default=now_s - 60), now_s - range_s if range_s else 0.0))
    width = max(FINEST_S, (now_s - start) / POINTS)
    # Align to multiples of the width, so that points do not move between updates.
    bins = np.arange(np.floor(start / width), np.floor(now_s / width) + 1)
    correlations = ((found.t, found.value) for found in live.swarm.correlations())
    return {
        "range": range_s,
        "t": [round(t, 1) for t in (bins + 0.5) * width],
        "loss": {peer.number: _means(peer.losses, bins, width) for peer in peers},
        "held_out": {peer.number: _means(peer.held_out, bins, width, bridge=True) for peer in peers},
        "correlation": _means(correlations, bins, width, bridge=True, digits=5),
    }


def _means(
    points: Iterable[tuple[float, float]], bins: Floats, width: float, *, bridge: bool = False, digits: int = 4
) -> list[float | None]:
    """Means of the points in each bin; interpolates short gaps, or all gaps if `bridge`."""
    known = np.asarray(list(points), np.float64).reshape(-1, 2)
    places = (np.floor(known[:, 0] / width) - bins[0]).astype(np.int64)
    inside = (places >= 0) & (places < len(bins))
    places, values = places[inside], known[inside, 1]
    counts = np.bincount(places, minlength=len(bins))
    filled = np.flatnonzero(counts)
    means = np.full(len(bins), np.nan)
    means[filled] = np.bincount(places, weights=values, minlength=len(bins))[filled] / counts[filled]
    longest = max(HOLE_POINTS, HOLE_S / width)
    for left, right in itertools.pairwise(filled):
        if right - left > 1 and (bridge or right - left <= longest):
            means[left : right + 1] = np.linspace(means[left], means[right], right - left + 1)
    return [None if np.isnan(mean) else round(float(mean), digits) for mean in means]
