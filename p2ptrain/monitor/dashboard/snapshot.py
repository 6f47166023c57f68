"""The parts of the page as plain values for JSON, made from a `SwarmView`; curves on a time grid of bounded size."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.formatting import short_id
from p2ptrain.monitor.peerview import PeerState, PeerView
from p2ptrain.monitor.run_audit import RoundView
from p2ptrain.monitor.swarmview import SwarmView

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
SHOWN_ROUNDS = 60
SHOWN_NOTICES = 120
MOST_TEXT = 240
# A fragment report covers two seconds (FRAGMENTS_COUNT_S); reports older than TRAFFIC_S are not live traffic.
TRAFFIC_S = 8.0
FRAGMENTS_COUNT_S = 2.0


def overview(swarm: SwarmView, now_s: float) -> Json:
    """The state of the run and of every peer."""
    up = [peer for peer in swarm.up if peer.number in swarm.linked]
    losses = [peer.loss for peer in up if peer.loss is not None]
    held_out = [loss for peer in up if (loss := peer.held_out_loss) is not None]
    spreads = [peer.spread for peer in up if peer.spread is not None]
    correlations = swarm.correlations()
    parameters = max((peer.parameters for peer in swarm.peers.values()), default=0)
    return {
        "now": round(now_s, 1),
        "step": statistics.median_low([_step(swarm, peer) for peer in up]) if up else swarm.step,
        "total_steps": swarm.total_steps,
        "parameters": parameters,
        "up": len(up),
        "seen": len(swarm.peers),
        "loss": _rounded(statistics.fmean(losses)) if losses else None,
        "held_out": _rounded(statistics.fmean(held_out)) if held_out else None,
        "correlation": _rounded(correlations[-1].value, 5) if correlations else None,
        "spread": _rounded(statistics.fmean(spreads), 5) if spreads else None,
        "tokens_per_s": round(sum(peer.tokens_per_s for peer in up)),
        "rounds": _rounds_so_far(swarm.rounds.applied),
        "agreed": swarm.rounds.agreed,
        "bytes": {
            "steps": sum(peer.own_steps for peer in swarm.peers.values()),
            "sent": sum(peer.bytes_sent for peer in swarm.peers.values()),
            **dataclasses.asdict(swarm.bytes_per_step(parameters, len(up))),
        },
        "peers": [_peer(swarm, peer, now_s) for peer in swarm.peers.values()],
        "relayed": _relayed(swarm),
    }


def rounds(swarm: SwarmView) -> list[Json]:
    """The last rounds, oldest first, including skipped ones."""
    newest = sorted(swarm.rounds.by_key.values(), key=lambda round_: (round_.t, round_.round))[-SHOWN_ROUNDS:]
    return [_round(swarm, round_) for round_ in newest]


def notices(swarm: SwarmView) -> list[Json]:
    """The last notices, newest first."""
    newest = sorted(swarm.notices, key=lambda notice: (notice.at_s, notice.number))[-SHOWN_NOTICES:]
    return [
        {"id": n.number, "t": round(n.at_s, 1), "text": n.text[:MOST_TEXT], "style": n.tone.value}
        for n in reversed(newest)
    ]


def _peer(swarm: SwarmView, peer: PeerView, now_s: float) -> Json:
    sighting = swarm.sightings.get(peer.number)
    linked = peer.number in swarm.linked
    return {
        "n": peer.number,
        "id": peer.peer_id,
        "short": short_id(peer.peer_id),
        "kind": _kind(peer, linked),
        "doing": sighting.status if sighting is not None else "",
        "trouble": sighting.trouble[:MOST_TEXT] if sighting is not None else "",
        "founded": peer.founded,
        "step": _step(swarm, peer),
        "round": peer.round,
        "steps": peer.own_steps,
        "loss": _rounded(peer.loss),
        "held_out": _rounded(peer.held_out_loss),
        "tokens_per_s": round(peer.tokens_per_s),
        "exchange_ms": _rounded(peer.exchange_ms, 2) if peer.own_steps else None,
        "rtt_ms": round(1e3 * sighting.rtt_s, 1) if sighting is not None and linked else None,
        "sent": peer.sent,
        "merged": peer.merged,
        "skipped": dict(peer.skipped.most_common(8)),
        "fragment_bytes": peer.fragment_bytes,
        "round_bytes": peer.round_bytes,
        "heard": round(peer.heard_t, 1),
        "to": _traffic(swarm, peer, now_s) if linked else {},
    }


def _step(swarm: SwarmView, peer: PeerView) -> int:
    """The peer's latest step; heartbeats are up to two seconds newer than event logs."""
    return max(peer.step, swarm.sightings[peer.number].step) if peer.number in swarm.linked else peer.step


