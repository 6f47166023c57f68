"""Moves the run's whole state: donors serve it, and another peer downloads it.

Anchor and moments come in chunks, from several donors in parallel. The manifest (the list of chunk hashes) comes in
pages and is checked against the hash in the donor's head. Every chunk is checked against the manifest. Verified chunks
are kept when a donor is lost.

A round that the swarm commits during the download changes every chunk. Then the received chunks are updated with the
round's encoded mean, an eighth of the bytes. So a download ends even on a slow link with frequent rounds.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.anchor import AnchorState, chunk_hash
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.averaging import Blobs, check_decodes
from p2ptrain.protocol.rounds.deciding.record import check_record
from p2ptrain.protocol.rounds.deciding.timeouts import SLOWEST_BYTES_S
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.rounds.landing.outer_step import Progress, step_chunk
from p2ptrain.protocol.state_sync.provenance import PAGE_ENTRIES, OvertakenError
from p2ptrain.protocol.wire.messages import Answer, Head, Record, Request, pack

logger = logging.getLogger(__name__)

# Eight chunks of 256 KiB take 8 s at 2 Mbit/s (the slowest link that we test), and other peers may be joining too.
CHUNK_TIMEOUT_S = 60.0
# Requests in flight per donor. Two hide the round trip of a slow link, and each chunk that takes less than QUICK_S adds
# one: 24 of 256 KiB fill 500 Mbit/s at a round trip of 100 ms. A donor serves 32 at once (`node.requests`). Chunks in
# flight are wasted when the swarm commits a round.
PER_DONOR = 2
MOST_PER_DONOR = 24
QUICK_S = 0.5
# A chunk that a donor owes for so long is also requested from one that is idle. So long a download goes on after half
# of the donors have another state (guess).
OWED_S = 5.0
# How often an idle donor looks for such chunks.
IDLE_S = 0.1
# A page of the manifest has 256 KiB, like a chunk; it covers 134M parameters with one moment.
MANIFEST_PAGE_HASHES = 4096
# Size of the pieces in which model buffers (such as running means) are sent.
BUFFER_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ModelBuffers:
    """Serializes and loads the model's buffers.

    Attributes:
        read: serializes ours.
        load: takes those of another peer. Raises WireError if they do not fit the model.
        most_bytes: how many bytes those have at most; 0 if none are wanted.
    """

    read: Callable[[], bytes]
    load: Callable[[bytes], None]
    most_bytes: Callable[[], int]


class StateServer:
    """Answers requests for this peer's head, history, manifest, chunks and model buffers.

    Buffers change at every training step. They are serialized when the first piece is requested, at most once for each
    state, and kept until they are serialized again. An answer contains the hash of that state, and the request for the
    next piece repeats it, so that pieces of two serializations do not mix.
    """

    def __init__(self, driver: RoundDriver, buffers: Callable[[], bytes]) -> None:
        self._driver = driver
        self._state = driver.context.state
        self._compute = driver.context.compute
        self._buffers = buffers
        self._packing = trio.Lock()
        self._packed_of = ""
        self._packed = b""

    async def serve(self, link: Link, request: Request) -> None:
        """Answer one request, or say that it cannot be answered now, as in the midst of an outer step."""
        payload, note = None, request.what
        if request.what == "buffers":
            payload, note = await self._buffers_piece(request)
        elif self._driver.head.lineage and not self._driver.committer.stepping:
            payload = await self._payload(request)
            if self._driver.committer.stepping:
                payload = None
        answer = Answer(request.request, payload is not None, note)
        await link.send_bulk(answer, payload or b"", Traffic.STATE, compress=True)

    async def _payload(self, request: Request) -> bytes | None:
        """The requested bytes; None if not available. Chunks of an old state would be useless, and are not sent."""
        current = request.subject == self._driver.head.state_hash
        match request.what:
            case "head":
                signed = self._driver.signed_head
                return pack(signed) if signed is not None else None
            case "history":
                return pack(self._driver.history.page(request.subject, PAGE_ENTRIES))
            case "manifest" if current and 0 <= request.index < num_pages(self._state.num_chunks):
                start = request.index * MANIFEST_PAGE_HASHES
                return "".join(self._state.hashes.chunks[start : start + MANIFEST_PAGE_HASHES]).encode()
            case "chunk" if current and 0 <= request.index < self._state.num_chunks:
                chunk = await self._compute(self._state.chunk(request.index).tobytes)
                # Other worker threads may have taken an outer step meanwhile.
                return chunk if request.subject == self._driver.head.state_hash else None
        return None

    async def _buffers_piece(self, request: Request) -> tuple[bytes | None, str]:
        """A piece of the serialized buffers, and the state that it belongs to; None if that serialization is gone."""
        async with self._packing:
            now = self._driver.head
            if request.index == 0 and now.lineage and self._packed_of != now.state_hash:
                self._packed = await self._compute(self._buffers)
                self._packed_of = now.state_hash
        start = request.index * BUFFER_PIECE_BYTES
        # The last piece is shorter than the others, or empty: so the joiner sees that there are no more.
        there = self._packed_of and 0 <= start <= len(self._packed)
        if not there or (request.index and request.subject != self._packed_of):
            return None, request.what
        return self._packed[start : start + BUFFER_PIECE_BYTES], self._packed_of


def num_pages(num_chunks: int) -> int:
    """Number of manifest pages for this many chunks."""
    return -(-num_chunks // MANIFEST_PAGE_HASHES)


async def ask_buffers(links: Links, link: Link, most_bytes: int) -> bytes:
    """The serialized buffers of a partner's model.

    Raises PeerLostError, also if they take longer than on the slowest line, or WireError.
    """
    data, packing = bytearray(), ""
    with trio.move_on_after(CHUNK_TIMEOUT_S + most_bytes / SLOWEST_BYTES_S):
        while len(data) <= most_bytes:
            index = len(data) // BUFFER_PIECE_BYTES
            answer, payload = await links.request(link, "buffers", packing, index, timeout_s=CHUNK_TIMEOUT_S)
            if not answer.found:
                raise PeerLostError(f"{link.peer_id} sends no buffers now, or has serialized them again")
            packing = answer.note
            if len(payload) > BUFFER_PIECE_BYTES:
                raise WireError(f"{len(payload)} bytes of buffers, expected at most {BUFFER_PIECE_BYTES}")
            data += payload
            if len(payload) < BUFFER_PIECE_BYTES:
                return bytes(data)
        raise WireError(f"{link.peer_id} sends more than {most_bytes} bytes of buffers")
    raise PeerLostError(f"{link.peer_id} takes too long to send its buffers")


class _Chunks:
    """Decides which chunk to request from which donor. No chunk waits long for one donor while another is idle."""

    def __init__(self, missing: Iterable[int]) -> None:
        self._missing = deque(missing)
        # Requested and not here: since when, and from whom.
        self._owed: dict[int, tuple[float, list[Link]]] = {}
        self._slowest_s: dict[Link, float] = {}

    @property
    def left(self) -> int:
        """How many are not here yet."""
        return len(self._missing) + len(self._owed)

    def take(self, donor: Link, now: float) -> int | None:
        """The chunk to request next from a donor; None if it has nothing to do now.

        What others owe is requested after OWED_S, and after twice as long as any chunk of this donor took.
        """
        if self._missing:
            index = self._missing.popleft()
        else:
            since_s = now - max(OWED_S, 2 * self._slowest_s.get(donor, 0.0))
            owed = (i for i, (asked_s, donors) in self._owed.items() if asked_s <= since_s and donor not in donors)
            if (index := next(owed, -1)) < 0:
                return None
        _, donors = self._owed.pop(index, (now, []))
        self._owed[index] = now, [*donors, donor]
        return index

    def note_arrived(self, donor: Link, index: int, took_s: float) -> None:
        """A donor has sent a chunk; another one may have been faster."""
        self._slowest_s[donor] = max(self._slowest_s.get(donor, 0.0), took_s)
        self._owed.pop(index, None)

    def note_failed(self, donor: Link, index: int) -> None:
        """A donor will not send a chunk."""
        if index in self._owed:
            _, donors = self._owed[index]
            donors.remove(donor)
            if not donors:
                del self._owed[index]
                self._missing.append(index)


class Download:
    """Downloads the state of a head into an `AnchorState`. Keeps verified chunks between calls of `run`.

    Args:
        state: receives the chunks. Chunks that already have the right hashes are not fetched.

    Attributes:
        done_chunks: how many are verified.
        failed: donors that did not answer, or sent something else. They are not asked again, but for the first one.
    """

    def __init__(self, context: RoundContext, state: AnchorState) -> None:
        self.state = state
        self.done_chunks = 0
        self.failed = set[Link]()
        self._context = context
        self._held: dict[int, str] = dict(enumerate(state.hashes.chunks))
        self._held_of = state.hashes.state

    @property
    def progress(self) -> float:
        """Share of verified chunks."""
        return self.done_chunks / self.state.num_chunks

    async def run(self, head: Head, donors: Sequence[Link]) -> None:
        """Fetch the state of `head`, which the first donor has. Call it again with other donors after an error.

        Raises OvertakenError if a donor has another state by now, PeerLostError if donors fail for other reasons, and
        WireError if the state is not finite.
        """
        donors = [*donors[:1], *(donor for donor in donors[1:] if donor not in self.failed)]
        hashes = await self._manifest(head, donors)
        if head.record is not None and head.record.parent_hash == self._held_of:
            await self._roll_forward(head.record, donors)
        self._held = {i: wanted for i, wanted in enumerate(hashes) if self._held.get(i) == wanted}
        self._held_of = head.state_hash
        self.done_chunks = len(self._held)
        overtaken = await self._fetch_missing(head, hashes, donors) if self.done_chunks < len(hashes) else False
        if self.done_chunks < len(hashes):
            lost = OvertakenError if overtaken else PeerLostError
            raise lost(f"{len(hashes) - self.done_chunks} of {len(hashes)} state chunks are missing")
        if not await self._context.compute(self.state.is_finite):
            raise WireError(f"the state of round {head.round} contains NaN or infinity")
        self.state.hashes = self.state.combine(hashes)

    async def _fetch_missing(self, head: Head, hashes: Sequence[str], donors: Sequence[Link]) -> bool:
        """Fetch the chunks that are not here, as far as donors give them. Returns whether one has another state."""
        chunks = _Chunks(i for i in range(len(hashes)) if i not in self._held)
        overtaken = set[Link]()
        in_flight = Counter(dict.fromkeys(donors, PER_DONOR))

        async def fetch_chunks(donor: Link) -> None:
            """Fetch chunks, one after the other, until all are here or the donor fails."""
            while chunks.left:
                asked_s = trio.current_time()
                if (index := chunks.take(donor, asked_s)) is None:
                    await trio.sleep(IDLE_S)
                    continue
                try:
                    await self._fetch_chunk(donor, head, index, hashes[index])
                except (PeerLostError, WireError) as error:
                    logger.info("state chunk %d from %s: %s", index, donor.peer_id, error)
                    chunks.note_failed(donor, index)
                    if not isinstance(error, OvertakenError):
                        self.failed.add(donor)
                        return
                    overtaken.add(donor)
                    if 2 * len(overtaken) >= len(donors):  # the others soon are, or hold us up
                        scope = nursery.cancel_scope
                        scope.deadline = min(scope.deadline, trio.current_time() + OWED_S)
                    return
                took_s = trio.current_time() - asked_s
                chunks.note_arrived(donor, index, took_s)
                self.done_chunks = len(hashes) - chunks.left
                if took_s < QUICK_S and in_flight[donor] < MOST_PER_DONOR:
                    in_flight[donor] += 1
                    nursery.start_soon(fetch_chunks, donor)
            nursery.cancel_scope.cancel()  # what is still on its way is here from another donor

        self._context.links.bulk.open_soon(donors)
        async with trio.open_nursery() as nursery:
            for donor in donors:
                for _ in range(PER_DONOR):
                    nursery.start_soon(fetch_chunks, donor)
        return bool(overtaken)

    async def _roll_forward(self, record: Record, donors: Sequence[Link]) -> None:
        """Apply a round's outer step to the received chunks. If that fails, they are fetched again."""
        state = self.state
        try:
            grid = self._context.grids.of_record(record)
            check_record(record, self._context.run, self._context.averaging, grid)
            if grid.section is not None:
                return  # it changed few chunks
            whole = [bounds for bounds in grid.chunks if self._held.keys() >= set(state.chunks_within(*bounds))]
            mean_bytes = sum(self._context.averaging.size_bytes(record, part) for part in record.parts)
            blocks = sum(stop - start for start, stop in whole)
            if blocks * len(state.vectors) * state.anchor[0].nbytes < mean_bytes:
                return  # fetching the chunks again takes fewer bytes
            parts = self._context.parts
            await parts.fetch(record, [donor.peer_id for donor in donors])
            if parts.holders_missed(record):
                raise PeerLostError("a round of our own lineage dropped its parts")
            # Kept here, as such a round may come at any time.
            blobs = {part.digest: parts.get(part.digest) for part in record.parts}
        except (PeerLostError, WireError) as error:
            logger.info("received state chunks cannot be updated with the round's mean: %s", error)
            return
        for bounds in whole:
            await self._context.compute(self._step_chunks, bounds, record, blobs.__getitem__)

    def _step_chunks(self, bounds: tuple[int, int], record: Record, blobs: Blobs) -> None:
        """Apply the outer step to one chunk of the grid, of anchor and moments, and rehash it.

        It is one or several chunks of the state. The mean decodes only as a whole chunk of the grid.
        """
        try:
            check_decodes(self._context.averaging, record, blobs, self.state.num_stepped, bounds)
        except WireError:
            return
        step_chunk(self.state, self._context.averaging, Progress(record), blobs, None, bounds)
        for chunk in self.state.chunks_within(*bounds):
            self._held[chunk] = self.state.chunk_hash(chunk)

    async def _manifest(self, head: Head, donors: Sequence[Link]) -> list[str]:
        """The hashes of all chunks, from the first donor whose list matches the head. Raises PeerLostError."""
        overtaken = False
        for donor in donors:
            try:
                hashes = await self._ask_manifest(head, donor)
            except (PeerLostError, WireError) as error:
                logger.info("manifest from %s: %s", donor.peer_id, error)
                overtaken = overtaken or isinstance(error, OvertakenError)
                if not isinstance(error, OvertakenError):
                    self.failed.add(donor)
                continue
            if self.state.combine(hashes).state == head.state_hash:
                return hashes
            logger.info("manifest from %s: its hash is wrong", donor.peer_id)
        raise (OvertakenError if overtaken else PeerLostError)("no donor has the manifest of this head")

    async def _ask_manifest(self, head: Head, donor: Link) -> list[str]:
        """All pages of a donor's manifest, not verified yet. Raises PeerLostError, WireError."""
        hashes: list[str] = []
        for page in range(num_pages(self.state.num_chunks)):
            expected = min(MANIFEST_PAGE_HASHES, self.state.num_chunks - len(hashes))
            text = (await self._ask(donor, "manifest", head, page, 64 * expected)).decode("ascii", "replace")
            hashes += (text[i : i + 64] for i in range(0, len(text), 64))
        return hashes

    async def _fetch_chunk(self, donor: Link, head: Head, index: int, expected: str) -> None:
        target = self.state.chunk(index)
        payload = await self._ask(donor, "chunk", head, index, target.nbytes)
        if await self._context.compute(chunk_hash, payload) != expected:
            raise WireError("its hash is wrong")
        target[:] = np.frombuffer(payload, np.float32).reshape(target.shape)
        self._held[index] = expected

    async def _ask(self, donor: Link, what: str, head: Head, index: int, size_bytes: int) -> bytes:
        """A page of the manifest or a chunk, of this size. Raises PeerLostError, WireError."""
        links = self._context.links
        answer, payload = await links.request(donor, what, head.state_hash, index, timeout_s=CHUNK_TIMEOUT_S)
        if not answer.found:
            raise OvertakenError("the donor has a newer state")
        if len(payload) != size_bytes:
            raise WireError(f"{len(payload)} bytes, expected {size_bytes}")
        return payload
