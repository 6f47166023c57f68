"""Swaps weights with a partner: both send theirs at once, and each measures how far the other's are from its anchor.

A partner sends its encoded weights in order, then a sample of its anchor. Both are bounded and checked.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from p2ptrain.algorithms.averaging import MAX_MEAN
from p2ptrain.algorithms.codec import Codec, is_within
from p2ptrain.algorithms.pairwise import Array, clip_scale, pairwise_step, sample_blocks, spread, squared_distance
from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.exchange.types import Snapshot
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.nursery import nursery_raising
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.wire.messages import PairWeights
from p2ptrain.protocol.wire.transport import PeerId

# The distances of this many partners decide whether another one is too far away (guess).
PARTNERS_REMEMBERED = 8


class PartnerWeights:
    """The weights of one partner, received so far.

    Attributes:
        sender: the partner, and the number of its step.
        heard_s: when the last chunk came, or the swap began.
        complete: set with the last chunk.
    """

    def __init__(self, sender: tuple[PeerId, int], codec: Codec, num_blocks: int, now: float) -> None:
        self.sender = sender
        self.heard_s = now
        self.complete = trio.Event()
        self._codec = codec
        self._bounds = Grid.of(num_blocks, codec).bounds(0, num_blocks)
        self._sampled = sample_blocks(num_blocks)
        self._chunks: list[bytes] = []

    def add(self, message: PairWeights, payload: bytes, now: float) -> None:
        """Keep a chunk. Raises WireError if it is not the next one, or cannot be decoded."""
        if self.complete.is_set():
            raise WireError("weights of a partner beyond the last chunk")
        last = len(self._chunks) == len(self._bounds)
        start, stop = (self._bounds[-1][1], self._bounds[-1][1]) if last else self._bounds[len(self._chunks)]
        if message.start != start:
            raise WireError(f"weights of a partner from block {message.start}, not {start}")
        self._codec.check(payload, len(self._sampled) if last else stop - start)
        self._chunks.append(payload)
        self.heard_s = now
        if last:
            self.complete.set()

    def distance(self, anchor: Array) -> float:
        """The Euclidean distance from our anchor. Call it in a worker thread. Raises WireError if it is impossible."""
        square = 0.0
        for (start, stop), chunk in zip(self._bounds, self._chunks, strict=False):
            square += squared_distance(anchor[start:stop], self._decode(chunk, stop - start))
        return math.sqrt(square)

    def anchor_sample(self) -> Array:
        """The blocks `sample_blocks` of its anchor before the step. Raises WireError if their values are impossible."""
        return self._decode(self._chunks[-1], len(self._sampled))

    def _decode(self, chunk: bytes, num_blocks: int) -> Array:
        decoded = self._codec.decode(chunk, num_blocks)
        if not is_within(decoded, MAX_MEAN):
            raise WireError(f"weights of a partner beyond {MAX_MEAN:g}")
        return decoded

    def step(self, anchor: Array, moment: Array, own: Array, *, lr: float, momentum: float, scale: float) -> None:
        """Take the step with these weights, in place; `own` becomes the change. Call it in a worker thread."""
        for (start, stop), chunk in zip(self._bounds, self._chunks, strict=False):
            decoded = self._codec.decode(chunk, stop - start)
            vectors = anchor[start:stop], moment[start:stop], own[start:stop], decoded
            pairwise_step(*vectors, lr=lr, momentum=momentum, scale=scale)


class Distances:
    """The distances of the last partners' weights from our anchor, after scaling. Pure."""

    def __init__(self) -> None:
        self._of_last: dict[PeerId, float] = {}

    def clip(self, partner: PeerId, distance: float, moved: float) -> float:
        """Note a partner's distance, and return the factor for its weights. `moved`: our distance from the anchor."""
        scale = clip_scale(moved, list(self._of_last.values()), distance)
        # After scaling, so that one partner alone cannot raise the limit by more than that factor a step.
        self._of_last.pop(partner, None)
        self._of_last[partner] = scale * distance
        if len(self._of_last) > PARTNERS_REMEMBERED:
            del self._of_last[next(iter(self._of_last))]
        return scale


