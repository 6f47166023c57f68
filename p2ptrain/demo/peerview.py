"""One peer of the demo, as its metrics file shows it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from p2ptrain.demo.events import Event

# Speeds are of this many seconds: long enough to read, short enough to see the kill.
RECENT_S = 4.0
# The shown loss forgets after about this many steps.
SMOOTHING = 0.98


@dataclass(frozen=True)
class Sample:
    """Some of a peer's weights, the same ones of every peer, at `t` (seconds since the epoch)."""

    t: float
    values: list[float]


@dataclass
class PeerView:
    """What is known of one peer. `apply` takes its events in order.

    Attributes:
        number: 1 for the first; what people see.
        status: "starting", "joining", "training", "last round", "finished"; or "killed" or "too late", which the
            demo sets.
        founded: whether the run began with it.
        step: the run's step that it has reached.
        own_steps: inner steps that it made itself.
        loss: its smoothed training loss in nats, or None before its first step.
        losses, held_out: (time, loss) of each of its steps, and on held-out text; seconds since the epoch, nats.
        samples: of its weights, by the step at which they were taken.
        round: rounds that it has resolved.
        alive: ids of the other peers that it sees.
        fragment_bytes, round_bytes: what it sent.
    """

    number: int
    peer_id: str = ""
    status: str = "starting"
    founded: bool = False
    step: int = 0
    own_steps: int = 0
    total_steps: int = 0
    loss: float | None = None
    round: int = 0
    sent: int = 0
    merged: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    fragment_bytes: int = 0
    round_bytes: int = 0
    last_round_t: float = 0.0
    alive: frozenset[str] = frozenset()
    maddrs: tuple[str, ...] = ()
    losses: list[tuple[float, float]] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    _recent: deque[tuple[float, int, float]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return f"peer {self.number}"

    @property
    def is_up(self) -> bool:
        """Whether it takes part now."""
        return self.status in ("training", "last round")

    @property
    def bytes_sent(self) -> int:
        return self.fragment_bytes + self.round_bytes

    @property
    def tokens_per_s(self) -> float:
        if not self.is_up or len(self._recent) < 2:
            return 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        return sum(tokens for _, tokens, _ in list(self._recent)[1:]) / max(seconds, 1e-3)

    @property
    def exchange_ms(self) -> float:
        """Mean time that an exchange held its training, of late."""
        return 1e3 * sum(exchange_s for *_, exchange_s in self._recent) / max(1, len(self._recent))

    @property
    def held_out_loss(self) -> float | None:
        """The newest, in nats."""
        return self.held_out[-1][1] if self.held_out else None

    def apply(self, event: Event) -> None:
        """Take the next event of this peer. Unknown ones are for others."""
        match event["event"]:
            case "start":
                self.peer_id, self.maddrs = event["peer_id"], tuple(event["maddrs"])
                self.total_steps = event["run"]["total_steps"]
                self.status = "joining"
            case "adopt":
                self.step, self.round = event["run_step"], event["round"] + 1
                self.founded = self.founded or event["reason"] == "founded the run"
            case "step":
                self._apply_step(event)
            case "fragments":
                self.sent += event["sent"]
                self.merged += event["merged"]
                self.skipped.update(event["skipped"])
                self.fragment_bytes += event["bytes_sent"]
            case "round":
                self.round = max(self.round, event["round"] + 1)
                self.round_bytes += event["bytes_sent"]
                self.last_round_t = event["t"]
            case "eval":
                if event["loss"] is not None:
                    self.held_out.append((event["t"], event["loss"]))
            case "sample":
                self.samples[event["step"]] = Sample(event["t"], event["values"])
            case "peers":
                self.alive = frozenset(event["alive"])
            case "stop":
                self.status = "finished"

    def _apply_step(self, event: Event) -> None:
        self.step = event["step"]
        self.own_steps += 1
        self.status = "last round" if self.step >= self.total_steps > 0 else "training"
        if event["loss"] is not None:
            smoothing = SMOOTHING if self.loss is not None else 0.0
            self.loss = smoothing * (self.loss or 0.0) + (1 - smoothing) * event["loss"]
            self.losses.append((event["t"], event["loss"]))
        self._recent.append((event["t"], event["tokens"], event["exchange_s"]))
        while self._recent[0][0] < event["t"] - RECENT_S:
            self._recent.popleft()
