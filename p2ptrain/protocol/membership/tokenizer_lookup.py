"""Gets the run's tokenizer file from its members, as an observer, before this peer is one of them."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Collection

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import P2PTrainError, WireError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership.directory import directory_of
from p2ptrain.protocol.membership.lookup import Members, find_members, observer_links
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.transport import Directory, PeerId, Refusal, Transport, no_refusal

logger = logging.getLogger(__name__)

# Largest file that peers ask for and keep. Those of 50,257 ids have 1.4 to 3.6 MB.
MAX_TOKENIZER_BYTES = 8 * 2**20
PIECE_BYTES = 2**20
# To find the members, to open a link, for each piece, and for all that one donor sends: 8 MB at half a Mbit/s. A slower
# donor is left for another one.
FIND_S, CONNECT_S, PIECE_S, DONOR_S = 10.0, 10.0, 20.0, 120.0
# Donors tried, as most members have the file; and the time for all of them.
MOST_TRIED, ASK_S = 16, 500.0


async def ask_tokenizer(
    transport: Transport,
    directory: Directory,
    run_id: str,
    sha256: str,
    *,
    rng: random.Random,
    chosen: Collection[PeerId] = (),
    closed: ClosedRun | None = None,
    refusal: Refusal = no_refusal,
) -> bytes | None:
    """The file with this hex SHA-256 from one of the run's members; None if none that was tried gave it within ASK_S.

    The user's initial peers (`chosen`) are asked first, then others at random, MOST_TRIED in all.
    """
    directory = directory_of(directory, closed, transport.peer_id)
    errors = ErrorLog(logger)
    found: Members = {}
    async with observer_links(transport, run_id, closed, refusal) as links:
        with trio.move_on_after(FIND_S):
            found = await find_members(directory, run_id, transport.peer_id)
        members: dict[PeerId, tuple[str, ...]] = {peer_id: () for peer_id in chosen if peer_id != transport.peer_id}
        members |= {peer_id: maddrs for peer_id, (maddrs, _) in found.items()}
        order = sorted(members)
        rng.shuffle(order)
        order.sort(key=lambda peer_id: peer_id not in chosen)
        with trio.move_on_after(ASK_S):
            for peer_id in order[:MOST_TRIED]:
                with errors.containing(f"asking {peer_id} for the tokenizer"), trio.move_on_after(DONOR_S):
                    try:
                        if (file := await _download(links, peer_id, members[peer_id], sha256)) is not None:
                            return file
                    except P2PTrainError as error:
                        logger.debug("no tokenizer from %s: %s", peer_id, error)
    return None


async def _download(links: Links, peer_id: PeerId, maddrs: tuple[str, ...], sha256: str) -> bytes | None:
    """All pieces from one member; None if it does not have the file, or cannot be dialled in time.

    Raises WireError if what it sends is not the file, and PeerLostError if it stops answering.
    """
    link: Link | None = None
    with trio.move_on_after(CONNECT_S):
        link = await links.connect(peer_id, list(maddrs))
    if link is None:
        return None
    file = bytearray()
    for index in range(1 + MAX_TOKENIZER_BYTES // PIECE_BYTES):
        answer, piece = await links.request(link, "tokenizer", subject=sha256, index=index, timeout_s=PIECE_S)
        if not answer.found:
            return None
        file += piece
        if len(piece) != PIECE_BYTES:
            break
    if hashlib.sha256(file).hexdigest() != sha256:
        raise WireError(f"{peer_id}: its tokenizer is not that of the run")
    return bytes(file)


def tokenizer_piece(file: bytes, index: int) -> bytes | None:
    """Piece `index` of a file, PIECE_BYTES of it or the rest; None if it has no such piece, or is empty."""
    if not file or not 0 <= index <= len(file) // PIECE_BYTES:
        return None
    return file[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
