"""Rounds as the peers of a run report them, and the check of the round protocol's guarantee (docs/use/metrics.md).

Two peers on the same round of the same lineage hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from p2ptrain.protocol.event_log.events import Event

Key = tuple[str, int]


@dataclass
class RoundView:
    """One round of a lineage.

    Attributes:
        t: when a peer first reported that it was applied, or else skipped.
        status: "committed", "solo" (made by one peer alone), or "skipped" until a peer applies it.
        contributors: ids of the peers whose outer gradients are in the mean; empty until a peer applies it.
        wall_s: duration at the peer that applied it first.
        states: hash of the state that each peer held first, by peer, when it applied the round or adopted its state.
        applied, late: peers that applied it; those of them that had not contributed.
        reasons: why peers skipped it, by peer.
    """

    lineage: str
    round: int
    t: float
    status: str = "skipped"
    contributors: tuple[str, ...] = ()
    wall_s: float | None = None
    states: dict[Hashable, str] = field(default_factory=dict)
    applied: set[Hashable] = field(default_factory=set)
    late: set[Hashable] = field(default_factory=set)
    reasons: dict[Hashable, str] = field(default_factory=dict)

    @property
    def agreed(self) -> bool:
        return len(set(self.states.values())) <= 1


@dataclass
class RoundTable:
    """Rounds by lineage and number; `most` bounds them, and the lowest numbers are dropped."""

    most: int | None = None
    by_key: dict[Key, RoundView] = field(default_factory=dict)

    def note(self, peer: Hashable, event: Event) -> RoundView:
        """Add a `round` or `adopt` event of a peer, and return its round."""
        key = (event["lineage"], event["round"])
        round_ = self.by_key.setdefault(key, RoundView(*key, event["t"]))
        if event["event"] == "round" and event["status"] == "skipped":
            round_.reasons[peer] = event["reason"]
        else:
            round_.states.setdefault(peer, event["state_hash"])
            if event["event"] == "round":
                self._apply(round_, peer, event)
        # Event logs of several peers arrive out of order, so that the lowest number need not be the oldest entry.
        while self.most is not None and len(self.by_key) > self.most:
            del self.by_key[min(self.by_key, key=lambda key: key[1])]
        return round_

    @staticmethod
    def _apply(round_: RoundView, peer: Hashable, event: Event) -> None:
        if not round_.applied:
            round_.t, round_.status, round_.wall_s = event["t"], event["status"], event.get("wall_s")
            round_.contributors = tuple(event["contributors"])
        round_.applied.add(peer)
        if event["late"]:
            round_.late.add(peer)

    @property
    def applied(self) -> list[RoundView]:
        """All rounds that a peer has applied, solo rounds included."""
        return [round_ for round_ in self.by_key.values() if round_.applied]

    @property
    def agreed(self) -> bool:
        return all(round_.agreed for round_ in self.by_key.values())
