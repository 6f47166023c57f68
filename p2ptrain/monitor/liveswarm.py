"""An observed swarm: numbers its peers, and notes when a peer is lost or comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.monitor.peerview import PeerState, PeerView
from p2ptrain.monitor.swarmview import SwarmView, Tone
from p2ptrain.protocol.event_log.observer import Sighting, View

# Peers to remember, with their curves; beyond that the peer that has been gone for longest is forgotten.
MOST_PEERS = 256


@dataclass
class LiveSwarm:
    """The swarm as an observer has seen it so far.

    Attributes:
        swarm: peers, rounds, correlations and notices; times of notices in seconds since the epoch.
        sightings: last sighting of each peer, by number.
        numbers: numbers of the known peers, by id.
        linked: numbers of the peers that the observer has a link to.
    """

    swarm: SwarmView = field(default_factory=lambda: SwarmView(began_s=0.0, total_steps=0))
    sightings: dict[int, Sighting] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    linked: set[int] = field(default_factory=set)
    _next: int = 1
    _present: frozenset[str] = frozenset()

    def take(self, view: View, now_s: float) -> None:
        """Add the next view; `now_s` in seconds since the epoch."""
        self._present = frozenset(sighting.peer_id for sighting in view.members)
        for batch in view.batches:
            peer = self._peer(batch.peer_id)
            for event in batch.events:
                self.swarm.apply(peer.number, event)
            self.swarm.total_steps = max(self.swarm.total_steps, peer.total_steps)
        linked = set()
        for sighting in view.members:
            number = self._peer(sighting.peer_id).number
            self.sightings[number] = sighting
            if sighting.linked:
                linked.add(number)
        for number in sorted(linked - self.linked):
            self._on_linked(self.swarm.peers[number], now_s)
        for number in sorted((self.linked - linked) & self.swarm.peers.keys()):
            self._on_lost(self.swarm.peers[number], now_s)
        self.linked = linked

    def _peer(self, peer_id: str) -> PeerView:
        if peer_id not in self.numbers:
            if len(self.numbers) >= MOST_PEERS:
                self._forget_one()
            self.numbers[peer_id] = self._next
            self.swarm.started(self._next)
            self.swarm.peers[self._next].peer_id = peer_id
            self._next += 1
        return self.swarm.peers[self.numbers[peer_id]]

    def _forget_one(self) -> None:
        # A view has fewer members than are remembered.
        absent = [peer for peer in self.swarm.peers.values() if peer.peer_id not in self._present]
        oldest = min(absent, key=lambda peer: (peer.number in self.linked, peer.heard_t, peer.number))
        del self.swarm.peers[oldest.number], self.numbers[oldest.peer_id]
        self.sightings.pop(oldest.number, None)

    def _on_linked(self, peer: PeerView, now_s: float) -> None:
        if peer.state in (PeerState.GONE, PeerState.LEFT):
            peer.state = PeerState.TRAINING if peer.own_steps else PeerState.JOINING
            self.swarm.add_notice(now_s, f"{peer.name} is back", Tone.GOOD)

    def _on_lost(self, peer: PeerView, now_s: float) -> None:
        if peer.state is PeerState.FINISHED or self.sightings[peer.number].left:
            peer.state = PeerState.LEFT
            self.swarm.add_notice(now_s, f"{peer.name} left the run at step {peer.step:,}")
        else:
            peer.state = PeerState.GONE
            self.swarm.add_notice(now_s, f"{peer.name} is gone at step {peer.step:,}: connection lost", Tone.BAD)
