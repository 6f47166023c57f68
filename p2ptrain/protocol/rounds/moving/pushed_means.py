"""The means of an attempt's parts, pushed by their reducers to all members while they are made.

The record that names a mean comes later, so what is pushed is unchecked until then. A member that does not get a mean
this way requests it (`part_store`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.rounds.deciding.averaging import Averaging, Blob
from p2ptrain.protocol.wire.messages import Attempt, Mean, Part, Roster
from p2ptrain.protocol.wire.transport import PeerId

# One piece of a part on the wire: small, so that control frames can pass in between.
PIECE_BYTES = 128 * 1024
# After this time without a piece, the part is requested from another peer (a 64 KiB/s link takes 2 s; guess).
PIECE_TIMEOUT_S = 20.0
# How often a member that awaits a mean looks whether its reducer is still linked.
LOOK_AGAIN_S = 1.0


class BoundedBuffer:
    """At most `most_bytes` bytes, allocated with the first; `size_bytes` of them are here.

    A bytearray is moved as it grows, and each move touches new pages: for the means of a round that took a third of the
    network thread's CPU (measured at 25M parameters). One of full size is filled with zeros, during which no other
    thread can use the interpreter; numpy's memory is not filled.
    """

    def __init__(self, most_bytes: int) -> None:
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._memory = memoryview(b"")

    @classmethod
    def of(cls, data: Blob) -> BoundedBuffer:
        """Bytes that are all here."""
        whole = cls(len(data))
        whole._memory, whole.size_bytes = memoryview(data), len(data)
        return whole

    @property
    def data(self) -> memoryview:
        """The bytes so far, which do not change."""
        return self._memory[: self.size_bytes]

    def emptied(self) -> BoundedBuffer:
        """An empty buffer of the same capacity."""
        return BoundedBuffer(self._most_bytes)

    def extend(self, data: Blob) -> None:
        """Append bytes. Raises WireError if there are more than `most_bytes` then."""
        start, stop = self.size_bytes, self.size_bytes + len(data)
        if stop > self._most_bytes:
            raise WireError(f"more than {self._most_bytes} bytes of a mean")
        if not self._memory:
            self._memory = np.empty(self._most_bytes, np.uint8).data
        self._memory[start:stop] = data
        self.size_bytes = stop


@dataclass
class _Pushed:
    """The mean that a reducer of the attempt pushes to us; its hash is unchecked.

    Attributes:
        digest: empty while it is the mean of the expected contributors.
        is_another: whether it is known to be another mean than the record's.
    """

    mean: BoundedBuffer
    digest: str = ""
    is_another: bool = False


class MeanPush:
    """The mean of a part, sent to all members of its attempt while it grows.

    Args:
        mean: the bytes so far.
        digest: names the whole mean; empty: that of the expected contributors, which grows until `end` or `give_up`.

    Attributes:
        has_ended: whether these are all.
        is_given_up: whether no more of it is sent.
        changed: set, and replaced, when one of these changes.
    """

    def __init__(self, roster: Roster, mean: BoundedBuffer, digest: str = "") -> None:
        self.roster = roster
        self.digest = digest
        self.has_ended = bool(digest)
        self.is_given_up = False
        self.changed = trio.Event()
        self._mean = mean

    @property
    def data(self) -> memoryview:
        """Its bytes so far."""
        return self._mean.data

    def extend(self, data: bytes) -> None:
        self._mean.extend(data)
        self._note_change()

    def end(self) -> None:
        """All bytes are here."""
        self.has_ended = True
        self._note_change()

    def give_up(self) -> None:
        """Send no more of it."""
        self.is_given_up = True
        self._note_change()

    def _note_change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class PushedMeans:
    """Pushes the means that this peer makes, and receives those that others push.

    Args:
        mean_bytes: the most bytes that the encoded mean of so many blocks has.
    """

    def __init__(self, links: Links, averaging: Averaging, mean_bytes: Callable[[int], int]) -> None:
        self.mean_bytes = mean_bytes
        self._links = links
        self._averaging = averaging
        self._attempt: Attempt | None = None
        self._pushed: dict[PeerId, _Pushed] = {}
        self._piece_arrived = trio.Event()
        self._to_push, self._pushes = trio.open_memory_channel[tuple[Link, MeanPush]](math.inf)

    def begin_attempt(self, roster: Roster) -> None:
        """Await the means of this attempt's reducers, where the strategy reduces, and no others any more."""
        self._attempt, self._pushed = roster.attempt, {}
        if self._averaging.reduces:
            for part in roster.parts:
                self._pushed[part.reducer] = _Pushed(BoundedBuffer(self.mean_bytes(part.stop - part.start)))

    def push(self, mean: MeanPush) -> None:
        """Send a part that we reduce to all members of its attempt, until it is given up or another attempt begins."""
        for member in mean.roster.members:
            if (link := self._links.get(member)) is not None:
                self._to_push.send_nowait((link, mean))

    async def push_forever(self) -> None:
        """Send what is to be pushed, to all members at once, until cancelled."""
        async with trio.open_nursery() as nursery:
            async for link, mean in self._pushes:
                nursery.start_soon(self._push, link, mean)

    async def _push(self, link: Link, mean: MeanPush) -> None:
        roster, start = mean.roster, 0
        while self._attempt == roster.attempt and not mean.is_given_up:
            if len(mean.data) < start + PIECE_BYTES and not mean.has_ended:
                await mean.changed.wait()
                continue
            piece = mean.data[start : start + PIECE_BYTES]
            if not piece:
                return
            message = Mean(roster.lineage, roster.round, roster.attempt, mean.digest, start)
            try:
                await link.send_bulk(message, piece, Traffic.ROUND, compress=True)
            except PeerLostError:
                return
            start += len(piece)

    def receive(self, sender: PeerId, message: Mean, data: bytes) -> None:
        """Take a pushed piece. Stale pieces are ignored.

        After a gap the rest is ignored, too, and the mean is requested. A gap may be ours: what comes before the
        roster is not taken. Raises WireError if the mean is too large.
        """
        pushed = self._pushed.get(sender)
        if pushed is None or message.attempt != self._attempt or (pushed.digest and not message.digest):
            return
        if message.digest and not pushed.digest and message.start == 0:
            # Others contribute than were expected: the mean from the beginning.
            pushed.mean, pushed.digest, pushed.is_another = pushed.mean.emptied(), message.digest, False
        if message.start != pushed.mean.size_bytes or pushed.digest != message.digest:
            del self._pushed[sender]
            self._note_piece()
            return
        pushed.mean.extend(data)
        self._note_piece()

    def _note_piece(self) -> None:
        self._piece_arrived.set()
        self._piece_arrived = trio.Event()

    def await_none(self) -> None:
        """The attempt has ended: await no means any more."""
        self._pushed = {}

    async def take(
        self, part: Part, size: int, until_s: float, is_part: Callable[[Blob], Awaitable[bool]]
    ) -> Blob | None:
        """The part as its holder pushes it, once `is_part` says that its hash is right.

        None if it is another mean, stops coming or is not here in time; then no more of it is taken.
        """
        pushed = self._pushed.get(part.holder)
        if pushed is None:
            return None
        had, silent_s = -1, 0.0
        while self._pushed.get(part.holder) is pushed and pushed.digest in ("", part.digest):
            if pushed.mean.size_bytes == size and not pushed.is_another:
                mean, data = pushed.mean, pushed.mean.data
                if await is_part(data):
                    if self._pushed.get(part.holder) is pushed:
                        del self._pushed[part.holder]
                    return data
                pushed.is_another = pushed.mean is mean
                continue
            if pushed.is_another and pushed.digest:
                return None
            if pushed.mean.size_bytes != had:
                had, silent_s = pushed.mean.size_bytes, trio.current_time() + PIECE_TIMEOUT_S
            if trio.current_time() >= min(silent_s, until_s) or self._links.get(part.holder) is None:
                del self._pushed[part.holder]
                return None
            with trio.move_on_after(LOOK_AGAIN_S):
                await self._piece_arrived.wait()
        return None
