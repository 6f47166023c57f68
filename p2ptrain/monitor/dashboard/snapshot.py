"""The parts of the page as plain values for JSON, made from a `LiveSwarm`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from p2ptrain.monitor.formatting import short_id
from p2ptrain.monitor.liveswarm import GONE, LEFT, LiveSwarm
from p2ptrain.monitor.peerview import PeerView
from p2ptrain.monitor.roundview import RoundView
from p2ptrain.monitor.swarmview import BAD, GOOD, PLAIN

Json = dict[str, Any]

SHOWN_ROUNDS = 60
SHOWN_NOTICES = 120
MOST_TEXT = 240
# A fragment report covers two seconds (FRAGMENTS_COUNT_S); reports older than TRAFFIC_S are not live traffic.
TRAFFIC_S = 8.0
FRAGMENTS_COUNT_S = 2.0
STYLES = {PLAIN: "plain", GOOD: "good", BAD: "bad"}


def overview(live: LiveSwarm, now_s: float) -> Json:
    """The state of the run and of every peer."""
    swarm = live.swarm
    up = [peer for peer in swarm.up if live.is_linked(peer.number)]
    losses = [peer.loss for peer in up if peer.loss is not None]
    held_out = [loss for peer in up if (loss := peer.held_out_loss) is not None]
    correlations = swarm.correlations()
    return {
        "now": round(now_s, 1),
        "step": statistics.median_low([_step(live, peer) for peer in up]) if up else swarm.step,
        "total_steps": swarm.total_steps,
        "parameters": max((peer.parameters for peer in swarm.peers.values()), default=0),
        "up": len(up),
        "seen": len(swarm.peers),
        "loss": _rounded(statistics.fmean(losses)) if losses else None,
        "held_out": _rounded(statistics.fmean(held_out)) if held_out else None,
        "correlation": _rounded(correlations[-1].value, 5) if correlations else None,
        "tokens_per_s": round(sum(peer.tokens_per_s for peer in up)),
        "rounds": _rounds_so_far(list(swarm.rounds.values())),
        "agreed": all(round_.agreed for round_ in swarm.rounds.values()),
        "bytes": _bytes(list(swarm.peers.values()), len(up)),
        "peers": [_peer(live, peer, now_s) for peer in swarm.peers.values()],
    }


def rounds(live: LiveSwarm) -> list[Json]:
    """The last rounds, oldest first, including skipped ones."""
    swarm = live.swarm
    keys = sorted(swarm.rounds.keys() | swarm.skips.keys(), key=lambda key: _when(live, key))[-SHOWN_ROUNDS:]
    return [_round(live, key) for key in keys]


def notices(live: LiveSwarm) -> list[Json]:
    """The last notices, newest first."""
    newest = sorted(live.swarm.notices, key=lambda notice: (notice.at_s, notice.number))[-SHOWN_NOTICES:]
    return [
        {
            "id": notice.number, "t": round(notice.at_s, 1), "text": notice.text[:MOST_TEXT],
            "style": STYLES[notice.style],
        }
        for notice in reversed(newest)
    ]  # fmt: skip


def _peer(live: LiveSwarm, peer: PeerView, now_s: float) -> Json:
    sighting = live.sightings.get(peer.number)
    linked = live.is_linked(peer.number)
    return {
        "n": peer.number,
        "id": peer.peer_id,
        "short": short_id(peer.peer_id),
        "kind": _kind(peer, linked),
        "doing": sighting.status if sighting is not None else "",
        "trouble": sighting.trouble[:MOST_TEXT] if sighting is not None else "",
        "founded": peer.founded,
        "step": _step(live, peer),
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
        "discarded": peer.discarded,
        "heard": round(peer.heard_t, 1),
        "to": _traffic(live, peer, now_s) if linked else {},
    }


def _step(live: LiveSwarm, peer: PeerView) -> int:
    """The peer's latest step; heartbeats are up to two seconds newer than event logs."""
    return max(peer.step, live.sightings[peer.number].step) if live.is_linked(peer.number) else peer.step


def _kind(peer: PeerView, linked: bool) -> str:
    """One of training, joining, finished, left, gone and unreachable, for the colours."""
    if linked:
        return "training" if peer.is_up else "joining" if peer.status != "finished" else "finished"
    return peer.status if peer.status in (GONE, LEFT) else "unreachable"


def _traffic(live: LiveSwarm, peer: PeerView, now_s: float) -> dict[int, float]:
    """Fragments per second to each peer, by number."""
    if now_s - peer.counted_t > TRAFFIC_S:
        return {}
    numbers = ((live.number_of(peer_id), count) for peer_id, count in peer.recent_to.items())
    return {number: round(count / FRAGMENTS_COUNT_S, 1) for number, count in numbers if number is not None}


def _rounds_so_far(rounds: list[RoundView]) -> int:
    """Number of committed rounds, from the last round's number: old rounds are not all in the event logs."""
    committed = [round_ for round_ in rounds if round_.status == "committed"]
    return 1 + max(committed, key=lambda round_: round_.t).round if committed else 0


def _bytes(peers: list[PeerView], up: int) -> Json:
    """Payload per inner step and peer over the known run, and what dense data-parallel training would send.

    A ring all-reduce of fp32 gradients at every step: 2 (k - 1) / k · 4 N bytes, for k peers and N weights.
    """
    steps = sum(peer.own_steps for peer in peers)
    parameters = max((peer.parameters for peer in peers), default=0)
    return {
        "steps": steps,
        "fragments": sum(peer.fragment_bytes for peer in peers) / max(1, steps),
        "rounds": sum(peer.round_bytes for peer in peers) / max(1, steps),
        "dense": 8 * parameters * (up - 1) / up if up else 0,
        "sent": sum(peer.bytes_sent for peer in peers),
    }


def _when(live: LiveSwarm, key: tuple[str, int]) -> tuple[float, int]:
    round_ = live.swarm.rounds.get(key)
    return (round_.t if round_ is not None else live.swarm.skips[key].t, key[1])


def _round(live: LiveSwarm, key: tuple[str, int]) -> Json:
    swarm = live.swarm
    round_, skip = swarm.rounds.get(key), swarm.skips.get(key)
    t = _when(live, key)[0]
    by = [live.number_of(peer_id) or short_id(peer_id) for peer_id in round_.contributors] if round_ else []
    late = sorted(number for number in round_.late if isinstance(number, int)) if round_ else []
    skipped = {number: reason[:MOST_TEXT] for number, reason in skip.reasons.items()} if skip else {}
    reported = {*by, *late, *skipped}
    return {
        "lineage": key[0],
        "round": key[1],
        "t": round(t, 1),
        "status": round_.status if round_ else "skipped",
        "wall_s": _rounded(round_.wall_s, 2) if round_ else None,
        "by": by,
        "late": late,
        "skipped": skipped,
        "absent": [
            p.number for p in live.swarm.peers.values() if p.number not in reported and _was_training(p, t, round_)
        ],
        "agreed": round_.agreed if round_ else True,
    }


def _was_training(peer: PeerView, t: float, round_: RoundView | None) -> bool:
    return round_ is not None and 0 < peer.began_t < t < peer.heard_t


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """For JSON, which has no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
