"""The state of one peer, from the events of its metrics file or from those that it sends to observers."""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from p2ptrain.protocol.event_log.downsampling import coalesce
from p2ptrain.protocol.event_log.events import Event

# More than the columns of a screen.
MOST_POINTS = 2048
# The newest points are not averaged, as users look at them most closely.
FRESH_POINTS = 512
# Window of speeds in seconds: long enough to be readable, short enough to show a change.
RECENT_S = 4.0
# Bound on the steps in that window, as their times come from another peer.
MOST_RECENT = 1024
# Factor of the exponential moving average of the loss, per step.
SMOOTHING = 0.98
# Bound on the reasons that are counted, as they come from other peers; there are ten.
MOST_REASONS = 512


# Time in seconds, value, and of how many neighbours both are the mean.
Point = tuple[float, float, int]


class Curve:
    """A bounded series of points, added in order of time; averages neighbouring old points when full."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return ((t, value) for t, value, _ in self._points)

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self._points[-1][1] if self._points else None

    def add(self, t: float, value: float) -> None:
        self._points.append((t, value, 1))
        if len(self._points) > MOST_POINTS:
            old = self._points[:-FRESH_POINTS]
            self._points[:-FRESH_POINTS] = coalesce(old, MOST_POINTS - 2 * FRESH_POINTS, lambda point: point[2], _mean)


def _mean(a: Point, b: Point) -> Point:
    (t, value, weight), (t2, value2, weight2) = a, b
    total = weight + weight2
    return (t * weight + t2 * weight2) / total, (value * weight + value2 * weight2) / total, total


class PeerState(enum.Enum):
    """The state of a peer; the value is the text for users. The owner of the view sets the last four."""

    STARTING = "starting"
    JOINING = "joining"
    TRAINING = "training"
    LAST_ROUND = "last round"
    FINISHED = "finished"
    KILLED = "killed"
    TOO_LATE = "too late"
    GONE = "gone"
    LEFT = "left"


class _Step(NamedTuple):
    """A step, or `steps` that the event log merged into one event; `seconds`: since the last step or evaluation."""

    t: float
    tokens: int
    exchange_s: float
    steps: int
    seconds: float


@dataclass
class PeerView:
    """The known state of one peer. `apply` takes its events in order; memory is bounded.

    Attributes:
        number: number shown to users; 1 is the first peer.
        status: the peer's own description, such as "round 7: sending 3/4"; only for display, empty if unknown.
        founded: whether it founded the run.
        adopted: whether it has adopted the run's state since its start.
        step: the step of the run that it has reached.
        own_steps: inner steps that it made itself.
        parameters: number of trained weights; 0 unknown.
        loss: smoothed training loss in nats; None before its first step.
        losses, held_out: training and held-out loss over time; seconds since the epoch, nats.
        round: number of rounds that it has resolved.
        sent, merged, skipped: counts of fragments; `skipped` by reason.
        recent_to: fragments by receiver in its last report (about two seconds).
        alive: ids of the other peers that it is linked to.
        pairs: outer steps that it took with a partner.
        spread: how far anchors are from their mean, relative to their size; by its last partner. None if unknown.
        fragment_bytes, round_bytes: bytes that it sent; those to partners are of rounds.
        counted_t: time of its last fragment report.
        began_t, heard_t: times of its first and last known event.
    """

    number: int
    peer_id: str = ""
    state: PeerState = PeerState.STARTING
    status: str = ""
    founded: bool = False
    adopted: bool = False
    step: int = 0
    own_steps: int = 0
    total_steps: int = 0
    parameters: int = 0
    loss: float | None = None
    round: int = 0
    sent: int = 0
    merged: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    recent_to: dict[str, int] = field(default_factory=dict)
    pairs: int = 0
    spread: float | None = None
    fragment_bytes: int = 0
    round_bytes: int = 0
    last_round_t: float = 0.0
    counted_t: float = 0.0
    began_t: float = 0.0
    heard_t: float = 0.0
    alive: frozenset[str] = frozenset()
    losses: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    _recent: deque[_Step] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    _trained_t: float = 0.0

    @property
    def name(self) -> str:
        return f"peer {self.number}"

    @property
    def is_up(self) -> bool:
        """Whether it is training now."""
        return self.state in (PeerState.TRAINING, PeerState.LAST_ROUND)

    @property
    def was_killed(self) -> bool:
        """Whether the owner of the view killed it, or found it too late to take part."""
        return self.state in (PeerState.KILLED, PeerState.TOO_LATE)

    @property
    def doing(self) -> str:
        """What it does, as text: while it trains, its own description."""
        return self.status if self.state is PeerState.TRAINING and self.status else self.state.value

    @property
    def bytes_sent(self) -> int:
        return self.fragment_bytes + self.round_bytes

    @property
    def tokens_per_s(self) -> float:
        """Speed over the last seconds, not counting evaluations; 0 if unknown."""
        if not self.is_up or len(self._recent) < 2:
            return 0.0
        recent = list(self._recent)[1:]
        return sum(step.tokens for step in recent) / max(sum(step.seconds for step in recent), 1e-3)

    @property
    def exchange_ms(self) -> float:
        """Mean time per step that the exchange blocked training, over the last seconds."""
        steps = sum(step.steps for step in self._recent)
        return 1e3 * sum(step.exchange_s * step.steps for step in self._recent) / max(1, steps)

    @property
    def held_out_loss(self) -> float | None:
        return self.held_out.last

    def apply(self, event: Event) -> None:
        """Process the next event of this peer; ignore unknown events."""
        self.began_t = self.began_t or event["t"]
        self.heard_t = event["t"]
        match event["event"]:
            case "start":
                self.peer_id, self.total_steps = event["peer_id"], event["run"]["total_steps"]
                self.parameters = event.get("parameters", 0)
                self.state, self.adopted = PeerState.JOINING, False
            case "adopt":
                self.step, self.round = event["run_step"], event["round"] + 1
                self.founded = self.founded or event.get("founded", False)
                self.adopted = True
            case "step":
                self._apply_step(event)
            case "fragments":
                self.counted_t = event["t"]
                self.sent += event["sent"]
                self.merged += event["merged"]
                for reason, number in event["skipped"].items():
                    if reason in self.skipped or len(self.skipped) < MOST_REASONS:
                        self.skipped[reason] += number
                self.recent_to = event.get("to", {})
                self.fragment_bytes += event["bytes_sent"]
            case "round":
                self.round = max(self.round, event["round"] + 1)
                self.round_bytes += event["bytes_sent"] + event.get("earlier_bytes_sent", 0)
                self.last_round_t = event["t"]
            case "pair":
                self.pairs += event["status"] == "paired"
                self.spread = self.spread if event["spread"] is None else event["spread"]
                self.round_bytes += event["bytes_sent"]
            case "eval":
                self._trained_t = event["t"]  # the time before it was not training
                if event["loss"] is not None:
                    self.held_out.add(event["t"], event["loss"])
            case "peers":
                self.alive = frozenset(event["alive"])
            case "status":
                self.status = event["status"]
            case "stop":
                self.state = PeerState.FINISHED

    def _apply_step(self, event: Event) -> None:
        steps = event.get("steps", 1)  # more than one if the event log merged steps
        self.step = event["step"]
        self.own_steps += steps
        self.state = PeerState.LAST_ROUND if self.step >= self.total_steps > 0 else PeerState.TRAINING
        if event["loss"] is not None and math.isfinite(event["loss"]):
            smoothing = SMOOTHING**steps if self.loss is not None else 0.0
            self.loss = smoothing * (self.loss or 0.0) + (1 - smoothing) * event["loss"]
            self.losses.add(event["t"], event["loss"])
        seconds, self._trained_t = event["t"] - self._trained_t, event["t"]
        self._recent.append(_Step(event["t"], event["tokens"], event["exchange_s"], steps, seconds))
        # Keep at least two: a step of a large model may take longer than the window.
        while len(self._recent) > 2 and self._recent[0].t < event["t"] - (RECENT_S if steps == 1 else 2 * RECENT_S):
            self._recent.popleft()
