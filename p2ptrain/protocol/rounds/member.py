"""One attempt at a round, as one member takes part in it: join, send, reduce, fetch, ready.

A participation begins with a leader's Call and ends with the Commit, or when anything goes wrong: then the member
withdraws, and the next attempt starts from the same snapshot and sends the same bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import Protocol

import trio

from p2ptrain.algorithms.codec import Codec
from p2ptrain.errors import RoundFailedError, WireError
from p2ptrain.protocol.exchange import Exchange
from p2ptrain.protocol.links.link import Traffic
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.parts import PartStore
from p2ptrain.protocol.rounds.ballot import Ballot, record_sha256
from p2ptrain.protocol.rounds.codecs import mean_codec
from p2ptrain.protocol.rounds.contribution import CHUNKS_PER_VISIT, OwnContribution, check_parts, chunk_bounds
from p2ptrain.protocol.rounds.pace import Pace
from p2ptrain.protocol.rounds.reduction import Reduction
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.protocol.wire.messages import (
    Abort,
    Arrived,
    Call,
    Contribution,
    Head,
    Join,
    Message,
    Propose,
    Ready,
    Record,
    Reduce,
    Reduced,
    Roster,
    RosterPart,
)
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig

logger = logging.getLogger(__name__)

# A living leader's last word on an attempt comes this long after the attempt's time is out, at the latest (guess).
LAST_WORD_S = 30.0
# Chunks that may arrive before the roster does: one of each member for each chunk of the model.
MAX_EARLY_SENDERS = 64


class MemberHost(Protocol):
    """What a participation needs of the engine."""

    head: Head
    ballot: Ballot
    parts: PartStore
    phase: str

    @property
    def peer_id(self) -> PeerId: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def run(self) -> RunConfig: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def state(self) -> AnchorState: ...
    @property
    def exchange(self) -> Exchange: ...
    @property
    def links(self) -> Links: ...
    @property
    def compute(self) -> Compute: ...
    @property
    def pace(self) -> Pace: ...

    def tell(self, peer_id: PeerId, message: Message) -> None: ...

    async def snapshot(self, window_s: float) -> OwnContribution | None: ...

    async def fetch(self, record: Record) -> None: ...


class Participation:
    """Takes part in the attempt of one Call. `deliver` and `contribute` take what others send for it."""

    def __init__(self, host: MemberHost, call: Call) -> None:
        self.call = call
        self.attempt = call.attempt
        self.scope = trio.CancelScope()
        self._host = host
        self._inbox_send, self._inbox = trio.open_memory_channel[Message](64)
        self._reductions: list[Reduction] | None = None
        self._to_send = self._unsent = 0
        self._early: deque[tuple[PeerId, Contribution, bytes]] = deque()

    # --- what others send ---------------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Queue a word of the leader's."""
        try:
            self._inbox_send.send_nowait(message)
        except trio.WouldBlock:
            logger.warning("the leader of attempt %s says more than can be heard", self.attempt)

    def contribute(self, sender: PeerId, message: Contribution, data: bytes) -> None:
        """Take one chunk of a member's outer gradient. Raises WireError on a chunk off the plan."""
        if self._reductions is None:
            # The sender had its roster before us.
            if len(self._early) < MAX_EARLY_SENDERS * len(chunk_bounds(0, self._host.state.num_blocks)):
                self._early.append((sender, message, data))
            return
        for reduction in self._reductions:
            if reduction.start <= message.start < reduction.stop:
                if reduction.add(sender, message.start, message.stop, data, trio.current_time()):
                    self._tell_arrived(reduction)
                return
        raise WireError(f"chunk at block {message.start} is of no part that we average")

    def note_lost(self, peer_id: PeerId) -> None:
        """A link broke: nothing more will come from there."""
        for reduction in self._reductions or ():
            if reduction.fail(peer_id):
                self._tell_arrived(reduction)
        if peer_id == self.attempt.leader:
            self.deliver(Abort(self.call.lineage, self.call.round, self.attempt, "the leader was lost"))

    def give_up_stalled(self) -> None:
        """Leave senders out that make no progress; called a few times a second."""
        rtt_s = {peer_id: link.rtt_s for peer_id, link in self._host.links.live.items()}
        for reduction in self._reductions or ():
            if reduction.give_up_stalled(trio.current_time(), rtt_s):
                self._tell_arrived(reduction)

    # --- taking part --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part to the end; a Commit cancels `scope` while we wait for it.

        Raises RoundFailedError, PeerLostError or WireError, maybe in a group, when this attempt ends otherwise.
        """
        host, call = self._host, self.call
        host.phase = f"round {call.round}: gathering"
        own = await host.snapshot(call.window_s)
        host.tell(self.attempt.leader, self._join(own))
        first = await self._next_order()
        proposal = await self._exchange_parts(first, own) if isinstance(first, Roster) else first
        if not isinstance(proposal, Propose):
            raise RoundFailedError(f"the leader sent {type(proposal).__name__} out of turn")
        host.phase = f"round {call.round}: fetching the mean"
        await host.fetch(proposal.record)
        if not host.ballot.accept(self.attempt, proposal.record):
            raise RoundFailedError("a higher attempt was promised meanwhile")
        host.tell(
            self.attempt.leader,
            Ready(call.lineage, call.round, self.attempt, host.incarnation, record_sha256(proposal.record)),
        )
        host.phase = f"round {call.round}: agreeing"
        await self._next_order()

    async def _next_order(self) -> Message:
        """The leader's next word that is no Abort. Raises RoundFailedError."""
        patience_s = self.call.window_s + self._host.run.round_timeout_s + LAST_WORD_S
        with trio.move_on_after(patience_s):
            message = await self._inbox.receive()
            if isinstance(message, Abort):
                raise RoundFailedError(message.reason)
            return message
        raise RoundFailedError(f"the leader said nothing for {patience_s:.0f} s")

    def _join(self, own: OwnContribution | None) -> Join:
        host, links = self._host, self._host.links
        return Join(
            lineage=self.call.lineage,
            round=self.call.round,
            attempt=self.attempt,
            incarnation=host.incarnation,
            state_sha256=host.head.state_sha256,
            has_snapshot=own is not None,
            tokens=own.tokens if own else 0,
            shard_tokens=host.exchange.shard_tokens,
            run_step=own.run_step if own else 0,
            speed=1 / max(host.exchange.step_s, 1e-6),
            rate=max((link.rate_bytes_s for link in links.live.values()), default=0.0),
            linked=tuple(links.live),
            at_length=own.at_length if own else False,
            ready_attempt=host.ballot.ready_attempt,
            ready=host.ballot.ready,
        )

    # --- averaging ----------------------------------------------------------------------------------------------

    async def _exchange_parts(self, roster: Roster, own: OwnContribution | None) -> Message:
        """Send our outer gradient and average our part of everybody's; returns the leader's word after that."""
        check_parts([(part.start, part.stop) for part in roster.parts], self._host.state.num_blocks)
        if own is None:
            raise RoundFailedError("on the roster without a snapshot")
        self._reductions = [
            Reduction(i, part.start, part.stop, roster.members, self._host.codec, self._host.pace, trio.current_time())
            for i, part in enumerate(roster.parts)
            if part.reducer == self._host.peer_id
        ]
        while self._early:
            self.contribute(*self._early.popleft())
        reduced: Reduce | None = None
        # Sending goes on while we reduce for others: the leader goes on when all is done.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_contribution, roster, own)
            while isinstance(order := await self._next_order(), Reduce):
                if reduced is None:
                    self._host.phase = f"round {roster.round}: averaging"
                    await self._reduce(order)
                elif order != reduced:
                    raise RoundFailedError("told to average two sets of contributors")
                reduced = order
            nursery.cancel_scope.cancel()
        return order

    async def _send_contribution(self, roster: Roster, own: OwnContribution) -> None:
        """Encode and stream every part to its reducer, all reducers at once."""
        host = self._host
        encoded = [trio.Semaphore(0) for _ in roster.parts]
        self._unsent = self._to_send = sum(len(chunk_bounds(part.start, part.stop)) for part in roster.parts)
        host.phase = f"round {roster.round}: sending 0/{self._to_send}"
        async with trio.open_nursery() as nursery:
            for part, ready in zip(roster.parts, encoded, strict=True):
                nursery.start_soon(self._send_part, part, own, ready)
            # Round-robin over the parts, so that every reducer has something to do from the start.
            lanes = [(deque(chunk_bounds(p.start, p.stop)), r) for p, r in zip(roster.parts, encoded, strict=True)]
            while lanes:
                for bounds, ready in lanes:
                    visit = [bounds.popleft() for _ in range(min(CHUNKS_PER_VISIT, len(bounds)))]
                    await host.compute(own.encode, host.state.anchor, host.codec, visit)
                    for _ in visit:
                        ready.release()
                lanes = [lane for lane in lanes if lane[0]]

    async def _send_part(self, part: RosterPart, own: OwnContribution, encoded: trio.Semaphore) -> None:
        call, link = self.call, self._host.links.get(part.reducer)
        if link is None and part.reducer != self._host.peer_id:
            raise RoundFailedError(f"reducer {part.reducer} is not linked")
        for start, stop in chunk_bounds(part.start, part.stop):
            await encoded.acquire()
            message = Contribution(call.lineage, call.round, self.attempt, start, stop)
            if link is None:
                self.contribute(part.reducer, message, own.chunks[start])
            else:
                await link.send_bulk(message, own.chunks[start], Traffic.ROUND, compress=True)
            self._note_sent()

    def _note_sent(self) -> None:
        """Another chunk is on its way. Who averages meanwhile says that: it is what the others wait for."""
        self._unsent -= 1
        sending = f"round {self.call.round}: sending"
        if self._host.phase.startswith(sending):
            self._host.phase = f"{sending} {self._to_send - self._unsent}/{self._to_send}"

    async def _reduce(self, order: Reduce) -> None:
        """Average exactly the contributors that the leader names, part by part, and serve the result."""
        named = [(c.peer_id, c.weight) for c in order.contributors]
        for reduction in self._reductions or ():
            if not named or not {peer for peer, _ in named} <= reduction.complete:
                raise RoundFailedError("told to average a member that is not complete here")
            run = self._host.run
            reduce = partial(
                reduction.reduce, disjoint=run.round_mean == "disjoint", num_compared=self._host.state.num_stepped
            )
            done = await self._host.compute(reduce, named, mean_codec(run, len(named)))
            self._host.parts.add(done.sha256, done.data)
            self._host.tell(
                self.attempt.leader,
                Reduced(order.lineage, order.round, self.attempt, reduction.part, done.sha256, done.gram),
            )

    def _tell_arrived(self, reduction: Reduction) -> None:
        complete, failed = tuple(sorted(reduction.complete)), tuple(sorted(reduction.failed))
        self._host.tell(
            self.attempt.leader,
            Arrived(self.call.lineage, self.call.round, self.attempt, reduction.part, complete, failed),
        )
