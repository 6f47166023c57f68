"""The state of all peers together: rounds, correlation and notices.

The demo shows it on a terminal, and reports which peers it starts and kills. The dashboard shows it in a browser, and
gives it what an observer sees. Memory is bounded.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms.metrics import pairwise_correlation
from p2ptrain.formatting import count, size
from p2ptrain.monitor.peerview import PeerState, PeerView
from p2ptrain.monitor.run_audit import RoundTable
from p2ptrain.protocol.event_log.events import Event
from p2ptrain.protocol.event_log.observer import Sighting, View

# Bounds: rounds of a day at one per minute, notices, samples of 30 peers in 15 MB.
MOST_ROUNDS = 1500
MOST_NOTICES = 1000
MOST_SAMPLED = 256
MOST_CORRELATIONS = 2048
# Most observed peers to remember, with their curves. Then the peer that has been gone for longest is forgotten.
MOST_PEERS = 256
Values = npt.NDArray[np.float32]


class Tone(enum.Enum):
    """Whether a notice is good or bad news."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Notice:
    """One line for the user, `at_s` seconds after the view began."""

    number: int
    at_s: float
    text: str
    tone: Tone


@dataclass(frozen=True)
class Correlation:
    """Average pairwise correlation of the peers' weights at a step of the run, about `t` seconds after the epoch."""

    step: int
    t: float
    value: float


@dataclass(frozen=True)
class BytesPerStep:
    """Payload bytes per inner step and peer.

    Attributes:
        fragments, rounds: sent, as counted by the peers.
        dense: what dense data-parallel training would send: a ring all-reduce of fp32 gradients at every step, which is
            2 (k - 1) / k · 4 N bytes for k peers and N weights.
    """

    fragments: float
    rounds: float
    dense: float


