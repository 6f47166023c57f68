"""Audits: after some rounds one part is averaged again, by one of its contributors, from the contributors' own bytes.

A round is audited with probability `audit_rate`. The hash of its record decides whether, which part, and who audits, so
all peers know, and nobody knows before the record is made. Contributors keep their chunks of that part for a while. The
record has the Merkle roots of all contributions, and the part's hash covers contributors and weights; so whoever has
the chunks can tell whether the part is their mean. Every strategy reduces the same bytes to the same bits.

An auditor that finds another mean accuses. Every other peer then averages the part again itself. If the reducer
lied, the peers that got the false part from it strike it. If the accusation is false, all of them strike the auditor.
Only the round's auditor can accuse, once, so a false accusation costs one more transfer of that part.

Audits have two gaps. Without the bytes of all contributors there is no verdict; a reducer that withholds its own is
avoided. And a leader can try records until the hash draws an accomplice of the reducer as the auditor.
"""

from __future__ import annotations

import enum
import hashlib
import logging
from dataclasses import dataclass

import trio

from p2ptrain.algorithms.codec import Encoded
from p2ptrain.algorithms.merkle import HASH_BYTES, MAX_PROOF, leaf_hash
from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.limits import MAX_STRIKES
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.nursery import fetch_pipelined
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.averaging import Chunks
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.deciding.record import part_digest
from p2ptrain.protocol.rounds.deciding.timeouts import SILENT_REDUCER_S
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution
from p2ptrain.protocol.wire.messages import Accuse, Answer, Contributor, Part, Record, Request
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

# Chunks are kept until the next round has landed, and no longer than this (guess).
KEEP_S = 300.0
# Timeout of a request for one chunk, the same as for a piece of a part.
CHUNK_TIMEOUT_S = 20.0
# Contributors asked at once (guess).
ASKED_AT_ONCE = 4
# A contributor may land later than the auditor: it is asked again after these waits.
WAITS_S = (0.25, 1.0, 2.0, 4.0, 8.0)


class Verdict(enum.Enum):
    """The result of averaging a part again. WITHHELD: only its reducer's own bytes are missing."""

    FITS = "fits"
    DIFFERS = "differs"
    WITHHELD = "withheld"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Draw:
    """The audited part, by its number in the record, and its auditor."""

    part: int
    auditor: PeerId


def draw_of(record: Record, rate: float) -> Draw | None:
    """The audit of a committed round, the same for all peers; None if there is none."""
    digest = hashlib.sha256(b"audit" + record.sha256.encode()).digest()
    chance, part, auditor = (int.from_bytes(digest[i : i + 8], "big") for i in (0, 8, 16))
    if chance >= rate * 2**64 or not all(c.root for c in record.contributors):
        return None
    number = part % len(record.parts)
    others = sorted(c.peer_id for c in record.contributors if c.peer_id != record.parts[number].holder)
    return Draw(number, others[auditor % len(others)]) if others else None


@dataclass(slots=True, eq=False)
class Audited:
    """A round that is audited.

    Attributes:
        grid: of its round.
        from_holder: whether we got the part from its reducer itself, before the round was decided.
        chunks: our own of the part in order, then the Merkle proof; empty if we did not contribute.
        accused: whether its auditor has accused.
    """

    record: Record
    grid: Grid
    draw: Draw
    from_holder: bool
    chunks: list[bytes]
    accused: bool = False

    @property
    def part(self) -> Part:
        return self.record.parts[self.draw.part]


def _copy_of(own: OwnContribution, bounds: list[tuple[int, int]]) -> list[bytes]:
    """Some of our encoded chunks."""
    return [bytes(own.chunks[start]) for start, _ in bounds]


