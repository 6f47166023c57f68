"""The blobs of the last round, by hash: served by reducers, held by READY members, fetched by late members."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from p2ptrain.error_log import innermost
from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.link import Link, Traffic
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.averaging.strategy import Averaging
from p2ptrain.protocol.wire.messages import Answer, Contributor, Part, Record, Request, pack
from p2ptrain.protocol.wire.transport import Compute, PeerId

# One piece of a part on the wire: small, so that control frames can pass in between.
PIECE_BYTES = 128 * 1024
# Pieces requested at once from one peer, to hide the round trip (guess).
PIPELINE = 4
# After this time a piece is requested from another peer (a 64 KiB/s link takes 2 s; guess).
PIECE_TIMEOUT_S = 20.0
# Parts of one record fetched at once; each takes memory from its first piece on (guess).
PARTS_AT_ONCE = 8
# Records whose parts were fetched last, which may be needed whether they were accepted or not.
WANTED_RECORDS = 2
# After this long only a part's holder keeps it: late members fetch within seconds (guess).
KEEP_ALL_S = 30.0


def blob_sha256(blob: bytes | bytearray, contributors: Sequence[Contributor], bounds: tuple[int, int]) -> str:
    """The hash that names a part in a record.

    Where contributors commit to their chunks it covers them, their weights and the part's blocks too, so that a leader
    cannot pass off the mean of other contributors, with other weights or of another part, as that of a reducer.
    """
    hashed = hashlib.sha256()
    if any(contributor.root for contributor in contributors):
        hashed.update(b"%d-%d" % bounds)
    for contributor in contributors:
        if contributor.root:
            hashed.update(pack(contributor))
    hashed.update(blob)
    return hashed.hexdigest()


async def fetch_pipelined(count: int, fetch: Callable[[int], Awaitable[None]]) -> None:
    """Fetch pieces 0 to `count` - 1 from one peer, `PIPELINE` at once. Raises the first PeerLostError or WireError."""
    indices = iter(range(count))

    async def fetch_some() -> None:
        for index in indices:
            await fetch(index)

    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(PIPELINE):
                nursery.start_soon(fetch_some)
    except* (PeerLostError, WireError) as errors:
        failure = innermost(errors)
    # Not above: beside a cancellation it would become a group, which no `except` expects.
    if failure is not None:
        raise failure


class PartStore:
    """Owns the bytes. Parts of unfinished attempts are dropped when a round commits, and bounded before that.

    Only the last round is kept for late members: a mean takes a quarter of the model's bytes (int8), and a member that
    is later than a whole interval replaces its state instead.

    Args:
        spare_bytes: at most so much is kept of what we reduced in attempts that ended without an outcome.

    Attributes:
        accepted: the record that we are READY with, or None; its parts are kept.
    """

    def __init__(self, links: Links, compute: Compute, averaging: Averaging, *, spare_bytes: int = 0) -> None:
        self.accepted: Callable[[], Record | None] = lambda: None
        self._spare_bytes = spare_bytes
        self._wanted: list[Record] = []
        self._reduced: list[str] = []
        self._links = links
        self._compute = compute
        self._averaging = averaging
        self._parts: dict[str, bytes | bytearray] = {}
        self._givers: dict[str, PeerId] = {}
        self._committed: Record | None = None

    def add(self, sha256: str, data: bytes | bytearray) -> None:
        """Keep a part that we reduced, whose hash is known to be right."""
        self._parts[sha256] = data
        self._reduced.append(sha256)

    def get(self, sha256: str) -> bytes | bytearray:
        return self._parts[sha256]

    def giver(self, sha256: str) -> PeerId | None:
        """The peer that gave us a part; None if we made it or do not have it."""
        return self._givers.get(sha256)

    def keep(self, record: Record) -> None:
        """Keep a committed record, and drop all parts that it does not name."""
        self._committed = record
        self._wanted, self._reduced = [], []
        self._drop_all_but(part.sha256 for part in record.parts)

    def end_attempt(self) -> None:
        """An attempt ended without an outcome: of what we reduced, keep the newest within bounds."""
        kept: list[str] = []
        left_bytes = self._spare_bytes
        for sha256 in reversed(self._reduced):
            left_bytes -= len(self._parts.get(sha256, b""))
            if left_bytes < 0:
                break
            kept.insert(0, sha256)
        self._reduced = kept
        self._forget_unneeded()

    def trim(self, record: Record, own: PeerId) -> None:
        """Of the last record, keep only the parts that we hold for all; late members ask the holders first."""
        if self._committed == record:
            self._drop_all_but(part.sha256 for part in record.parts if part.holder == own)

    def _forget_unneeded(self) -> None:
        records = [record for record in (self._committed, *self._wanted, self.accepted()) if record is not None]
        self._drop_all_but([*self._reduced, *(part.sha256 for record in records for part in record.parts)])

    def _drop_all_but(self, sha256s: Iterable[str]) -> None:
        named = set(sha256s)
        self._parts = {sha256: data for sha256, data in self._parts.items() if sha256 in named}
        self._givers = {sha256: giver for sha256, giver in self._givers.items() if sha256 in named}

    async def serve(self, link: Link, request: Request) -> None:
        """Answer a request for one piece of a part."""
        data = self._parts.get(request.subject, b"")
        piece = memoryview(data)[request.index * PIECE_BYTES : (request.index + 1) * PIECE_BYTES]
        answer = Answer(request.request, len(piece) > 0, "part")
        await link.send_bulk(answer, bytes(piece), Traffic.ROUND, compress=True)

    async def fetch(self, record: Record, others: Sequence[PeerId]) -> None:
        """Fetch all parts of a record, each from its holder or else from another peer. Raises PeerLostError.

        Forgets parts of records before the last ones, unless those were accepted or committed.
        """
        self._wanted = [*(wanted for wanted in self._wanted if wanted != record), record][-WANTED_RECORDS:]
        self._forget_unneeded()
        at_once = trio.CapacityLimiter(PARTS_AT_ONCE)
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                for part in record.parts:
                    if part.sha256 not in self._parts:
                        size = self._averaging.size_bytes(record, part)
                        holders = [part.holder, *others]
                        nursery.start_soon(self._fetch_part, part, size, record.contributors, holders, at_once)
        except* PeerLostError as errors:
            failure = innermost(errors)
        if failure is not None:
            raise failure

    def holders_missed(self, record: Record) -> set[PeerId]:
        """The holders of those parts of a record that we do not have."""
        return {part.holder for part in record.parts if part.sha256 not in self._parts}

    async def _fetch_part(
        self, part: Part, size: int, contributors: Sequence[Contributor], holders: Sequence[PeerId],
        at_once: trio.CapacityLimiter,
    ) -> None:  # fmt: skip
        async with at_once:
            for holder in dict.fromkeys(holders):
                link = self._links.get(holder)
                if link is None:
                    continue
                try:
                    data = await self._fetch_from(link, part, size)
                except (PeerLostError, WireError):
                    continue
                if await self._compute(blob_sha256, data, contributors, (part.start, part.stop)) == part.sha256:
                    self._parts[part.sha256] = data
                    self._givers[part.sha256] = holder
                    return
        raise PeerLostError(f"no peer has part [{part.start}, {part.stop})")

    async def _fetch_from(self, link: Link, part: Part, size: int) -> bytearray:
        data = bytearray()

        async def fetch_piece(index: int) -> None:
            answer, piece = await self._links.request(link, "part", part.sha256, index, timeout_s=PIECE_TIMEOUT_S)
            start = index * PIECE_BYTES
            if not answer.found:
                raise PeerLostError(f"{link.peer_id} does not have the part")
            if len(piece) != min(PIECE_BYTES, size - start):
                raise WireError(f"piece {index} has {len(piece)} bytes")
            if not data:
                data.extend(bytes(size))  # only now: who has none of it costs no memory
            data[start : start + len(piece)] = piece

        await fetch_pipelined(-(-size // PIECE_BYTES), fetch_piece)
        return data
