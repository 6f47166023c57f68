"""SPARTA by gossip: each push goes to a random live peer, which merges it at its next step.

The paper averages a fraction p of the parameters over all workers at every step (SPARTA, Algorithm 1). A push to one
random partner mixes as fast per byte (simulated) and needs no reply and no barrier. It costs each peer the same however
many there are, which section 5 of the paper leaves open. The receiver computes the indices from the header.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import trio

from p2ptrain.algorithms.codec import codec as codec_named
from p2ptrain.algorithms.fragments import Walk, fresh_blocks, slot_blocks
from p2ptrain.algorithms.topology import partners
from p2ptrain.errors import ConfigError, WireError
from p2ptrain.protocol.exchange.pushing import MOST_PUSHES_UNDER_WAY
from p2ptrain.protocol.exchange.types import Arrival, Epoch, OutlierFound, Push, PushBegun, PushPlan
from p2ptrain.protocol.links.flow_control import ACK_EVERY_BYTES
from p2ptrain.protocol.links.link import MIN_PATIENCE_S, Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.push_pace import MIN_PUSH_INTERVAL_S, PushPace
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.timeouts import SLOWEST_BYTES_S
from p2ptrain.protocol.wire.frames import MAX_PAYLOAD_BYTES
from p2ptrain.protocol.wire.messages import Fragment
from p2ptrain.protocol.wire.transport import PeerId

# Coding and planning fewer blocks takes less time than a trip to a worker thread (measured: about 1 ms).
INLINE_BLOCKS = 2048
# How often to check whether there are peers to push to, and whether they merge our fragments.
POLL_S = 0.5
# Pause before the next plan after an unexpected error.
ERROR_PAUSE_S = 1.0
# Interval of `fragments` events.
FRAGMENTS_EVENT_S = 2.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Gossip:
    """Plans and sends this peer's fragments, and checks and queues those of other peers.

    Args:
        admits: whether fragments of a peer are merged. Ours are pushed only if it admits us.
        pace: decides when the next push is due. Is told the cost of each.

    Raises ConfigError if the fragments of this model do not fit into a frame.
    """

    def __init__(
        self, context: RoundContext, rng: random.Random, admits: Callable[[PeerId], bool], pace: PushPace
    ) -> None:
        self._context = context
        self._pace = pace
        self._admits = admits
        self._run = run = context.run
        self._exchange = context.exchange
        self._rng = rng
        self._codec = codec_named(run.fragment_codec)
        self._walk = Walk.of(run.fragment_fraction)
        self._num_slots = self._walk.num_slots
        self._position = 0  # in steps
        self._said_pace = False
        # The times at which the training thread began to gather the plan. Then the next one is offered.
        self._taken_send, self._taken = trio.open_memory_channel[float](1)
        self._pushes_send, self._pushes = trio.open_memory_channel[Push](2 * MOST_PUSHES_UNDER_WAY)
        # CPU seconds of gathering and sending that the pace has not been told yet.
        self._sending_cpu_s = 0.0
        slot_bytes = self._codec.size_bytes(self._blocks_per_slot)
        self._most_steps = MAX_PAYLOAD_BYTES // slot_bytes // self._walk.per_step
        if not self._most_steps:
            step_bytes = slot_bytes * self._walk.per_step
            raise ConfigError(
                f"fragment_fraction = {run.fragment_fraction:g}: fragments of this model have "
                f"{step_bytes / 1e6:.1f} MB, at most {MAX_PAYLOAD_BYTES / 1e6:.1f} MB fit into a frame; must be at "
                f"most {0.95 * run.fragment_fraction * MAX_PAYLOAD_BYTES / step_bytes:.2g}"
            )

    async def run_forever(self) -> None:
        """Plan, gather and send pushes until cancelled."""
        # Peers start their walks at different slots, so that partners rarely send the same one.
        self._position = self._rng.randrange(self._walk.steps)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._plan_forever)
            nursery.start_soon(self._send_forever)

    async def _plan_forever(self) -> None:
        """Offer plans to the training thread, each when gathering of the one before has begun."""
        while True:
            if not self._context.host.lineage_peers() or not self._admits(self._context.peer_id):
                await trio.sleep(POLL_S)
                continue
            self._say_pace()
            if self._run.topology != "push":
                # These topologies choose partner and slots by the step, so the plan is made at the step that pushes.
                await trio.sleep_until(self._pace.due_s)
            try:
                slots = self._step_count() * self._walk.per_step
                plan, cpu_s = await self._off_loop(slots * self._blocks_per_slot, self._plan)
                self._exchange.offer_push(plan)
                began_s = await self._taken.receive()
            except Exception as error:
                self._context.errors.note("planning a push; it is skipped", error)
                await trio.sleep(ERROR_PAUSE_S)
            else:
                self._pace.note_sent(cpu_s + self._sending_cpu_s, began_s)
                self._sending_cpu_s = 0.0

    async def _send_forever(self) -> None:
        """Send gathered pushes, at once or after the run's delay."""
        waiting: deque[Push] = deque()
        async for push in self._pushes:
            self._sending_cpu_s += push.cpu_s
            waiting.append(push)
            while waiting and self._exchange.steps - waiting[0].steps >= self._run.fragment_delay:
                with self._context.errors.containing("pushing a fragment", "it is skipped"):
                    await self._send(waiting.popleft())

    def receive(self, event: PushBegun | Push | OutlierFound) -> None:
        """Take an event of the training thread."""
        match event:
            case PushBegun(began_s):
                self._taken_send.send_nowait(began_s)
            case Push():
                self._pushes_send.send_nowait(event)
            case OutlierFound(sender):
                # No strike: distance proves nothing, as a peer whose training went astray is far away too. Rounds
                # leave such a peer out or bring it back, and for that it needs links.
                if (link := self._context.links.get(sender)) is not None:
                    link.close("its fragments were too far from our weights 100 times in a row")

    async def on_fragment(self, link: Link, message: Fragment, payload: bytes) -> None:
        """Check, decode and queue a fragment. Raises WireError if it is invalid."""
        self._check(message, payload)
        if not self._admits(link.peer_id):
            self._exchange.inbox.count_skipped("newcomer")
            return
        if self._exchange.drops.fragment():
            self._exchange.inbox.count_skipped("lost")
            return
        epoch = Epoch(message.lineage, message.round)
        own = self._exchange.epoch
        if epoch.lineage != own.lineage or epoch.round < own.round:
            self._exchange.inbox.count_skipped("epoch")
            return
        age_s = message.age_s + link.flow.rtt_s / 2 + link.frame_s
        if self._exchange.step_s and age_s > self._exchange.max_age_s:
            self._exchange.inbox.count_skipped("too_old")
            return
        arrived_s = trio.current_time()

        def decode() -> Arrival:
            plan = self._exchange.space.plan(self._blocks(message.cycle, message.slot, message.slot_count))
            values = torch.from_numpy(self._codec.decode(payload, len(plan.blocks)))
            return Arrival(link.peer_id, epoch, plan, self._exchange.pin(values), age_s, arrived_s)

        arrival, cpu_s = await self._off_loop(message.slot_count * self._blocks_per_slot, decode)
        self._exchange.inbox.put(arrival)
        self._pace.note_received(cpu_s + self._exchange.merge_cpu_s)

    @property
    def _blocks_per_slot(self) -> int:
        return self._exchange.space.num_blocks // self._num_slots + 1

    def _step_count(self) -> int:
        """How many steps share the next push: several if steps are faster than `MIN_PUSH_INTERVAL_S`."""
        step_s = self._exchange.step_s
        steps = math.ceil(MIN_PUSH_INTERVAL_S / step_s) if step_s > 0 else 1
        steps = max(1, round(steps * self._exchange.fragment_rate))
        return min(steps, self._most_steps, self._walk.steps - self._position % self._walk.steps)

    def _plan(self) -> PushPlan:
        if self._run.topology != "push":
            # These topologies pair peers by the step, and partners push the same slot.
            self._position = self._exchange.run_step
        cycle, step = divmod(self._position, self._walk.steps)
        steps = self._step_count()
        self._position += steps
        slot, count = step * self._walk.per_step, steps * self._walk.per_step
        plan = self._exchange.space.plan(self._blocks(cycle, slot, count))
        return PushPlan(cycle, slot, count, plan, self._pace.due_s)

    def _blocks(self, cycle: int, slot: int, count: int) -> npt.NDArray[np.int64]:
        seed, blocks = self._run.run_seed, self._exchange.space.num_blocks
        if self._run.fragment_selection == "cyclic":
            return slot_blocks(seed, cycle, slot, count, self._num_slots, blocks)
        return fresh_blocks(seed, cycle * self._num_slots + slot, count, self._num_slots, blocks)

    def _partners(self, push: Push) -> list[Link]:
        """The receivers of a push, by the run's topology."""
        run, plan = self._run, push.plan
        chosen = partners(
            run.topology,
            self._context.peer_id,
            self._context.host.lineage_peers(),
            fan_out=run.fan_out,
            seed=run.run_seed,
            step=plan.cycle * self._walk.steps + plan.slot // self._walk.per_step,
            rng=self._rng,
        )
        links = (self._context.links.get(peer_id) for peer_id in chosen)
        return [link for link in links if link is not None]

    def _say_pace(self) -> None:
        """Log once that there are fewer pushes than steps."""
        pace, step_s = self._pace, self._exchange.step_s
        if not self._said_pace and step_s > 0 and pace.interval_s > max(step_s, MIN_PUSH_INTERVAL_S):
            self._said_pace = True
            logger.info(
                "gossip pushes every %.2g s instead of at every step (%.2g s), so that it takes at most %.3g cores "
                "(--gossip-budget)",
                pace.interval_s,
                step_s,
                pace.budget,
            )

    async def _send(self, push: Push) -> None:
        """Encode a push and queue it for its receivers."""
        try:
            payload, cpu_s = await self._off_loop(len(push.values), lambda: self._codec.encode(push.values.numpy()))
        except ValueError:
            # Our training has diverged: send nothing.
            self._exchange.inbox.count_skipped("not_finite")
            return
        self._sending_cpu_s += cpu_s
        epoch, plan = push.epoch, push.plan

        def make() -> Fragment:
            slots = plan.cycle, plan.slot, plan.slot_count, self._num_slots
            age_s = max(0.0, trio.current_time() - push.gathered_s)
            return Fragment(epoch.lineage, epoch.round, self._run.fragment_selection, *slots, age_s)

        until_s = push.gathered_s + self._exchange.max_age_s
        for partner in self._partners(push):
            if self._would_come_late(len(payload), until_s):
                self._context.links.counters.fragments_shed += 1
            else:
                partner.send_fragment(make, payload, until_s=until_s)

    def _would_come_late(self, size_bytes: int, until_s: float) -> bool:
        """Whether a fragment would arrive too late if all links share an uplink, and what is under way goes first.

        The uplink's rate is that of the fastest link; before any is measured, that of the slowest line. Each link only
        sheds what is late for its own path: a slow uplink would carry one fragment of each link at once, and none would
        be complete in time. A receiver that acknowledges nothing counts only for as long as its frames may take.
        """
        now, flows = trio.current_time(), [link.flow for link in self._context.links.live.values()]
        # A path that was never filled may have a higher rate than it shows.
        is_known = any(flow.is_filled for flow in flows)
        rate_bytes_s = max([0 if is_known else SLOWEST_BYTES_S, *(flow.rate_bytes_s for flow in flows)])
        # The receiver of a link may hold so many bytes without acknowledging them.
        under_way = sum(
            max(0, flow.in_flight - ACK_EVERY_BYTES)
            for flow in flows
            if flow.unacked_s(now) < MIN_PATIENCE_S + flow.in_flight / rate_bytes_s
        )
        most_s = min(until_s - now, MIN_PATIENCE_S / 2)  # heartbeats may have to wait as long
        return under_way > 0 and (under_way + size_bytes) / rate_bytes_s > most_s

    def _check(self, message: Fragment, payload: bytes) -> None:
        if message.selection != self._run.fragment_selection or message.num_slots != self._num_slots:
            raise WireError(f"fragment of {message.selection[:40]!r} selection in {message.num_slots} slots")
        if not (0 <= message.slot < message.num_slots and 1 <= message.slot_count <= message.num_slots - message.slot):
            raise WireError(f"fragment of slots {message.slot} + {message.slot_count} of {message.num_slots}")
        if not 0 <= message.cycle < 2**40 or message.age_s < 0:
            raise WireError("fragment of an impossible cycle or age")
        # Checked before the blocks are computed, so that the received bytes bound the work.
        fewest, most = (message.slot_count * blocks for blocks in (self._blocks_per_slot - 1, self._blocks_per_slot))
        if not self._codec.size_bytes(fewest) <= len(payload) <= self._codec.size_bytes(most):
            raise WireError(f"fragment of {message.slot_count} slots in {len(payload)} bytes")

    async def _off_loop(self, blocks: int, work: Callable[[], T]) -> tuple[T, float]:
        """Run `work` in a worker thread if it is long, else here. Returns its result and its CPU seconds."""

        def measured() -> tuple[T, float]:
            start_s = self._exchange.cpu_clock()
            result = work()
            return result, self._exchange.cpu_clock() - start_s

        return await self._context.compute(measured) if blocks > INLINE_BLOCKS else measured()


async def record_fragments(context: RoundContext, pace: PushPace, record: Callable[..., None]) -> None:
    """Write a `fragments` event every two seconds, and a last one when cancelled."""
    counters, exchange, before = context.links.counters, context.exchange, (0, 0, 0, 0)

    def write() -> None:
        nonlocal before
        merged, skipped, age_steps = exchange.inbox.take_counts()
        now = (
            counters.fragments_sent,
            counters.fragments_shed,
            counters.sent[Traffic.FRAGMENT],
            counters.received[Traffic.FRAGMENT],
        )
        sent, shed, bytes_sent, bytes_received = (new - old for new, old in zip(now, before, strict=True))
        before = now
        to = dict(counters.fragments_to)
        counters.fragments_to.clear()
        if shed:
            skipped["shed"] = shed
        record(
            "fragments",
            step=exchange.run_step,
            sent=sent,
            to=to,
            merged=merged,
            skipped=skipped,
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            staleness=round(context.run.fragment_fraction * age_steps, 6),
            push_every_s=round(pace.interval_s, 6),
        )

    try:
        while True:
            await trio.sleep(FRAGMENTS_EVENT_S)
            write()
    finally:
        write()
