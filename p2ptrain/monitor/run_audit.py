"""Rounds as the peers of a run report them, and the audit of a run: counts, joins, and a check of every round.

The check is of the round protocol's guarantee: two peers on the same round of the same lineage hold the same bytes
(docs/use/metrics.md). An audit takes events of real or simulated peers one by one, while the run goes on.
"""

from __future__ import annotations

from collections import Counter
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
        """Add a `round` or `adopt` event of a peer. Returns the round that it belongs to."""
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

    def forget(self, peer: Hashable) -> None:
        """Leave out what a peer said of any round: strangers may come without end, and each says something."""
        for round_ in self.by_key.values():
            round_.states.pop(peer, None)
            round_.reasons.pop(peer, None)
            round_.applied.discard(peer)
            round_.late.discard(peer)

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


@dataclass
class JoinTimes:
    """One start of a peer in an existing run. Times in seconds since its `start` event; None if not reached."""

    started_s: float
    state_s: float | None = None
    step_s: float | None = None
    round_s: float | None = None


@dataclass
class RunAudit:
    """Counts of a whole run. `note` takes the next event of a peer, in the order of that peer's stream.

    Attributes:
        steps: inner steps of all peers.
        held_s: seconds that exchanges blocked training, over all peers.
        rounds: all rounds that were applied or whose state was adopted.
        skipped: skipped rounds, counted for each peer.
        joins: starts of peers in an existing run, oldest first.
        repairs: how often a training peer replaced its whole state with another peer's.
        disagreements: descriptions of violations of the guarantee; always empty unless there is a bug.
    """

    steps: int = 0
    held_s: float = 0.0
    rounds: RoundTable = field(default_factory=RoundTable)
    skipped: int = 0
    joins: list[JoinTimes] = field(default_factory=list)
    repairs: int = 0
    disagreements: list[str] = field(default_factory=list)
    _joining: dict[str, JoinTimes] = field(default_factory=dict)
    _adopted: set[str] = field(default_factory=set)

    def note(self, peer: str, event: Event) -> None:
        """Process one event; ignore unknown events."""
        match event["event"]:
            case "start":
                self._adopted.discard(peer)
                self._joining[peer] = JoinTimes(event["t"])
            case "adopt":
                self._check(peer, event)
                self._on_adopt(peer, event)
            case "step":
                self.steps += 1
                self.held_s += event["exchange_s"]
                join = self._joining.get(peer)
                if join is not None and join.step_s is None:
                    join.step_s = event["t"] - join.started_s
            case "round" if event["status"] == "skipped":
                self.skipped += 1
            case "round":
                self._check(peer, event)
                join = self._joining.get(peer)
                if join is not None and join.round_s is None and not event["late"]:
                    join.round_s = event["t"] - join.started_s

    def _check(self, peer: str, event: Event) -> None:
        round_ = self.rounds.note(peer, event)
        other, state = next(iter(round_.states.items()))
        if state != event["state_hash"]:
            self.disagreements.append(
                f"round {event['round']} of lineage {event['lineage']}: {peer} has state "
                f"{event['state_hash'][:8]}, {other} has {state[:8]}"
            )

    def _on_adopt(self, peer: str, event: Event) -> None:
        if peer in self._adopted:
            self.repairs += 1
            return
        self._adopted.add(peer)
        join = self._joining.get(peer)
        if join is not None and not event.get("founded"):
            join.state_s = event["t"] - join.started_s
            self.joins.append(join)

    @property
    def committed(self) -> list[RoundView]:
        """Rounds with two or more contributors."""
        return [round_ for round_ in self.rounds.applied if len(round_.contributors) > 1]

    @property
    def agreement(self) -> float:
        """Share of the committed rounds after which all peers held the same bytes; 1 if there are none."""
        committed = self.committed
        return sum(round_.agreed for round_ in committed) / len(committed) if committed else 1.0

    @property
    def participation(self) -> Counter[int]:
        """Number of committed rounds by number of contributors."""
        return Counter(len(round_.contributors) for round_ in self.committed)
