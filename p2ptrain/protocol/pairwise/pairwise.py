"""Takes this peer's outer steps, each with a random partner.

A peer whose step is due looks for a partner while it goes on training. Once it has one, both copy their weights at
their next inner step and send them to each other. Each then takes its own step, and adds the change of its copy to its
live weights. A peer that finds no partner within a quarter of an interval, or whose partner falls silent, takes the
step alone: waiting for another partner would cost more of the interval than a step alone does.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import trio

from p2ptrain.algorithms.averaging import MAX_GRADIENT
from p2ptrain.algorithms.codec import is_within
from p2ptrain.algorithms.pairwise import Array, pairwise_step
from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.exchange.types import Landing, LandingKind, Snapshot, SnapshotWanted
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.membership.membership import Membership
from p2ptrain.protocol.pairwise.joining import AnchorCopier, linked_others, others_step, rows
from p2ptrain.protocol.pairwise.matching import MOST_RECENT, Matching, on_answer, on_offer, recent_partners
from p2ptrain.protocol.pairwise.swap import PartnerWeights, Swaps
from p2ptrain.protocol.rounds.deciding.record import MOST_INTERVAL
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.wire.messages import Answer, PairAnswer, PairOffer, PairWeights, Request
from p2ptrain.protocol.wire.transport import PeerId

# How often we check whether a step is due.
POLL_S = 0.1
# A peer accepts a partner from the first share of its interval on, and looks for one until the second (guesses).
WILLING_FROM, LOOK_UNTIL = 0.75, 1.25
# How long we wait for an answer to an offer (guess). A peer answers as soon as it has read the offer.
ANSWER_S, ANSWER_ROUND_TRIPS = 1.0, 4
# The longest pause before an offer. It is random, so that peers that are due at the same time do not all wait for each
# other's answers.
LEAST_PAUSE_S, PAUSE_ROUND_TRIPS = 0.1, 4
# Pause after an unexpected error.
RETRY_S = 1.0
# Why a step is given up.
INTERRUPTED = "a round began, or another state was taken over"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a step, for its event.

    Attributes:
        reason: why it was taken alone or left out, or why the partner's weights were scaled.
        distance: from our anchor to the partner's weights, relative to that to ours.
        spread: of the two anchors (see `algorithms.pairwise.spread`).
    """

    status: str
    partner: PeerId = ""
    reason: str = ""
    distance: float | None = None
    spread: float | None = None