class Audits:
    """The audit of the last round: keeps and serves our chunks of its part, audits, and checks accusations."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._links, self._compute = context.links, context.compute
        self._last: Record | None = None
        self._audited: Audited | None = None
        self._checking = trio.Lock()

    async def keep(self, record: Record, own: OwnContribution | None) -> None:
        """A round is applied here: if it is audited, keep our chunks of the part, until the next call."""
        self._last, self._audited = record, None
        draw = draw_of(record, self._context.run.audit_rate)
        if draw is None:
            return
        part, grid, chunks = record.parts[draw.part], self._context.grid, list[bytes]()
        # After the decision a reducer may also pass on a part that it did not make.
        from_holder = self._context.parts.accepted == record and self._context.parts.giver(part.digest) == part.holder
        roots = {c.peer_id: c.root for c in record.contributors}
        if own is not None and own.tree is not None and own.tree.root == roots.get(self._context.peer_id):
            chunks = await self._compute(_copy_of, own, grid.bounds(part.start, part.stop))
            chunks.append(b"".join(own.tree.proof(*grid.numbers(part.start, part.stop))))
        self._audited = Audited(record, grid, draw, from_holder, chunks)

    async def audit(self) -> None:
        """Audit the last round if it is ours to audit."""
        audited = self._audited
        if audited is None:
            return
        record, draw = audited.record, audited.draw
        if draw.auditor == self._context.peer_id:
            match await self._verify(audited):
                case Verdict.DIFFERS:
                    for link in self._links.trainers():
                        link.send(Accuse(record.lineage, record.round, draw.part))
                    self._strike_reducer(audited)
                case Verdict.WITHHELD:
                    holder = audited.part.holder
                    logger.warning("round %d: reducer %s withholds its audit data", record.round, holder)
                    self._context.avoided.note(holder, trio.current_time(), SILENT_REDUCER_S)

    async def expire(self) -> None:
        """Drop our chunks of the last round after a while."""
        audited = self._audited
        if audited is None:
            return
        await trio.sleep(KEEP_S)
        if self._audited is audited:
            self._audited = None

    def accepts(self, sender: PeerId, accusation: Accuse) -> Audited | None:
        """The audit to check after an accusation; None if it is of another round, repeated, or against us.

        Raises WireError if the sender is not the auditor of that part.
        """
        record, audited = self._last, self._audited
        if record is None or (record.lineage, record.round) != (accusation.lineage, accusation.round):
            return None
        draw = draw_of(record, self._context.run.audit_rate)
        if draw is None or (draw.auditor, draw.part) != (sender, accusation.part):
            raise WireError(f"an accusation in round {record.round}, which it does not audit")
        if audited is None or audited.accused or audited.part.holder == self._context.peer_id:
            return None
        audited.accused = True
        return audited

    async def check(self, sender: PeerId, audited: Audited) -> None:
        """Check an accusation that was accepted, and strike the peer that lied.

        Args:
            audited: what `accepts` returned. Another round may have landed since.
        """
        round_, part = audited.record.round, audited.draw.part
        match await self._verify(audited):
            case Verdict.DIFFERS:
                self._strike_reducer(audited)
            case Verdict.FITS:
                self._links.strike(sender, f"it accused the reducer of part {part} of round {round_} falsely")
            case _:
                logger.info("round %d: the accusation of %s cannot be checked", round_, sender)

    async def serve(self, link: Link, request: Request) -> None:
        """Answer a request for one of our chunks, by its place in the part; the last index has the Merkle proof."""
        audited = self._audited
        chunks = audited.chunks if audited is not None and audited.record.sha256 == request.subject else []
        found = 0 <= request.index < len(chunks)
        answer = Answer(request.request, found, "contribution")
        await link.send_bulk(answer, chunks[request.index] if found else b"", Traffic.STATE, compress=True)

    def _strike_reducer(self, audited: Audited) -> None:
        round_, part, holder = audited.record.round, audited.draw.part, audited.part.holder
        if audited.from_holder:
            # Proved: refused at once.
            wrong = f"it reported a wrong mean of part {part} of round {round_}"
            self._links.strike(holder, wrong, count=MAX_STRIKES)
        else:
            logger.warning("round %d: part %d is false, but reducer %s did not give it to us", round_, part, holder)

    async def _verify(self, audited: Audited) -> Verdict:
        """Average the part again."""
        async with self._checking:
            record, part, missing = audited.record, audited.part, set[PeerId]()
            chunks: Chunks = {}
            limiter = trio.CapacityLimiter(ASKED_AT_ONCE)
            link = next((self._link_to(c) for c in record.contributors if c.peer_id == part.holder), None)

            async def ask(c: Contributor) -> None:
                async with limiter:
                    try:
                        chunks[c.peer_id] = await self._chunks_of(c, audited)
                    except PeerLostError as error:
                        logger.debug("round %d: no bytes for its audit: %s", record.round, error)
                        missing.add(c.peer_id)
                    except WireError as error:
                        missing.add(c.peer_id)
                        self._links.strike(c.peer_id, f"its outer gradient of round {record.round}: {error}")

            async with trio.open_nursery() as nursery:
                for c in record.contributors:
                    nursery.start_soon(ask, c)
            if missing:
                stayed = link is not None and self._links.get(part.holder) is link and not link.lost.is_set()
                withheld = stayed and missing == {part.holder} and self._audited is audited
                return Verdict.WITHHELD if withheld else Verdict.UNKNOWN
            bounds = audited.grid.bounds(part.start, part.stop)
            try:
                blobs = await self._compute(self._context.averaging.reduce, bounds, chunks, record.contributors)
            except WireError:
                return Verdict.DIFFERS  # no honest reducer can have averaged these bytes
            digest = await self._compute(part_digest, blobs[0], record.contributors, (part.start, part.stop))
            verdict = Verdict.FITS if digest == part.digest else Verdict.DIFFERS
            what = f"part {audited.draw.part}, averaged by {part.holder}"
            logger.info("round %d: audit of %s: it %s", record.round, what, verdict.value)
            return verdict

    async def _chunks_of(self, c: Contributor, audited: Audited) -> dict[int, Encoded]:
        """A contributor's chunks of the part by first block, checked by its root. Raises PeerLostError, WireError."""
        part, grid = audited.part, audited.grid
        bounds = grid.bounds(part.start, part.stop)
        if c.peer_id != self._context.peer_id:
            got = await self._fetch(c, audited, len(bounds) + 1)
        elif audited.chunks:
            got = dict(enumerate(audited.chunks))
        else:
            raise PeerLostError("our own are gone")
        sizes = [self._context.codec.size_bytes(stop - start) for start, stop in bounds]
        proof = got.pop(len(bounds))
        if [len(got[i]) for i in range(len(bounds))] != sizes or len(proof) % HASH_BYTES:
            raise WireError("chunks of another size")

        def check() -> None:
            hashes = [proof[i : i + HASH_BYTES] for i in range(0, len(proof), HASH_BYTES)]
            leaves = [leaf_hash(got[i]) for i in range(len(bounds))]
            grid.check_leaves(leaves, part.start, hashes, c.root)

        await self._compute(check)
        return {start: got[i] for i, (start, _) in enumerate(bounds)}

    async def _fetch(self, c: Contributor, audited: Audited, count: int) -> dict[int, bytes]:
        """All chunks and the proof of one contributor, by index. Raises PeerLostError if it does not give them."""
        most_bytes = max(self._context.codec.size_bytes(audited.grid.chunk_blocks), MAX_PROOF * HASH_BYTES)
        got: dict[int, bytes] = {}

        async def fetch_chunk(index: int) -> None:
            got[index] = await self._request(c, audited.record.sha256, index)
            if len(got[index]) > most_bytes:
                raise WireError("a chunk that is too large")

        await fetch_pipelined(count, fetch_chunk)
        return got

    def _link_to(self, c: Contributor) -> Link | None:
        """The link to a contributor; None if it has left or started anew since."""
        link = self._links.get(c.peer_id)
        is_there = link is not None and not link.lost.is_set() and link.hello.incarnation == c.incarnation
        return link if is_there else None

    async def _request(self, c: Contributor, subject: str, index: int) -> bytes:
        for wait_s in (*WAITS_S, None):
            if (link := self._link_to(c)) is None:
                raise PeerLostError(f"{c.peer_id} is gone")
            answer, data = await self._links.request(link, "contribution", subject, index, timeout_s=CHUNK_TIMEOUT_S)
            if answer.found:
                return data
            if wait_s is not None:
                await trio.sleep(wait_s)
        raise PeerLostError(f"{c.peer_id} does not have its chunks")
