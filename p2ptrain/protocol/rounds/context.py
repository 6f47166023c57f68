"""The objects of a peer that all parts of its rounds use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from p2ptrain.algorithms.codec import Codec
from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import RoundReport
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.deciding.averaging import Averaging, averaging_of, is_audited
from p2ptrain.protocol.rounds.deciding.events import Event
from p2ptrain.protocol.rounds.deciding.grid import Grid, Grids, gradient_codec, mean_codec
from p2ptrain.protocol.rounds.deciding.guard import MeanGuard
from p2ptrain.protocol.rounds.deciding.policy import RecentContributors
from p2ptrain.protocol.rounds.deciding.proof import Prover
from p2ptrain.protocol.rounds.deciding.timeouts import PeerBackoff, Timeouts
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.rounds.moving.part_store import PartStore
from p2ptrain.protocol.rounds.moving.pushed_means import PushedMeans
from p2ptrain.protocol.wire.messages import Head, Message
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig

# Bytes that we reduced in attempts that ended without an outcome are kept up to so many encoded models.
SPARE_MODELS = 2


class RoundEvents(Protocol):
    """What the parts of a round tell the driver."""

    def deliver(self, sender: PeerId, message: Message) -> None:
        """Take a message that we send to ourselves."""
        ...

    def changed(self) -> None:
        """There may be something new to do, or to wait for."""
        ...

    def advance(self, head: Head) -> None:
        """A committed round has made this state: go on from it, before anything else can be decided."""
        ...

    def resolved(self) -> None:
        """A round has landed or failed, or the whole state was replaced."""
        ...


class AttemptEvents(Protocol):
    """How the tasks of an attempt report to `Attempts`."""

    def tell(self, peer_id: PeerId, message: Message) -> None:
        """Send a control message, also to ourselves; dropped if the peer is not linked."""
        ...

    def apply(self, event: Event) -> None:
        """Pass an event of our own to the consensus; nothing is raised."""
        ...

    def refused_for_s(self, sha256: str) -> float:
        """For how long this record of the present round has been refused here; from now on, if it was not before."""
        ...


class RoundHost(Protocol):
    """The parts of a node that its rounds call."""

    def lineage_peers(self) -> Sequence[PeerId]:
        """Live peers of our lineage that hold its state."""
        ...

    def joiners(self) -> Mapping[PeerId, int]:
        """Live peers that are downloading our state, or are about to, and how many rounds in a row came before it."""
        ...

    def round_ended(self, report: RoundReport) -> None: ...

    def fall_behind(self, reason: str) -> None:
        """This peer cannot follow by records any more: replace the whole state."""
        ...


@dataclass(slots=True, eq=False)
class RoundContext:
    """The objects that gossip, rounds, pairs and state sync of one peer share.

    Attributes:
        state: anchor and moments; changed when a decided round is applied, or when the whole state is replaced.
        errors: logs exceptions of our own code that cost no more than an attempt.
        codec: of outer gradients.
        grid: of the next round; set with each head.
        swarm_size: about how many peers the run has; 0 while we link to all of them.
        recent: the contributors of the last rounds, whose fragments are merged; set with each head.
        audited: whether members commit to their chunks, and reducers are audited.
        nursery: of the driver, while it runs.
        avoided: reducers that were silent, or whose means are refused; they reduce only if no other can.
    """

    peer_id: PeerId
    incarnation: str
    run: RunConfig
    prover: Prover
    links: Links
    state: AnchorState
    exchange: Exchange
    compute: Compute
    errors: ErrorLog
    host: RoundHost
    swarm_size: Callable[[], float] = lambda: 0.0
    recent: RecentContributors = field(init=False, default_factory=RecentContributors)
    nursery: trio.Nursery | None = field(init=False, default=None)
    liveness: Liveness = field(init=False)
    averaging: Averaging = field(init=False)
    codec: Codec = field(init=False)
    grids: Grids = field(init=False)
    grid: Grid = field(init=False)
    pushed: PushedMeans = field(init=False)
    parts: PartStore = field(init=False)
    timeouts: Timeouts = field(init=False)
    audited: bool = field(init=False)
    mean_guard: MeanGuard = field(init=False)
    avoided: PeerBackoff = field(init=False, default_factory=PeerBackoff)

    def __post_init__(self) -> None:
        run, links = self.run, self.links
        self.liveness = Liveness((self.peer_id, self.incarnation), links, self.host.lineage_peers)
        self.averaging = averaging_of(run)
        self.codec = gradient_codec(run)
        self.grids = Grids.of(self.state.num_blocks, self.exchange.sections, self.codec)
        self.grid = self.grids.whole
        self.audited = is_audited(run, self.averaging)
        sections = max(1, len(self.exchange.sections))
        self.mean_guard = MeanGuard(run.sync_every * sections, self.exchange.steps)
        of_mean = mean_codec(run)
        model_bytes = max(codec.size_bytes(self.state.num_blocks) for codec in (self.codec, of_mean))
        self.pushed = PushedMeans(links, self.averaging, of_mean.size_bytes)
        self.parts = PartStore(links, self.compute, self.averaging, self.pushed, SPARE_MODELS * model_bytes)
        self.timeouts = Timeouts(peer_timeout_s=links.peer_timeout_s, round_timeout_s=run.round_timeout_s)

    def set_grid(self, head: Head) -> None:
        """The next round is the one after this head."""
        self.grid = self.grids.of_round(self.run, head)
        self.timeouts.expect(self.grid.num_blocks / self.grids.whole.num_blocks)

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a task in the driver's nursery. Does nothing once that has ended: links may still deliver messages."""
        if self.nursery is not None:
            self.nursery.start_soon(task, *args)
