"""All peers of the demo together: the rounds that they agreed on, their correlation, and what happened when."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from p2ptrain.algorithms.metrics import pairwise_correlation
from p2ptrain.demo.events import Event
from p2ptrain.demo.peerview import PeerView, Sample
from p2ptrain.demo.words import count, size

PLAIN, GOOD, BAD = "", "green", "bold red"


@dataclass(frozen=True)
class Happening:
    """Something to tell, `at_s` seconds after the demo began; `style` is one of PLAIN, GOOD, BAD."""

    at_s: float
    text: str
    style: str = PLAIN


@dataclass(frozen=True)
class Correlation:
    """Average pairwise correlation of the peers' weights at a step of the run, about `t` seconds after the epoch."""

    step: int
    t: float
    value: float


@dataclass
class RoundView:
    """One round as the peers report it, the first at `t`. `anchors`: the anchor's hash by peer number."""

    lineage: str
    round: int
    status: str
    t: float
    contributors: tuple[str, ...]
    anchors: dict[int, str] = field(default_factory=dict)

    @property
    def agreed(self) -> bool:
        return len(set(self.anchors.values())) <= 1


@dataclass
class SwarmView:
    """What the demo knows and shows.

    Attributes:
        began_s: when the demo began, in seconds since the epoch.
        total_steps: the run's length.
        peers: by number, in the order of their start.
        rounds: committed and solo rounds, by lineage and number.
        happenings: what to tell, oldest first.
        eval_every: steps between two evaluations.
        killed_at: number of the killed peer, and when, in seconds since the epoch.
        joined_at: number of the late peer, and when it had the swarm's weights.
        late: number of the late peer once its process is started.
    """

    began_s: float
    total_steps: int
    eval_every: int
    peers: dict[int, PeerView] = field(default_factory=dict)
    rounds: dict[tuple[str, int], RoundView] = field(default_factory=dict)
    happenings: list[Happening] = field(default_factory=list)
    killed_at: tuple[int, float] | None = None
    joined_at: tuple[int, float] | None = None
    late: int | None = None
    _noticed: set[int] = field(default_factory=set)

    # --- what the demo does ---------------------------------------------------------------------------------------

    def tell(self, now_s: float, text: str, style: str = PLAIN) -> None:
        self.happenings.append(Happening(now_s - self.began_s, text, style))

    def started(self, number: int, *, late: bool = False) -> None:
        self.peers[number] = PeerView(number)
        if late:
            self.late = number

    def killed(self, number: int, now_s: float) -> None:
        """Note that a peer was killed at `now_s`, in seconds since the epoch."""
        self.peers[number].status = "killed"
        self.killed_at = (number, now_s)
        self.tell(now_s, f"peer {number} killed (SIGKILL) at step {self.step:,}: no goodbye", BAD)

    # --- what the peers report ------------------------------------------------------------------------------------

    def apply(self, number: int, event: Event) -> None:
        """Take the next event of a peer."""
        peer = self.peers[number]
        killed = peer.status == "killed"  # its last lines are still read
        peer.apply(event)
        if killed:
            peer.status = "killed"
        match event["event"]:
            case "adopt":
                self._on_adopt(peer, event)
            case "round":
                self._on_round(peer, event)
            case "peers":
                self._on_peers(peer, event)

    def _on_adopt(self, peer: PeerView, event: Event) -> None:
        if event["reason"] == "founded the run":
            self.tell(event["t"], f"{peer.name} founded the run; the others take over its weights")
        elif peer.number == self.late:
            self.joined_at = (peer.number, event["t"])
            where = f"of round {event['round']}" if event["round"] >= 0 else "of the start"
            self.tell(
                event["t"],
                f"{peer.name} joined late: took over the swarm's weights {where} and step {event['run_step']:,}",
                GOOD,
            )

    def _on_round(self, peer: PeerView, event: Event) -> None:
        number = event["round"]
        if event["status"] == "skipped":
            self.tell(event["t"], f"{peer.name} skipped round {number}: {event['reason']}", BAD)
            return
        key = (event["lineage"], number)
        if key not in self.rounds:
            contributors = tuple(event["contributors"])
            self.rounds[key] = RoundView(event["lineage"], number, event["status"], event["t"], contributors)
            by = "by one peer alone" if event["status"] == "solo" else f"by {count(len(contributors), 'peer')}"
            self.tell(
                event["t"],
                f"round {number} committed {by} in {event['wall_s']:.1f} s · {size(event['bytes_sent'])} sent · "
                f"anchor {event['anchor_sha256'][:8]}",
            )
        round_ = self.rounds[key]
        agreed_before = round_.agreed
        round_.anchors[peer.number] = event["anchor_sha256"]
        if agreed_before and not round_.agreed:
            self.tell(event["t"], f"round {number}: {peer.name} holds another anchor than the others", BAD)

    def _on_peers(self, peer: PeerView, event: Event) -> None:
        if self.killed_at is None:
            return
        number, killed_s = self.killed_at
        if peer.number != number and peer.is_up and self.peers[number].peer_id not in peer.alive:
            witnesses = {other.number for other in self.peers.values() if other.is_up and other.number != self.late}
            complete = witnesses <= self._noticed
            self._noticed.add(peer.number)
            if not complete and witnesses <= self._noticed:
                self.tell(event["t"], f"all others noticed within {event['t'] - killed_s:.2f} s; training goes on")

    # --- what follows from it ---------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Where the run stands: the median of those who train, or where the last of them stopped."""
        up = [peer.step for peer in self.up]
        return statistics.median_low(up) if up else max((peer.step for peer in self.peers.values()), default=0)

    @property
    def up(self) -> list[PeerView]:
        return [peer for peer in self.peers.values() if peer.is_up]

    @property
    def rounds_by_size(self) -> Counter[int]:
        """How many rounds had how many contributors."""
        return Counter(len(round_.contributors) for round_ in self.rounds.values())

    def correlations(self) -> list[Correlation]:
        """How alike the peers' weights were, wherever two or more took samples at the same step; in order of time."""
        at_step: dict[int, dict[int, Sample]] = {}
        for peer in self.peers.values():
            for step, sample in peer.samples.items():
                # A peer whose position was corrected by a round may take its sample a few steps after the others.
                at_step.setdefault(step // self.eval_every * self.eval_every, {})[peer.number] = sample
        found = [
            Correlation(
                step,
                statistics.fmean(sample.t for sample in samples.values()),
                pairwise_correlation([sample.values for sample in samples.values()]),
            )
            for step, samples in at_step.items()
            if len(samples) >= 2
        ]
        return sorted(found, key=lambda correlation: correlation.t)
