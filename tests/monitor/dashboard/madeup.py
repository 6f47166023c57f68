"""A made-up swarm of any size and age, in the form that an observer gets from a real one."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.event_log.events import parse_page
from p2ptrain.protocol.event_log.observer import Batch, Sighting, View
from p2ptrain.training.trainer import SAMPLED_WEIGHTS

PARAMETERS = 850_000
TOTAL_STEPS = 20_000
DAY_S = 86_400


@dataclass
class MadeUpPeer:
    """One peer: its event log and state."""

    peer_id: str
    event_log: EventLog
    rng: random.Random
    step: int = 0
    read: int = 0
    linked: bool = True
    left: bool = False
    status: str = "training"
    trouble: str = ""


@dataclass
class MadeUpSwarm:
    """Stands in for a `Watch`. Time passes in `live`, where the peers step in turn.

    Args:
        clock: seconds since the epoch.
        relayed: what each peer says of its links, as `Sighting.relayed`.
    """

    clock: Callable[[], float] = time.time
    peers: dict[str, MadeUpPeer] = field(default_factory=dict)
    now_s: float = 0.0
    round: int = 0
    relayed: dict[str, dict[str, str]] = field(default_factory=dict)

    def start(self, *peer_ids: str, at_s: float) -> None:
        """Start peers; the first one founds the run."""
        self.now_s = at_s
        for peer_id in peer_ids:
            founds = not self.peers
            step = max((peer.step for peer in self.peers.values()), default=0)
            peer = MadeUpPeer(peer_id, EventLog(lambda: self.now_s), random.Random(peer_id), step)
            self.peers[peer_id] = peer
            peer.event_log.write(
                "start", peer_id=peer_id, run_id="demo", run_digest="d", maddrs=[f"/ip4/10.0.0.7/tcp/1/p2p/{peer_id}"],
                incarnation="1", parameters=PARAMETERS, run={"total_steps": TOTAL_STEPS},
            )  # fmt: skip
            peer.event_log.write(
                "adopt", founded=founds, lineage="0-x",
                reason="founded the run" if founds else "adopted the swarm's state",
                round=self.round - 1, run_step=step, anchor_hash="a" * 64, state_hash="s" * 64,
            )  # fmt: skip

    def live(self, seconds: int, *, sync_every: int = 30, step_s: int = 1) -> None:
        """Let time pass."""
        for _ in range(0, seconds, step_s):
            self.now_s += step_s
            here = [peer for peer in self.peers.values() if peer.linked]
            for peer in here:
                self._step(peer, step_s)
                if peer.step % 2 == 0:
                    self._count(peer, [other.peer_id for other in here if other is not peer])
                if peer.step % 20 == 0:
                    self._measure(peer)
            if here and here[0].step % sync_every == 0 and len(here) > 1:
                self._take_round(here)

    def kill(self, peer_id: str) -> None:
        """Cut the link to a peer without a message from it."""
        self.peers[peer_id].linked = False

    def take(self) -> View:
        """The events since the last call."""
        batches = []
        for peer in self.peers.values():
            more = True
            while more:
                page = parse_page(peer.event_log.page(peer.read), now_s=self.now_s)
                peer.read, more = page.last, page.more
                batches.append(Batch(peer.peer_id, "1", page.events))
        members = (
            Sighting(
                peer.peer_id, peer.linked, peer.status if peer.linked else "cannot be reached from here", peer.left,
                peer.step, self.round - 1, "0-x", 0.0123, peer.trouble, self.relayed.get(peer.peer_id, {}),
            )
            for peer in self.peers.values()
        )  # fmt: skip
        return View(tuple(members), tuple(batches))

    def _step(self, peer: MadeUpPeer, step_s: float) -> None:
        peer.step += 1
        loss = 1.4 + 3.1 * math.exp(-peer.step / 900) + peer.rng.gauss(0, 0.05) + 0.05 * peer.rng.random()
        peer.event_log.write(
            "step", step=peer.step, loss=loss, tokens=4096, step_s=step_s, exchange_s=peer.rng.uniform(1e-3, 3e-3)
        )

    def _count(self, peer: MadeUpPeer, others: list[str]) -> None:
        to = {other: peer.rng.randrange(1, 8) for other in peer.rng.sample(others, min(4, len(others)))}
        sent = sum(to.values())
        skipped = {"epoch": 1, "superseded": 2} if peer.rng.random() < 0.2 else {}
        peer.event_log.write(
            "fragments", step=peer.step, sent=sent, to=to, merged=max(0, sent - 1), skipped=skipped,
            bytes_sent=sent * 4400, bytes_received=sent * 4400, staleness=0.004,
        )  # fmt: skip

    def _measure(self, peer: MadeUpPeer) -> None:
        peer.event_log.write(
            "eval", step=peer.step, loss=1.5 + 3.0 * math.exp(-peer.step / 900) + peer.rng.gauss(0, 0.01)
        )
        shared, own = (np.random.default_rng([peer.step, *more]) for more in ([], peer.peer_id.encode()))
        values = shared.normal(size=SAMPLED_WEIGHTS) + 0.03 * own.normal(size=SAMPLED_WEIGHTS)
        peer.event_log.write("sample", step=peer.step, every=20, values=values.round(6).tolist())

    def _take_round(self, here: list[MadeUpPeer]) -> None:
        """Run a round. In every fifth one a peer is late; in every eleventh one a peer skips it."""
        late, skips = len(here) > 2 and self.round % 5 == 4, len(here) > 2 and self.round % 11 == 10
        out = [here[self.round % len(here)]] if late or skips else []
        contributors = [peer.peer_id for peer in here if peer not in out]
        for peer in here:
            skipped = skips and peer in out
            peer.event_log.write(
                "round", lineage="0-x", round=self.round, status="skipped" if skipped else "committed",
                late=peer in out, group_size=len(contributors), contributors=[] if skipped else contributors,
                parent_hash="p" * 64, anchor_hash=f"{self.round:064x}", state_hash=f"{self.round:064x}",
                bytes_sent=900_000, bytes_received=900_000, wall_s=0.42, stall_s=0.001, tokens_discarded=0,
                cosine=0.2, mean_norm=1.0, reason="no quorum answered" if skipped else "",
            )  # fmt: skip
        self.round += 1


def of_a_day(count: int, now_s: float) -> MadeUpSwarm:
    """A swarm of 24 hours with a round per minute.

    Steps take 60 s except in the last ten minutes: event logs merge older steps anyway.
    """
    swarm = MadeUpSwarm()
    swarm.start(*ids(count), at_s=now_s - DAY_S)
    swarm.live(DAY_S - 600, sync_every=1, step_s=60)
    swarm.live(600, sync_every=60)
    return swarm


def ids(count: int) -> list[str]:
    """Peer ids in the format of libp2p."""
    rng = random.Random(7)
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    return ["Qm" + "".join(rng.choices(alphabet, k=44)) for _ in range(count)]