@dataclass(frozen=True, slots=True)
class Measured:
    """Measures of a partner's complete weights.

    Attributes:
        scale: the factor for them in our step.
        distance: from our anchor to them, relative to that to our weights; None if ours have not moved.
        spread: of the two anchors (see `algorithms.pairwise.spread`).
    """

    scale: float
    distance: float | None
    spread: float


class Swaps:
    """The swaps of one peer. `until` waits for a condition, with a time-out in seconds."""

    def __init__(self, context: RoundContext, until: Callable[[Callable[[], bool], float], Awaitable[None]]) -> None:
        self._context = context
        self._until = until
        self._distances = Distances()

    async def run(
        self,
        link: Link,
        number: int,
        snapshot: Snapshot,
        anchor: Array,
        theirs: PartnerWeights,
        stays: Callable[[], bool],
    ) -> Measured:
        """Send a copy of our weights, wait for the partner's, and measure them.

        Args:
            number: the number of our step.
            snapshot: the copy of our weights.
            anchor: ours, float32 of [blocks, 64].
            theirs: receives the partner's weights.
            stays: whether the partner has not ended the swap.

        Raises:
            PeerLostError: the partner left, fell silent or took too long.
            WireError: its weights are impossible.
        """
        with trio.move_on_after(self._longest_s):
            async with nursery_raising(PeerLostError) as nursery:
                nursery.start_soon(self._send, link, number, snapshot, anchor)
                nursery.start_soon(self._receive, link.peer_id, theirs, stays)
            return await self._measured(link.peer_id, snapshot, anchor, theirs)
        raise PeerLostError(f"{link.peer_id} took too long")

    @property
    def _longest_s(self) -> float:
        """How long a swap may take: an interval, so that a partner that sends slowly costs us no more than one."""
        run, peer_timeout_s = self._context.run, self._context.links.peer_timeout_s
        return min(run.round_timeout_s, max(peer_timeout_s, run.sync_every * self._context.exchange.step_s))

    async def _send(self, link: Link, number: int, snapshot: Snapshot, anchor: Array) -> None:
        codec, own = self._context.codec, snapshot.weights.numpy()
        for start, stop in Grid.of(len(own), codec).bounds(0, len(own)):
            payload = await self._context.compute(codec.encode, own[start:stop])
            await link.send_bulk(PairWeights(number, start), payload, Traffic.ROUND)
        sample = codec.encode(anchor[sample_blocks(len(own))])
        await link.send_bulk(PairWeights(number, len(own)), sample, Traffic.ROUND)

    async def _receive(self, partner: PeerId, theirs: PartnerWeights, stays: Callable[[], bool]) -> None:
        """Wait until the partner's weights are complete."""
        complete, peer_timeout_s = theirs.complete.is_set, self._context.links.peer_timeout_s
        while not complete():
            if not stays():
                raise PeerLostError(f"{partner} left the swap")
            silent_s = trio.current_time() - theirs.heard_s
            if silent_s >= peer_timeout_s:
                raise PeerLostError(f"{partner} sent nothing for {silent_s:.0f} s")
            await self._until(lambda: complete() or not stays(), peer_timeout_s - silent_s)

    async def _measured(self, partner: PeerId, snapshot: Snapshot, anchor: Array, theirs: PartnerWeights) -> Measured:
        own, compute = snapshot.weights.numpy(), self._context.compute
        moved = math.sqrt(await compute(squared_distance, anchor, own))
        distance = await compute(theirs.distance, anchor)
        scale = self._distances.clip(partner, distance, moved)
        apart = spread(anchor[sample_blocks(len(own))], theirs.anchor_sample())
        return Measured(scale, distance / moved if moved else None, apart)