class Pairwise:
    """Takes this peer's outer steps, and serves its anchor to joiners.

    Args:
        record: takes the name of an event, and its fields.

    Attributes:
        anchor: what the next step starts from, float32 of [blocks, 64]; changed in place.
        moment: the momentum, of the same shape.
    """

    def __init__(
        self, driver: RoundDriver, rng: random.Random, record: Callable[..., None], membership: Membership
    ) -> None:
        self._driver = driver
        self._context = context = driver.context
        self._exchange = context.exchange
        self._run = context.run
        self._rng = rng
        self._copier = AnchorCopier(context, rng, membership)
        self._record = record
        num_blocks = context.state.num_blocks
        self.anchor = np.zeros((num_blocks, 64), np.float32)
        self.moment = np.zeros_like(self.anchor)
        # The head's `state_hash` when the anchor was taken; "" without an anchor.
        self._state = ""
        self._matching = Matching()
        self._incoming: PartnerWeights | None = None
        self._swaps = Swaps(context, self._until)
        self._before: deque[PeerId] = deque(maxlen=MOST_RECENT)
        self._stepping = False
        self._taken: Snapshot | None = None
        self._changed = trio.Event()
        self._traffic_before = (0, 0)

    @property
    def status(self) -> str:
        """What this peer is doing; "" between two steps."""
        if self._matching.partner:
            return "outer step with a partner"
        return "looking for a partner" if self._matching.asked else ""

    # At the start.

    async def begin(self) -> None:
        """Get our first anchor: from a peer that is more than an interval ahead, else from our own weights."""
        copied = await self._copier.copy()
        if copied is None:
            await self._restart()
            return
        await self._begin_from(copied.anchor, self._driver.head.state_hash)
        await self._land("write", torch.from_numpy(copied.anchor), copied.run_step, None)
        self._record_step(_Outcome("joined", copied.donor), trio.current_time())

    async def _restart(self) -> None:
        """Make our weights the anchor, and the momentum zero. If a round is under way, `run_forever` does so later."""
        state, snapshot = self._driver.head.state_hash, await self._snapshot()
        if snapshot is not None:
            await self._begin_from(snapshot.weights.numpy(), state)

    async def _begin_from(self, weights: Array, state: str) -> None:
        """Make these weights the anchor, and the momentum zero. `state`: the head's `state_hash` now."""
        await self._context.compute(np.copyto, self.anchor, weights)
        await self._context.compute(self.moment.fill, 0)
        self._state = state

    async def serve(self, link: Link, request: Request) -> None:
        """Answer a request for a chunk of our anchor. While a step changes it, chunks may be of before and after."""
        payload = b""
        if self._state and request.index >= 0:
            payload = self.anchor[rows(request.index)].astype("<f4").tobytes()
        await link.send_bulk(Answer(request.request, bool(payload), "anchor"), payload, Traffic.STATE)

    # Messages and links.

    def deliver(self, link: Link, message: PairOffer | PairAnswer | PairWeights, payload: bytes) -> None:
        """Take a message. Stale ones are ignored. Raises WireError if it breaks the protocol."""
        reply: PairAnswer | None = None
        match message:
            case PairOffer():
                willing = self._is_willing and message.lineage == self._driver.head.lineage
                willing = willing and link.peer_id not in self._recent
                self._matching, reply = on_offer(self._matching, link.peer_id, message, willing=willing)
            case PairAnswer():
                self._matching, reply = on_answer(self._matching, link.peer_id, message)
            case PairWeights():
                if (link.peer_id, message.number) == self._sender:
                    self._partner_weights().add(message, payload, trio.current_time())
        if reply is not None:
            link.send(reply)
        self._wake()

    def note_lost(self, peer_id: PeerId) -> None:
        """The link to a peer broke."""
        self._matching = self._matching.without(peer_id)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _partner_weights(self) -> PartnerWeights:
        """The partner's weights received so far. Its first chunk may come before our copy is taken."""
        if self._incoming is None or self._incoming.sender != self._sender:
            context, now = self._context, trio.current_time()
            self._incoming = PartnerWeights(self._sender, context.codec, context.state.num_blocks, now)
        return self._incoming

    @property
    def _sender(self) -> tuple[PeerId, int]:
        """Our partner, and the number of its step."""
        return self._matching.partner, self._matching.partner_number

    @property
    def _waits(self) -> bool:
        """Whether a round uses the weights now or soon: there must be inner steps between an outer step and a round."""
        total = self._run.total_steps
        ends = total > 0 and total - self._exchange.run_step < self._run.sync_every / 2
        return ends or self._driver.is_busy

    @property
    def _is_free(self) -> bool:
        """Whether a step may begin: no round is under way, or has changed the weights since our anchor was taken."""
        return self._state == self._driver.head.state_hash and not self._waits

    @property
    def _is_willing(self) -> bool:
        return self._is_free and not self._stepping and self._exchange.of_interval >= WILLING_FROM

    @property
    def _recent(self) -> frozenset[PeerId]:
        return recent_partners(tuple(self._before), len(linked_others(self._context)))

    # Steps.

    async def run_forever(self) -> None:
        """Take outer steps until cancelled."""
        while True:
            try:
                if self._state != self._driver.head.state_hash and not self._waits:
                    # A round has changed the weights.
                    await self._restart()
                elif self._is_free and (self._exchange.due or self._matching.partner):
                    await self._run_step()
                else:
                    with trio.move_on_after(POLL_S):
                        await self._changed.wait()
            except Exception as error:
                self._context.errors.note("an outer step with a partner; it is left out", error)
                self._leave_out()
                await trio.sleep(RETRY_S)

    async def _run_step(self) -> None:
        """Find a partner, take the step, and record the result."""
        began_s = trio.current_time()
        outcome = _Outcome("skipped", reason=INTERRUPTED)
        try:
            await self._find_partner()
            if self._is_free:
                outcome = await self._apply_step(self._matching.partner)
        finally:
            if self._matching.partner and outcome.status != "paired":
                link = self._context.links.get(self._matching.partner)
                if link is not None:
                    link.send(PairAnswer(self._matching.partner_number, 0, False))
            self._matching, self._incoming, self._stepping = self._matching.stepped(), None, False
        if outcome.status == "skipped":
            self._leave_out()
        self._record_step(outcome, began_s)

    def _leave_out(self) -> None:
        """Let the next step be due an interval from now. A round at the end of the run stays due."""
        if not self._exchange.at_length:
            self._exchange.postpone()

    async def _find_partner(self) -> None:
        """Send offers to random peers, one after the other, until one accepts or we have looked for long enough."""
        declined: set[PeerId] = set()
        while not self._matching.partner and self._is_free and self._exchange.of_interval < LOOK_UNTIL:
            rtt_s = self._context.liveness.round_trip_s()
            pause_s = self._rng.uniform(0, max(LEAST_PAUSE_S, PAUSE_ROUND_TRIPS * rtt_s))
            await self._until(lambda: bool(self._matching.partner), pause_s)
            recent = self._recent
            partners = [link for link in linked_others(self._context) if link.peer_id not in recent]
            if not partners or self._matching.partner:
                return
            fresh = [link for link in partners if link.peer_id not in declined]
            if not fresh:
                declined.clear()
                continue
            link = self._rng.choice(fresh)
            self._matching = self._matching.offering(link.peer_id)
            link.send(PairOffer(self._driver.head.lineage, self._matching.number))
            await self._until(lambda: not self._matching.asked, max(ANSWER_S, ANSWER_ROUND_TRIPS * rtt_s))
            self._matching = self._matching.without(self._matching.asked)
            declined.add(link.peer_id)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            while not condition():
                await self._changed.wait()

    async def _apply_step(self, partner: PeerId) -> _Outcome:
        """Take the step with a partner, or alone if `partner` is ""."""
        self._stepping = True
        snapshot = await self._snapshot()
        if snapshot is None:
            return _Outcome("skipped", partner, INTERRUPTED)
        # A slow peer follows the others' position, as schedules depend on it.
        most = snapshot.run_step + MOST_INTERVAL * self._run.sync_every
        run_step = max(snapshot.run_step, min(others_step(linked_others(self._context)), most))
        own = snapshot.weights.numpy()
        if not await self._context.compute(is_within, own, MAX_GRADIENT):
            return _Outcome("skipped", partner, "its weights are not finite, or far too large")
        outcome, theirs, scale = _Outcome("alone", reason="found no partner"), None, 1.0
        if partner:
            outcome, theirs, scale = await self._swap(partner, snapshot)
        if not self._is_current(snapshot):
            return _Outcome("skipped", partner, INTERRUPTED)
        vectors, lr, momentum = (self.anchor, self.moment, own), self._run.outer_lr, self._run.outer_momentum
        if theirs is None:
            step = functools.partial(pairwise_step, *vectors, None, lr=lr, momentum=momentum)
        else:
            step = functools.partial(theirs.step, *vectors, lr=lr, momentum=momentum, scale=scale)
        await self._context.compute(step)
        await self._land("add", snapshot.weights, run_step, snapshot)
        return outcome

    async def _swap(self, partner: PeerId, snapshot: Snapshot) -> tuple[_Outcome, PartnerWeights | None, float]:
        """Swap weights with a partner. Returns its weights and their scale, or None if the step is taken alone."""
        link, theirs = self._context.links.get(partner), self._partner_weights()
        if link is None:
            return _Outcome("alone", partner, f"{partner} left"), None, 1.0
        self._before.append(partner)
        reason = f"{partner} broke the protocol"
        number, stays = self._matching.number, lambda: self._matching.partner == partner
        with link.in_use(), self._context.links.containing(link, "an outer step with it"):
            try:
                found = await self._swaps.run(link, number, snapshot, self.anchor, theirs, stays)
            except PeerLostError as error:
                reason = str(error)
            else:
                why = f"scaled by {found.scale:.2g}, as {partner} is too far away" if found.scale < 1 else ""
                return _Outcome("paired", partner, why, found.distance, found.spread), theirs, found.scale
        return _Outcome("alone", partner, reason), None, 1.0

    # The training thread.

    async def _snapshot(self) -> Snapshot | None:
        """A copy of the weights at the next inner step; None if a round needs them first, or the head changes."""
        buffer = await self._context.compute(self._exchange.new_buffer)
        if self._driver.is_busy:
            return None
        # A new head withdraws what was asked for under the one before.
        self._taken, head = None, self._driver.head
        self._exchange.want_snapshot(SnapshotWanted(buffer, 0.0, for_pair=True))
        while self._taken is None and not self._driver.is_busy and self._driver.head is head:
            with trio.move_on_after(POLL_S):
                await self._changed.wait()
        return self._taken

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Use the snapshot that the training thread has taken."""
        self._taken = snapshot
        self._wake()

    def _is_current(self, snapshot: Snapshot) -> bool:
        """Whether only training has changed the weights since a snapshot."""
        same = self._state == self._driver.head.state_hash
        return same and snapshot.epoch == self._exchange.epoch and not self._driver.is_busy

    async def _land(self, kind: LandingKind, buffer: torch.Tensor, run_step: int, snapshot: Snapshot | None) -> None:
        """Change the weights, unless a round does or did so: the anchor is then taken anew after it."""
        if snapshot is not None and not self._is_current(snapshot):
            self._state = ""
            return
        total = self._run.total_steps
        landing = Landing(
            kind=kind,
            buffer=buffer,
            epoch=self._exchange.epoch,
            sync_every=self._run.sync_every,
            run_step=min(run_step, total) if total else run_step,
            snapshot_steps=None if snapshot is None else snapshot.steps,
        )
        async with self._driver.committer.suspended():
            await self._driver.committer.land(landing)

    def _record_step(self, outcome: _Outcome, began_s: float) -> None:
        counters = self._context.links.counters
        traffic = counters.sent[Traffic.ROUND], counters.received[Traffic.ROUND]
        sent, received = (now - then for now, then in zip(traffic, self._traffic_before, strict=True))
        self._traffic_before = traffic
        self._record(
            "pair",
            step=self._exchange.run_step,
            status=outcome.status,
            partner=outcome.partner,
            reason=outcome.reason,
            bytes_sent=sent,
            bytes_received=received,
            wall_s=round(trio.current_time() - began_s, 6),
            distance=_rounded(outcome.distance),
            spread=_rounded(outcome.spread),
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)
