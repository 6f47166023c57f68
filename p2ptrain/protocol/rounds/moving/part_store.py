"""The blobs of the last round, by hash: pushed by reducers, held by READY members, fetched by late members.

A reducer pushes the mean of its part to all members of the attempt while it makes it, before the record that names it.
Who does not get it so requests it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio
from blake3 import blake3

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.nursery import nursery_raising
from p2ptrain.protocol.rounds.deciding.averaging import Averaging, Blob
from p2ptrain.protocol.rounds.deciding.timeouts import SLOWEST_BYTES_S
from p2ptrain.protocol.wire.messages import Answer, Attempt, Contributor, Mean, Part, Record, Request, Roster, pack
from p2ptrain.protocol.wire.transport import Compute, PeerId

# One piece of a part on the wire: small, so that control frames can pass in between.
PIECE_BYTES = 128 * 1024
# Pieces requested at once from one peer, to hide the round trip (guess).
PIPELINE = 4
# After this time a piece is requested from another peer (a 64 KiB/s link takes 2 s; guess).
PIECE_TIMEOUT_S = 20.0
# While a pushed mean is awaited, so often it is noticed that its reducer was lost.
LOOK_AGAIN_S = 1.0
# Parts of one record fetched at once; each takes memory from its first piece on (guess).
PARTS_AT_ONCE = 8
# Records whose parts were fetched last, which may be needed whether they were accepted or not.
WANTED_RECORDS = 2
# After this long only a part's holder keeps it (guess). A member that waits for a reducer's push in vain asks others
# after PIECE_TIMEOUT_S.
KEEP_ALL_S = 30.0


def blob_digest(blob: Blob, contributors: Sequence[Contributor], bounds: tuple[int, int]) -> str:
    """The hash that names a part in a record.

    Where contributors commit to their chunks it covers them, their weights and the part's blocks too, so that a leader
    cannot pass off the mean of other contributors, with other weights or of another part, as that of a reducer.
    """
    hashed = blake3()
    if any(contributor.root for contributor in contributors):
        hashed.update(b"%d-%d" % bounds)
    for contributor in contributors:
        if contributor.root:
            hashed.update(pack(contributor))
    hashed.update(blob)
    return hashed.hexdigest()


def part_limit_s(mean_bytes: int) -> float:
    """The longest that one peer may take for one part of a mean of this size: to fall silent, and to be asked then.

    As long as the whole mean takes on the slowest line: a giver's carries its part to all members, and ours all parts.
    """
    return 2 * PIECE_TIMEOUT_S + mean_bytes / SLOWEST_BYTES_S


async def fetch_pipelined(count: int, fetch: Callable[[int], Awaitable[None]]) -> None:
    """Fetch pieces 0 to `count` - 1 from one peer, `PIPELINE` at once. Raises the first PeerLostError or WireError."""
    indices = iter(range(count))

    async def fetch_some() -> None:
        for index in indices:
            await fetch(index)

    async with nursery_raising(PeerLostError, WireError) as nursery:
        for _ in range(PIPELINE):
            nursery.start_soon(fetch_some)


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


class _NotThereError(PeerLostError):
    """The peer answers, but does not have the part."""


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


@dataclass(frozen=True, slots=True)
class _RecordFetch:
    """The fetch of one record's parts.

    Attributes:
        limit_s: the longest that a giver may take for one part, however steadily its bytes come.
        failed: givers too slow, silent or with wrong bytes, which are asked for no other part of the record.
    """

    record: Record
    limit_s: float
    failed: set[PeerId] = field(default_factory=set)
    at_once: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(PARTS_AT_ONCE))


class PartStore:
    """Owns the bytes. Parts of unfinished attempts are dropped when a round commits, and bounded before that.

    Only the last round is kept for late members: a mean takes a quarter of the model's bytes (int8), and a member that
    is later than a whole interval replaces its state instead. Its parts go when we prepare the next snapshot and nobody
    is late; else after `KEEP_ALL_S` all but those that we hold, and these when the next round is applied.

    Args:
        mean_bytes: the most bytes that the encoded mean of so many blocks has.
        spare_bytes: at most so much is kept of what we reduced in attempts that ended without an outcome.

    Attributes:
        mean_bytes: as given.
        accepted: the record that we are READY with, as `Attempts` sets it; its parts are kept.
    """

    def __init__(
        self,
        links: Links,
        compute: Compute,
        averaging: Averaging,
        mean_bytes: Callable[[int], int],
        spare_bytes: int = 0,
    ) -> None:
        self.accepted: Record | None = None
        self.mean_bytes = mean_bytes
        self._spare_bytes = spare_bytes
        self._attempt: Attempt | None = None
        self._pushed: dict[PeerId, _Pushed] = {}
        self._piece_arrived = trio.Event()
        self._to_push, self._pushes = trio.open_memory_channel[tuple[Link, MeanPush]](math.inf)
        self._wanted: list[Record] = []
        self._reduced: list[str] = []
        self._links = links
        self._compute = compute
        self._averaging = averaging
        self._parts: dict[str, Blob] = {}
        self._givers: dict[str, PeerId] = {}
        self._committed: Record | None = None
        self._kept: list[str] = []

    def add(self, digest: str, data: Blob) -> None:
        """Keep a part that we reduced, whose hash is known to be right."""
        self._parts[digest] = data
        self._reduced.append(digest)

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
        """Take a pushed piece. Stale ones are ignored, and all that follow a gap: that mean is requested.

        A gap may be ours: what comes before the roster is not taken. Raises WireError if the mean is too large.
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

    def get(self, digest: str) -> Blob:
        return self._parts[digest]

    def giver(self, digest: str) -> PeerId | None:
        """The peer that gave us a part; None if we made it or do not have it."""
        return self._givers.get(digest)

    def keep(self, record: Record) -> None:
        """Keep a committed record, and drop all parts that it does not name."""
        self._committed, self._kept = record, [part.digest for part in record.parts]
        self._wanted, self._reduced, self._pushed = [], [], {}
        self._drop_all_but(self._kept)

    def end_attempt(self) -> None:
        """An attempt ended without an outcome: await no means; of what we reduced, keep the newest within bounds."""
        self._pushed = {}
        kept: list[str] = []
        left_bytes = self._spare_bytes
        for digest in reversed(self._reduced):
            left_bytes -= len(self._parts.get(digest, b""))
            if left_bytes < 0:
                break
            kept.insert(0, digest)
        self._reduced = kept
        self._forget_unneeded()

    def trim(self, holders: Collection[PeerId], record: Record | None = None) -> None:
        """Of the last record, or only if it is this one, keep the parts of these holders; late members ask them."""
        if self._committed is not None and record in (None, self._committed):
            self._kept = [part.digest for part in self._committed.parts if part.holder in holders]
            self._forget_unneeded()

    def _forget_unneeded(self) -> None:
        records = [record for record in (*self._wanted, self.accepted) if record is not None]
        named = (part.digest for record in records for part in record.parts)
        self._drop_all_but([*self._kept, *self._reduced, *named])

    def _drop_all_but(self, digests: Iterable[str]) -> None:
        named = set(digests)
        self._parts = {digest: data for digest, data in self._parts.items() if digest in named}
        self._givers = {digest: giver for digest, giver in self._givers.items() if digest in named}

    async def serve(self, link: Link, request: Request) -> None:
        """Answer a request for one piece of a part."""
        data = self._parts.get(request.subject, b"")
        piece = memoryview(data)[request.index * PIECE_BYTES : (request.index + 1) * PIECE_BYTES]
        answer = Answer(request.request, len(piece) > 0, "part")
        await link.send_bulk(answer, piece, Traffic.ROUND, compress=True)

    async def fetch(self, record: Record, others: Sequence[PeerId], having: Sequence[PeerId] = ()) -> None:
        """Fetch all parts of a record, each from its holder or else from another peer. Raises PeerLostError.

        Forgets parts of records before the last ones, unless those were accepted or committed.

        Args:
            having: peers that have all parts. Each of them is the first to be asked for some parts, so that none has to
                send all.
            others: peers to ask then.
        """
        self._wanted = [*(wanted for wanted in self._wanted if wanted != record), record][-WANTED_RECORDS:]
        self._forget_unneeded()
        fetch = _RecordFetch(
            record, part_limit_s(sum(self._averaging.size_bytes(record, part) for part in record.parts))
        )
        async with nursery_raising(PeerLostError) as nursery:
            for i, part in enumerate(record.parts):
                if part.digest not in self._parts:
                    first = i % len(having) if having else 0
                    holders = [part.holder, *having[first:], *having[:first], *others]
                    nursery.start_soon(self._fetch_part, fetch, part, holders)

    def holders_missed(self, record: Record) -> set[PeerId]:
        """The holders of those parts of a record that we do not have."""
        return {part.holder for part in record.parts if part.digest not in self._parts}

    async def _fetch_part(self, fetch: _RecordFetch, part: Part, holders: Sequence[PeerId]) -> None:
        size, contributors = self._averaging.size_bytes(fetch.record, part), fetch.record.contributors
        async with fetch.at_once:
            for holder in dict.fromkeys(holders):
                link = self._links.get(holder)
                if link is None or holder in fetch.failed:
                    continue
                until_s, data = trio.current_time() + fetch.limit_s, None
                if holder == part.holder:
                    data = await self._take_pushed(part, size, contributors, until_s)
                if data is None:
                    try:
                        with trio.fail_at(until_s):
                            data = await self._fetch_from(link, part, size)
                        if data is not None and not await self._is_part(part, data, contributors):
                            # No strike: a made-up record may name another part's hash.
                            raise WireError("another part than its record names")
                    except (PeerLostError, WireError, trio.TooSlowError):
                        fetch.failed.add(holder)
                        continue
                if data is not None:
                    self._parts[part.digest], self._givers[part.digest] = data, holder
                    return
        raise PeerLostError(f"no peer has part [{part.start}, {part.stop})")

    async def _is_part(self, part: Part, data: Blob, contributors: Sequence[Contributor]) -> bool:
        return await self._compute(blob_digest, data, contributors, (part.start, part.stop)) == part.digest

    async def _take_pushed(
        self, part: Part, size: int, contributors: Sequence[Contributor], until_s: float
    ) -> Blob | None:
        """The part as its holder pushes it, once its hash is right.

        None if it is another mean, stops coming or is not here in time; then no more of it is taken.
        """
        pushed = self._pushed.get(part.holder)
        if pushed is None:
            return None
        had, silent_s = -1, 0.0
        while self._pushed.get(part.holder) is pushed and pushed.digest in ("", part.digest):
            if pushed.mean.size_bytes == size and not pushed.is_another:
                mean, data = pushed.mean, pushed.mean.data
                if await self._is_part(part, data, contributors):
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

    async def _fetch_from(self, link: Link, part: Part, size: int) -> Blob | None:
        """A part as one peer gives it; None if it does not have it. Raises PeerLostError or WireError."""
        data = memoryview(b"")

        async def fetch_piece(index: int) -> None:
            nonlocal data
            answer, piece = await self._links.request(link, "part", part.digest, index, timeout_s=PIECE_TIMEOUT_S)
            start = index * PIECE_BYTES
            if not answer.found:
                raise _NotThereError(f"{link.peer_id} does not have the part")
            if len(piece) != min(PIECE_BYTES, size - start):
                raise WireError(f"piece {index} has {len(piece)} bytes")
            if not data:
                data = np.empty(size, np.uint8).data  # only now: who has none of it costs no memory
            data[start : start + len(piece)] = piece

        try:
            await fetch_pipelined(-(-size // PIECE_BYTES), fetch_piece)
        except _NotThereError:
            return None
        return data
