"""What a run measured, from the events of its peers' metrics files (docs/use/metrics.md)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Events = Sequence[dict[str, Any]]


def measures(peers: Sequence[Events], started_s: float, eval_every: int) -> dict[str, Any]:
    """Tokens, bytes and seconds of a run, how late its rounds landed, and its curve.

    Args:
        peers: the events of each peer.
        started_s: when training began, in seconds since the epoch.
        eval_every: steps between two evaluations.
    """
    events = [event for one in peers for event in one]
    steps = [event for event in events if event["event"] == "step"]
    fragments = [event for event in events if event["event"] == "fragments"]
    return {
        "tokens": sum(event["tokens"] for event in steps),
        "mb_per_peer": round(sum(map(_sent, events)) / 1e6 / len(peers), 3),
        "fragment_mb_per_peer": round(sum(map(_sent, fragments)) / 1e6 / len(peers), 3),
        "seconds": round(max(event["t"] for event in steps) - started_s, 1),
        "exchange_share": round(sum(e["exchange_s"] for e in steps) / len(peers) / _trained_s(peers), 4),
        "fragments": {
            "sent": sum(event["sent"] for event in fragments),
            "merged": sum(event["merged"] for event in fragments),
            "skipped": sum(sum(event["skipped"].values()) for event in fragments),
        },
        "rounds": rounds(peers),
        "curve": curve(peers, started_s, eval_every),
    }


def rounds(peers: Sequence[Events]) -> list[dict[str, Any]]:
    """Of each round its contributors, and how many steps a peer made from joining to landing it: a mean over the peers.

    Not of the round that ends the run (null), because no steps follow it.
    """
    last = max((event["round"] for one in peers for event in one if event["event"] == "round"), default=0)
    late: dict[int, list[int]] = defaultdict(list)
    contributors: dict[int, int] = {}
    for one in peers:
        steps_s = [event["t"] for event in one if event["event"] == "step"]
        for event in one:
            if event["event"] == "round":
                number, landed_s = event["round"], event["t"]
                contributors[number] = max(contributors.get(number, 0), len(event["contributors"]))
                late[number].append(sum(landed_s - event["wall_s"] < step_s <= landed_s for step_s in steps_s))
    return [
        {
            "round": number,
            "contributors": contributors[number],
            "late_steps": None if number == last else round(statistics.fmean(late[number]), 1),
        }
        for number in sorted(late)
    ]


def curve(peers: Sequence[Events], started_s: float, eval_every: int) -> list[list[float]]:
    """Rows of step, loss, seconds since the start, and megabytes that a peer had sent: means over the peers.

    The losses are of each peer's own weights on few held-out windows. A round may move a peer past the step at which an
    evaluation is due, so the nearest such step counts. Those that not all peers measured are left out.
    """
    at: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for one in peers:
        measured = {}
        for event in one:
            if event["event"] == "eval" and event["loss"] is not None:
                sent = sum(_sent(other) for other in one if other["t"] <= event["t"])
                measured[eval_every * round(event["step"] / eval_every)] = (
                    event["loss"],
                    max(0.0, event["t"] - started_s),
                    sent / 1e6,
                )
        for step, row in measured.items():
            at[step].append(row)
    return [
        [step, *(round(statistics.fmean(column), 4) for column in zip(*rows, strict=True))]
        for step, rows in sorted(at.items())
        if len(rows) == len(peers)
    ]


def _sent(event: dict[str, Any]) -> int:
    return int(event["bytes_sent"]) if event["event"] in ("fragments", "round") else 0


def _trained_s(peers: Sequence[Events]) -> float:
    """Seconds between the first and the last step of a peer, a mean over the peers."""
    times = [[event["t"] for event in one if event["event"] == "step"] for one in peers]
    return max(1e-9, statistics.fmean(max(some) - min(some) for some in times))
