"""The blobs of the last round, by hash: held by READY members, and fetched by those whom no reducer pushed them to."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.nursery import fetch_pipelined, nursery_raising
from p2ptrain.protocol.rounds.deciding.averaging import Averaging, Blob
from p2ptrain.protocol.rounds.deciding.record import part_digest
from p2ptrain.protocol.rounds.deciding.timeouts import SLOWEST_BYTES_S
from p2ptrain.protocol.rounds.moving.pushed_means import PIECE_BYTES, PIECE_TIMEOUT_S, PushedMeans
from p2ptrain.protocol.wire.messages import Answer, Contributor, Part, Record, Request
from p2ptrain.protocol.wire.transport import Compute, PeerId

# Parts of one record fetched at once; each takes memory from its first piece on (guess).
PARTS_AT_ONCE = 8
# Records whose parts were fetched last, which may be needed whether they were accepted or not.
WANTED_RECORDS = 2
# After this long without a request only a part's holder keeps it (guess). A member that waits for a reducer's push in
# vain asks others after PIECE_TIMEOUT_S.
KEEP_ALL_S = 30.0


def part_limit_s(mean_bytes: int) -> float:
    """The longest that one peer may take for one part of a mean of this size.

    Time to fall silent once and be asked again, and that of the whole mean on the slowest line: a giver's line carries
    its part to all members, and ours carries all parts.
    """
    return 2 * PIECE_TIMEOUT_S + mean_bytes / SLOWEST_BYTES_S


class _NotThereError(PeerLostError):
    """The peer answers, but does not have the part."""


@dataclass(frozen=True, slots=True)
class _RecordFetch:
    """The fetch of one record's parts.

    Attributes:
        limit_s: the longest that a giver may take for one part, however steadily its bytes come.
        pushed_s: likewise for a reducer that pushes it.
        failed: givers too slow, silent or with wrong bytes, which are asked for no other part of the record.
    """

    record: Record
    limit_s: float
    pushed_s: float
    failed: set[PeerId] = field(default_factory=set)
    at_once: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(PARTS_AT_ONCE))


class PartStore:
    """Owns the bytes. Parts of unfinished attempts are dropped when a round commits, and bounded before that.

    Only the last round is kept for late members: a mean takes a quarter of the model's bytes (int8), and a member that
    is later than a whole interval replaces its state instead. If nobody is late, its parts go when the next snapshot is
    prepared. Otherwise the parts that others hold go `KEEP_ALL_S` after the last request, and all when the next
    round is applied.

    Args:
        pushed: where the means arrive that reducers push.
        spare_bytes: at most so much is kept of what we reduced in attempts that ended without an outcome.

    Attributes:
        accepted: the record that we are READY with, as `Attempts` sets it; its parts are kept.
        asked_s: when we gave somebody a piece of a part last.
    """

    def __init__(
        self, links: Links, compute: Compute, averaging: Averaging, pushed: PushedMeans, spare_bytes: int = 0
    ) -> None:
        self.accepted: Record | None = None
        self.asked_s = -math.inf
        self._links = links
        self._compute = compute
        self._averaging = averaging
        self._pushed = pushed
        self._spare_bytes = spare_bytes
        self._wanted: list[Record] = []
        self._reduced: list[str] = []
        self._parts: dict[str, Blob] = {}
        self._givers: dict[str, PeerId] = {}
        self._committed: Record | None = None
        self._kept: list[str] = []

    def add(self, digest: str, data: Blob) -> None:
        """Keep a part that we reduced, whose hash is known to be right."""
        self._parts[digest] = data
        self._reduced.append(digest)

    def get(self, digest: str) -> Blob:
        return self._parts[digest]

    def giver(self, digest: str) -> PeerId | None:
        """The peer that gave us a part; None if we made it or do not have it."""
        return self._givers.get(digest)

    def keep(self, record: Record) -> None:
        """Keep a committed record, and drop all parts that it does not name."""
        self._committed, self._kept = record, [part.digest for part in record.parts]
        self._wanted, self._reduced = [], []
        self._pushed.await_none()
        self._drop_all_but(self._kept)

    def end_attempt(self) -> None:
        """An attempt ended without an outcome: await no means; of what we reduced, keep the newest within bounds."""
        self._pushed.await_none()
        kept: list[str] = []
        left_bytes = self._spare_bytes
        for digest in reversed(self._reduced):
            left_bytes -= len(self._parts.get(digest, b""))
            if left_bytes < 0:
                break
            kept.insert(0, digest)
        self._reduced = kept
        self._forget_unneeded()

    def is_last(self, record: Record) -> bool:
        """Whether this is the record that was committed last."""
        return record == self._committed

    def trim(self, holders: Collection[PeerId]) -> None:
        """Of the last round's parts, keep those of these holders; late members ask them."""
        if self._committed is not None:
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
        if piece:
            self.asked_s = trio.current_time()
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
        sizes = [self._averaging.size_bytes(record, part) for part in record.parts]
        # Means are pushed to members only. Who is not drawn asks, so a giver's line may carry more than one mean.
        asked = max(sum(sizes), len(others) * max(sizes))
        fetch = _RecordFetch(record, part_limit_s(asked), part_limit_s(sum(sizes)))
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
        size = self._averaging.size_bytes(fetch.record, part)
        is_part = functools.partial(self._is_part, part, fetch.record.contributors)
        async with fetch.at_once:
            for holder in dict.fromkeys(holders):
                link = self._links.get(holder)
                if link is None or holder in fetch.failed:
                    continue
                now, data = trio.current_time(), None
                if holder == part.holder:
                    data = await self._pushed.take(part, size, now + fetch.pushed_s, is_part)
                if data is None:
                    try:
                        with trio.fail_at(now + fetch.limit_s):
                            data = await self._fetch_from(link, part, size)
                        if data is not None and not await is_part(data):
                            # No strike: a made-up record may name another part's hash.
                            raise WireError("another part than its record names")
                    except (PeerLostError, WireError, trio.TooSlowError):
                        fetch.failed.add(holder)
                        continue
                if data is not None:
                    self._parts[part.digest], self._givers[part.digest] = data, holder
                    return
        raise PeerLostError(f"no peer has part [{part.start}, {part.stop})")

    async def _is_part(self, part: Part, contributors: Sequence[Contributor], data: Blob) -> bool:
        return await self._compute(part_digest, data, contributors, (part.start, part.stop)) == part.digest

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