def _kind(peer: PeerView, linked: bool) -> str:
    """One of training, joining, finished, left, gone and unreachable, for the colours."""
    if not linked:
        return peer.state.value if peer.state in (PeerState.GONE, PeerState.LEFT) else "unreachable"
    return "training" if peer.is_up else "finished" if peer.state is PeerState.FINISHED else "joining"


def _traffic(swarm: SwarmView, peer: PeerView, now_s: float) -> dict[int, float]:
    """Fragments per second to each peer, by number."""
    if now_s - peer.counted_t > TRAFFIC_S:
        return {}
    numbers = ((swarm.numbers.get(peer_id), count) for peer_id, count in peer.recent_to.items())
    return {number: round(count / FRAGMENTS_COUNT_S, 1) for number, count in numbers if number is not None}


def _relayed(swarm: SwarmView) -> list[Json]:
    """The pairs of linked peers without a direct connection, as one of the two reports, with the relay between them."""
    pairs = {
        (min(number, other), max(number, other)): relay
        for number in swarm.linked
        for peer_id, relay in swarm.sightings[number].relayed.items()
        if (other := swarm.numbers.get(peer_id)) in swarm.linked
    }
    return [{"pair": pair, "relay": short_id(relay) if relay else ""} for pair, relay in sorted(pairs.items())]


def _rounds_so_far(rounds: list[RoundView]) -> int:
    """Number of committed rounds, from the number of the last one, as event logs do not keep all old rounds."""
    committed = [round_ for round_ in rounds if round_.status == "committed"]
    return 1 + max(committed, key=lambda round_: round_.t).round if committed else 0


def _round(swarm: SwarmView, round_: RoundView) -> Json:
    by = [swarm.numbers.get(peer_id) or short_id(peer_id) for peer_id in round_.contributors]
    late = sorted(number for number in round_.late if isinstance(number, int))
    skipped = {number: reason[:MOST_TEXT] for number, reason in round_.reasons.items()}
    reported = {*by, *late, *skipped}
    training = [peer.number for peer in swarm.peers.values() if 0 < peer.began_t < round_.t < peer.heard_t]
    return {
        "round": round_.round,
        "t": round(round_.t, 1),
        "status": round_.status,
        "wall_s": _rounded(round_.wall_s, 2),
        "by": by,
        "late": late,
        "skipped": skipped,
        "absent": [number for number in training if number not in reported] if round_.applied else [],
        "agreed": round_.agreed,
    }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """For JSON, which has no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else round(value, digits)


def curves(swarm: SwarmView, range_s: int, now_s: float) -> Json:
    """Loss of every peer, and the correlation of their weights, at common times.

    Args:
        swarm: the observed swarm.
        range_s: length of the time range, in seconds; 0 for all.
        now_s: seconds since the epoch.

    Returns:
        `t`: times in seconds since the epoch; `loss`, `held_out`: values by peer number, None where unknown;
        `correlation`: values for the swarm.
    """
    peers = swarm.peers.values()
    begun = [peer.began_t for peer in peers if peer.began_t]
    # A clock may be ahead of ours.
    start = min(now_s, max(min(begun, default=now_s - 60), now_s - range_s if range_s else 0.0))
    width = max(FINEST_S, (now_s - start) / POINTS)
    # Align to multiples of the width, so that points do not move between updates.
    bins = np.arange(np.floor(start / width), np.floor(now_s / width) + 1)
    correlations = ((found.t, found.value) for found in swarm.correlations())
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
