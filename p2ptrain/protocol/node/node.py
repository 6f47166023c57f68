"""One peer of a run: links, membership, gossip, rounds and state transfer, composed in one nursery.

It runs on a peer's network thread over libp2p, or with other nodes in one process over the memory network.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import assert_never

import trio

from p2ptrain.errors import WireError
from p2ptrain.protocol.exchange.exchange import Exchange
from p2ptrain.protocol.exchange.types import (
    ExchangeEvent,
    LandingDone,
    OutlierFound,
    Push,
    PushBegun,
    RoundDue,
    RoundReport,
    SnapshotTaken,
)
from p2ptrain.protocol.gossip import Gossip, record_fragments
from p2ptrain.protocol.links.handshake import TRAINER, Admission
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import LINKS_BEATEN, Links
from p2ptrain.protocol.membership.directory import directory_of
from p2ptrain.protocol.membership.membership import Membership, RoundPeers
from p2ptrain.protocol.membership.status import PeerStatus, describe
from p2ptrain.protocol.node.config import LocalPolicy, NetworkAccess, NodeStart, RunSpec, Telemetry
from p2ptrain.protocol.node.requests import PROGRESS_S, RequestServer
from p2ptrain.protocol.pairwise.pairwise import Pairwise
from p2ptrain.protocol.push_pace import PushPace
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.proof import Prover
from p2ptrain.protocol.rounds.deciding.timeouts import IntervalWatch
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.state_sync.joining import Joining
from p2ptrain.protocol.state_sync.state_sync import StateSync
from p2ptrain.protocol.state_sync.transfer import ModelBuffers
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.transport import Compute, PeerId

logger = logging.getLogger(__name__)
# Has a name of its own, so that simulations can turn it off: there, all peers would warn.
interval_logger = logging.getLogger(IntervalWatch.__module__)

# How many members one Beat names. With many links, many Beats are sent, and one name in each is enough.
BEAT_MEMBERS, MANY_LINKS_MEMBERS = 2, 1
# How long a peer that has landed the run's last round stays for linked peers that have not, and after the last time
# that one of them needed it (guess). Peers that the leader did not call learn of the round from a neighbour, and fetch
# its parts there.
STAY_S, STAY_POLL_S = 10.0, 0.05


class Node:
    """A training peer. `run_forever` joins or founds the run, then serves it until cancelled.

    Args:
        run: the run's settings, tokenizer and key.
        network: streams, the directory of peers, bulk connections.
        policy: peers to trust and refuse, time-outs, CPU limits.
        start: this node's name, its source of randomness, and the state that it starts from.
        exchange: connects the node to the model.
        buffers: reads and loads the model's buffers, which joiners download.
        telemetry: where the node writes events and errors.
        compute: runs work in worker threads.
    """

    def __init__(
        self,
        run: RunSpec,
        network: NetworkAccess,
        policy: LocalPolicy,
        start: NodeStart,
        *,
        exchange: Exchange,
        buffers: ModelBuffers,
        telemetry: Telemetry,
        compute: Compute,
    ) -> None:
        config, transport, rng = run.config, network.transport, start.rng
        self.run = config
        self.peer_id: PeerId = transport.peer_id
        self.incarnation = start.incarnation
        self.ready = trio.Event()
        self.alive: tuple[PeerId, ...] = ()
        self.met_others = False
        self._transport = transport
        self._exchange = exchange
        self._events = telemetry.write
        self._digest = config.digest
        self.state = exchange.new_state(lands=True)
        self.links = Links(
            transport,
            self._hello,
            self,
            admission=Admission(policy.chosen, run.closed, policy.refusal),
            peer_timeout_s=policy.peer_timeout_s,
            errors=telemetry.errors,
            bulk=network.bulk,
        )
        self._bulk = network.bulk
        directory = directory_of(network.directory, run.closed, self.peer_id)
        prover = Prover(transport, self.incarnation, self._digest)
        context = RoundContext(
            self.peer_id,
            self.incarnation,
            config,
            prover,
            self.links,
            self.state,
            exchange,
            compute,
            telemetry.errors,
            host=self,
            swarm_size=lambda: self.membership.size.estimate if self.membership.is_large else 0.0,
        )
        driver = self.driver = RoundDriver(context, rng)
        self._interval = IntervalWatch(config)
        rounds = RoundPeers(
            driver.is_candidate,
            driver.may_be_candidate,
            in_round=lambda: driver.round_state.member is not None or driver.committer.resolving,
        )
        self.membership = Membership(
            self.links,
            directory,
            config.run_id,
            self.peer_id,
            lambda: transport.maddrs,
            rng,
            rounds,
            policy.remembered,
        )
        joining = Joining(
            driver,
            self.membership,
            record=telemetry.write,
            buffers=buffers,
            may_found=start.may_found,
            restored=start.restored,
            rng=rng,
            pins=policy.pins,
        )
        self.state_sync = StateSync(
            driver, joining, record=telemetry.write, may_found=start.may_found, rng=rng, pins=policy.pins
        )
        self._pace = PushPace(policy.gossip_budget)
        self._gossip: Gossip | None = None
        if config.fragment_fraction > 0:
            self._gossip = Gossip(context, rng, lambda peer_id: context.recent.admits(peer_id), self._pace)
        self.pairwise = Pairwise(driver, rng, telemetry.write, self.membership) if config.is_pairwise else None
        self._server = RequestServer(driver, self.pairwise, buffers.read, telemetry.event_log, run.tokenizer)
        self._leaving = False
        self._nursery: trio.Nursery | None = None

    async def run_forever(self) -> None:
        """Join or found the run, set `ready`, and take part until cancelled.

        Raises ConfigError if the run's state cannot be obtained; `ready` is not set then.
        """
        self._exchange.attach(self)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await nursery.start(self.links.run)
                nursery.start_soon(self.membership.run_forever)
                await self.state_sync.joining.establish()
                self.membership.settle()
                await nursery.start(self.driver.run_forever)
                if self.pairwise is not None:
                    await self.pairwise.begin()
                    nursery.start_soon(self.pairwise.run_forever)
                if self._gossip is not None:
                    nursery.start_soon(self._gossip.run_forever)
                nursery.start_soon(record_fragments, self.driver.context, self._pace, self._events)
                nursery.start_soon(self.state_sync.keep_up)
                self.ready.set()
        finally:
            self._exchange.detach()

    def receive(self, event: ExchangeEvent) -> None:
        """Pass on an event of the training thread."""
        match event:
            case RoundDue():
                self.driver.changed()
            case SnapshotTaken(wanted, snapshot) if wanted.for_pair:
                assert self.pairwise is not None
                self.pairwise.take_snapshot(snapshot)
            case SnapshotTaken(_, snapshot):
                self.driver.take_snapshot(snapshot)
            case LandingDone(landing, held_s):
                try:
                    self.driver.committer.landed(landing, held_s)
                except Exception as error:
                    self._fail(error)
                    raise
            case PushBegun() | Push() | OutlierFound():
                assert self._gossip is not None
                self._gossip.receive(event)
            case _:
                assert_never(event)

    def _fail(self, error: Exception) -> None:
        """End this node with an exception."""

        async def fail() -> None:
            raise error

        assert self._nursery is not None
        self._nursery.start_soon(fail)

    def leave(self, reason: str) -> None:
        """Tell all peers that we leave. They close the links."""
        self._leaving = True
        self.membership.stop()
        self.driver.leave()
        for link in self.links.live.values():
            link.send(messages.Leave(reason))

    @property
    def status(self) -> str:
        """What this peer is doing now, as text."""
        if not self.ready.is_set():
            return self.state_sync.joining.status
        return (self.pairwise.status if self.pairwise is not None else "") or self.driver.status

    @property
    def others(self) -> list[PeerStatus]:
        """The other live peers of the run, by their last heartbeats. For any thread."""
        return describe(self.links.trainers())

    @property
    def alive_maddrs(self) -> list[str]:
        """The addresses of the other live peers. For any thread."""
        return [maddr for link in self.links.trainers() for maddr in link.hello.maddrs]

    def lineage_peers(self) -> Sequence[PeerId]:
        """Live peers of our lineage that hold its state."""
        lineage = self.driver.head.lineage
        return [link.peer_id for link in self.links.trainers() if link.beat and link.beat.lineage == lineage != ""]

    @property
    def longest_stay_s(self) -> float:
        """The most seconds that `stay` takes: the present timeout of an attempt, from 60 s to `round_timeout_s`."""
        return max(STAY_S, self.driver.context.timeouts.attempt_s())

    async def stay(self) -> None:
        """After the run's last round, wait for linked peers that have not: until 10 s after their last use."""
        context, needed_s = self.driver.context, trio.current_time()
        # Anybody may say that it is behind, and where members are drawn not all have contributed.
        are_drawn = len(self.lineage_peers()) >= self.run.max_contributors or self.membership.is_large
        with trio.move_on_after(self.longest_stay_s):
            while behind := context.liveness.behind(self.driver.head.round):
                if any(link.is_in_use and (are_drawn or context.recent.admits(link.peer_id)) for link in behind):
                    needed_s = trio.current_time()
                if trio.current_time() >= needed_s + STAY_S:
                    return
                await trio.sleep(STAY_POLL_S)

    def joiners(self) -> Mapping[PeerId, int]:
        """Live peers that download our state or are about to, and how many rounds in a row came before each had it."""
        head, now = self.driver.head, trio.current_time()

        def is_joining(link: Link) -> bool:
            """Whether it is new, behind us or in another lineage, and asked for our state lately or may soon."""
            beat = link.beat
            if beat is None or (beat.lineage == head.lineage and beat.round >= head.round):
                return False
            return now < link.joining_until_s or (not beat.lineage and now < link.opened_s + PROGRESS_S)

        return {link.peer_id: link.times_overtaken for link in self.links.trainers() if is_joining(link)}

    def round_ended(self, report: RoundReport) -> None:
        if self._exchange.finished:
            self.links.announce()  # to peers that stay for us, or are behind us
        fields = dataclasses.asdict(report)
        fields["contributors"] = list(report.contributors)
        self._events("round", group_size=len(report.contributors), **fields)
        who = f", contributors: {len(report.contributors)}" if report.contributors else ""
        why = f": {report.reason}" if report.reason else ""
        logger.info("round %d %s%s%s", report.round, report.status, who, why)
        if report.status == "committed" and not report.late and not self._exchange.finished:
            exchange = self._exchange
            interval_s = exchange.sync_every * exchange.step_s
            if told := self._interval.note(report.wall_s, interval_s, trio.current_time()):
                interval_logger.warning("%s", told)

    def fall_behind(self, reason: str) -> None:
        """Replace the whole state by the swarm's."""
        self.state_sync.fall_behind(reason)

    def _hello(self) -> messages.Hello:
        maddrs = tuple(self._transport.maddrs)[: messages.MAX_MADDRS]
        offer = b"" if self._bulk is None else self._bulk.offer
        return messages.Hello(self.run.run_id, self._digest, self.incarnation, TRAINER, maddrs, offer)

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> messages.Beat:
        head = self.driver.head
        genesis = head.genesis or self.state_sync.joining.genesis
        named = BEAT_MEMBERS if len(self.links.live) <= LINKS_BEATEN else MANY_LINKS_MEMBERS
        return messages.Beat(
            sent_s,
            echo_s,
            held_s,
            genesis,
            head.lineage,
            head.round,
            head.tokens_total,
            self._exchange.run_step,
            self.status[: messages.MAX_STATUS],
            self._exchange.speed,
            self.membership.sample(named),
            self.driver.context.liveness.reach(head, self.driver.context.recent.peer_ids),
        )

    def on_link(self, link: Link) -> None:
        link.make_beat(self.make_beat)
        if link.hello.role == TRAINER:
            logger.info("met %s", link.peer_id)
            self.met_others = True
            self.driver.introduce(link)
            self.driver.context.liveness.note_linked(link.peer_id)
            self.membership.welcome(link.peer_id, link.hello.maddrs, TRAINER)
            self._record_peers()

    def on_lost(self, link: Link) -> None:
        if link.hello.role != TRAINER:
            return
        if link.left:
            self.driver.context.liveness.note_departed(link.peer_id)
        if not self._leaving:
            logger.info("lost %s: %s", link.peer_id, link.lost_reason)
        self.driver.note_lost(link.peer_id)
        if self.pairwise is not None:
            self.pairwise.note_lost(link.peer_id)
        self._record_peers()

    async def on_message(self, link: Link, message: messages.Message, payload: bytes) -> None:
        match message:
            case messages.Request():
                assert self._nursery is not None
                self._server.take(self._nursery, link, message)
            case messages.Leave():
                self.driver.context.liveness.note_departed(link.peer_id)
                self.membership.forget(link.peer_id)
            case messages.Hello() | messages.Challenge() | messages.Proof():
                raise WireError("a second handshake")
            case _ if link.hello.role != TRAINER or not link.hello.digest:
                if payload:  # observers only send requests
                    raise WireError(f"{type(message).__name__} of an observer")
            case messages.Beat():
                head = self.driver.head
                if message.lineage == head.lineage and message.round >= head.round:
                    link.joining_until_s, link.times_overtaken = -math.inf, 0  # it has our state
                for peer_id, maddrs in message.members:
                    self.membership.hint(peer_id, maddrs, teller=link.peer_id)
                if self.ready.is_set():
                    self.state_sync.on_beat(link, message)
            case messages.Fragment():
                if self._gossip is None:
                    raise WireError("a fragment in a run without gossip")
                if self.ready.is_set():
                    await self._gossip.on_fragment(link, message, payload)
            case messages.Contribution() | messages.Mean():
                if self.ready.is_set():
                    self.driver.deliver(link.peer_id, message, payload)
            case messages.PairOffer() | messages.PairAnswer() | messages.PairWeights():
                if self.pairwise is None:
                    raise WireError(f"{type(message).__name__} in a run without pairwise steps")
                if self.ready.is_set():
                    self.pairwise.deliver(link, message, payload)
            case messages.Ack() | messages.Answer():
                pass  # the link has taken what it says
            case (
                messages.Due()
                | messages.Call()
                | messages.Join()
                | messages.Refuse()
                | messages.Roster()
                | messages.Arrived()
                | messages.Reduce()
                | messages.Reduced()
                | messages.Propose()
                | messages.Ready()
                | messages.Commit()
                | messages.Abort()
                | messages.Withdraw()
                | messages.Landed()
                | messages.Accuse()
            ):
                if self.ready.is_set():
                    self.driver.deliver(link.peer_id, message)
            case _:
                assert_never(message)

    def _record_peers(self) -> None:
        self.alive = tuple(sorted(link.peer_id for link in self.links.trainers()))
        self._events("peers", alive=list(self.alive))