@dataclass
class SwarmView:
    """The known state of a run, and the notices for the user.

    Attributes:
        began_s: start of the view, in seconds since the epoch; times of notices are relative to it.
        total_steps: length of the run; 0 until a peer has reported it.
        peers: by number, in order of appearance.
        rounds: rounds that were applied or skipped.
        notices: lines for the user, in the order in which their events arrived.
        killed_at: number of the killed peer, and the time in seconds since the epoch.
        joined_at: number of the late peer, and when it had the swarm's weights.
        late: number of the late peer once its process has started.
        sightings: an observer's last sighting of each peer, by number.
        numbers: numbers of the peers that an observer knows, by id.
        linked: numbers of the peers that an observer has a link to.
    """

    began_s: float = 0.0
    total_steps: int = 0
    peers: dict[int, PeerView] = field(default_factory=dict)
    rounds: RoundTable = field(default_factory=lambda: RoundTable(MOST_ROUNDS))
    notices: list[Notice] = field(default_factory=list)
    killed_at: tuple[int, float] | None = None
    joined_at: tuple[int, float] | None = None
    late: int | None = None
    sightings: dict[int, Sighting] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    linked: set[int] = field(default_factory=set)
    _next_number: int = 1
    _noticed: set[int] = field(default_factory=set)
    _next_notice: int = 0
    _samples: dict[int, dict[int, tuple[float, Values]]] = field(default_factory=dict)
    _correlations: dict[int, Correlation] = field(default_factory=dict)

    def add_notice(self, now_s: float, text: str, tone: Tone = Tone.PLAIN) -> None:
        self.notices.append(Notice(self._next_notice, now_s - self.began_s, text, tone))
        self._next_notice += 1
        del self.notices[:-MOST_NOTICES]

    def started(self, number: int, *, late: bool = False) -> None:
        self.peers[number] = PeerView(number)
        if late:
            self.late = number

    def killed(self, number: int, now_s: float) -> None:
        """Note that a peer was killed at `now_s`, in seconds since the epoch."""
        self.peers[number].state = PeerState.KILLED
        self.killed_at = (number, now_s)
        self.add_notice(now_s, f"peer {number} killed (SIGKILL) at step {self.step:,}", Tone.BAD)

    def observe(self, view: View, now_s: float) -> None:
        """Add the next view of an observer; `now_s` in seconds since the epoch."""
        present = frozenset(sighting.peer_id for sighting in view.members)
        for batch in view.batches:
            peer = self._observed(batch.peer_id, present)
            for event in batch.events:
                self.apply(peer.number, event)
            self.total_steps = max(self.total_steps, peer.total_steps)
        linked = set()
        for sighting in view.members:
            number = self._observed(sighting.peer_id, present).number
            self.sightings[number] = sighting
            if sighting.linked:
                linked.add(number)
        for number in sorted(linked - self.linked):
            self._on_linked(self.peers[number], now_s)
        for number in sorted((self.linked - linked) & self.peers.keys()):
            self._on_lost(self.peers[number], now_s)
        self.linked = linked

    def _observed(self, peer_id: str, present: Collection[str]) -> PeerView:
        if peer_id not in self.numbers:
            if len(self.numbers) >= MOST_PEERS:
                # Some are absent, as a view has fewer members than MOST_PEERS.
                absent = [peer for peer in self.peers.values() if peer.peer_id not in present]
                oldest = min(absent, key=lambda peer: (peer.number in self.linked, peer.heard_t, peer.number))
                del self.peers[oldest.number], self.numbers[oldest.peer_id]
                self.sightings.pop(oldest.number, None)
                for samples in self._samples.values():
                    samples.pop(oldest.number, None)
                self.rounds.forget(oldest.number)
            self.numbers[peer_id] = self._next_number
            self.peers[self._next_number] = PeerView(self._next_number, peer_id)
            self._next_number += 1
        return self.peers[self.numbers[peer_id]]

    def _on_linked(self, peer: PeerView, now_s: float) -> None:
        if peer.state in (PeerState.GONE, PeerState.LEFT):
            peer.state = PeerState.TRAINING if peer.own_steps else PeerState.JOINING
            self.add_notice(now_s, f"{peer.name} is back", Tone.GOOD)

    def _on_lost(self, peer: PeerView, now_s: float) -> None:
        if peer.state is PeerState.FINISHED or self.sightings[peer.number].left:
            peer.state = PeerState.LEFT
            self.add_notice(now_s, f"{peer.name} left the run at step {peer.step:,}")
        else:
            peer.state = PeerState.GONE
            self.add_notice(now_s, f"{peer.name} is gone at step {peer.step:,}: connection lost", Tone.BAD)

    def apply(self, number: int, event: Event) -> None:
        """Process the next event of a peer."""
        peer = self.peers[number]
        state, was_killed, adopted = peer.state, peer.was_killed, peer.adopted
        peer.apply(event)
        if was_killed:  # its last events are still read
            peer.state = state
        match event["event"]:
            case "adopt":
                self._on_adopt(peer, event, again=adopted)
            case "round":
                self._on_round(peer, event)
            case "peers":
                self._on_peers(peer, event)
            case "sample":
                self._on_sample(peer, event)

    def _on_adopt(self, peer: PeerView, event: Event, *, again: bool) -> None:
        if event.get("founded"):
            self.add_notice(event["t"], f"{peer.name} founded the run; the other peers adopt its weights")
        elif again:
            self.add_notice(event["t"], f"{peer.name} adopted the swarm's state again: {event['reason']}")
        elif event["run_step"] > 0 or peer.number == self.late:
            if peer.number == self.late:
                self.joined_at = (peer.number, event["t"])
            where = f"of round {event['round']}" if event["round"] >= 0 else "of the start"
            self.add_notice(
                event["t"],
                f"{peer.name} joined late: adopted the swarm's weights {where}, step {event['run_step']:,}",
                Tone.GOOD,
            )

    def _on_round(self, peer: PeerView, event: Event) -> None:
        number, t = event["round"], event["t"]
        key = (event["lineage"], number)
        known = self.rounds.by_key.get(key)
        is_new, agreed = known is None or not known.applied, known is None or known.agreed
        round_ = self.rounds.note(peer.number, event)
        if event["status"] == "skipped":
            self.add_notice(t, f"{peer.name} skipped round {number}: {event['reason']}", Tone.BAD)
        elif is_new and key in self.rounds.by_key:
            by = "one peer alone" if event["status"] == "solo" else count(len(round_.contributors), "peer")
            took = "" if round_.wall_s is None else f" in {round_.wall_s:.1f} s"
            sent, anchor = size(event["bytes_sent"]), event["anchor_hash"][:8]
            self.add_notice(t, f"round {number} committed by {by}{took} · {sent} sent · anchor {anchor}")
        elif agreed and not round_.agreed:
            self.add_notice(t, f"round {number}: {peer.name} has a different state than other peers", Tone.BAD)

    def _on_peers(self, peer: PeerView, event: Event) -> None:
        if self.killed_at is None:
            return
        number, killed_s = self.killed_at
        if peer.number != number and peer.is_up and self.peers[number].peer_id not in peer.alive:
            witnesses = {other.number for other in self.peers.values() if other.is_up and other.number != self.late}
            complete = witnesses <= self._noticed
            self._noticed.add(peer.number)
            if not complete and witnesses <= self._noticed:
                waited_s = event["t"] - killed_s
                self.add_notice(event["t"], f"all other peers noticed within {waited_s:.2f} s; training goes on")

    def _on_sample(self, peer: PeerView, event: Event) -> None:
        # A peer whose step was corrected by a round may take its sample a few steps after the other peers.
        step = event["step"] // event["every"] * event["every"]
        samples = self._samples.setdefault(step, {})
        samples[peer.number] = (event["t"], np.asarray(event["values"], np.float32))
        alike = [(t, values) for t, values in samples.values() if len(values) == len(event["values"])]
        if len(alike) >= 2:
            mean_t = statistics.fmean(t for t, _ in alike)
            self._correlations[step] = Correlation(step, mean_t, pairwise_correlation([v for _, v in alike]))
        if len(self._samples) > MOST_SAMPLED:
            del self._samples[min(self._samples)]
        if len(self._correlations) > MOST_CORRELATIONS:
            for old in sorted(self._correlations)[: MOST_CORRELATIONS // 2 : 2]:
                del self._correlations[old]

    @property
    def step(self) -> int:
        """The step of the run: the median of the training peers, or the last step reached."""
        up = [peer.step for peer in self.up]
        return statistics.median_low(up) if up else max((peer.step for peer in self.peers.values()), default=0)

    @property
    def up(self) -> list[PeerView]:
        return [peer for peer in self.peers.values() if peer.is_up]

    def correlations(self) -> list[Correlation]:
        """Correlations at all steps at which two or more peers took samples, in order of time."""
        return sorted(self._correlations.values(), key=lambda correlation: correlation.t)

    def bytes_per_step(self, parameters: int, peers_at_once: int) -> BytesPerStep:
        """Over all peers and all their known steps, and for dense training by `peers_at_once` peers."""
        peers = self.peers.values()
        steps = max(1, sum(peer.own_steps for peer in peers))
        return BytesPerStep(
            fragments=sum(peer.fragment_bytes for peer in peers) / steps,
            rounds=sum(peer.round_bytes for peer in peers) / steps,
            dense=8 * parameters * (peers_at_once - 1) / peers_at_once if peers_at_once else 0.0,
        )
