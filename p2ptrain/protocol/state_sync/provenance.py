"""Asks another peer for its head and its history, and decides whether to go on from there.

Nothing that one peer says decides: a head carries the signatures of its voters, and a history those of each round's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from p2ptrain.errors import PeerLostError, RunMismatchError, WireError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.history import (
    MAX_ENTRIES,
    check_entries,
    check_genesis,
    is_better,
    leads_to,
    name_of,
    shared,
    was_alone,
)
from p2ptrain.protocol.rounds.lineage import check_head, generation_of
from p2ptrain.protocol.wire.messages import Beat, Entry, Head, SignedHead, unpack
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

SHORT_TIMEOUT_S = 15.0
# Entries in an answer: 0.2 MB with 4 peers, at most 2 MB with 31 voters.
PAGE_ENTRIES = 64

Page = Annotated[tuple[Entry, ...], Meta(max_length=PAGE_ENTRIES)]


@dataclass(frozen=True)
class Pins:
    """What the user knows of the run, and a joining peer holds every head against.

    Attributes:
        anchor: the hash of a record that must be in the run's history, as 64 hex digits; "" for any.
        founder: the id of the peer that founded the run; "" for any.
    """

    anchor: str = ""
    founder: PeerId = ""


NO_PINS = Pins()


def encode_page(entries: Sequence[Entry]) -> bytes:
    """The answer to a request for a page of our history."""
    return msgspec.msgpack.encode(entries)


async def ask_head(context: RoundContext, link: Link) -> SignedHead:
    """A partner's head, signed by a quorum of its voters. Raises PeerLostError, WireError."""
    answer, payload = await context.links.request(link, "head", timeout_s=SHORT_TIMEOUT_S)
    if not answer.found:
        raise PeerLostError(f"{link.peer_id} cannot send its state now")
    signed = unpack(SignedHead, payload)
    check_head(signed.head)
    context.prover.check_head(signed)
    check_genesis(signed.genesis, signed.head, context.prover, context.run.digest)
    return signed


async def ask_history(context: RoundContext, link: Link, head: Head, ours: Sequence[Entry]) -> list[Entry]:
    """A partner's history up to a head of it, from an entry that we have too if there is one; each entry is proven.

    Takes a request for every 64 entries. Raises PeerLostError, WireError.
    """
    entries: list[Entry] = []
    known, before = {name_of(entry) for entry in ours}, ""
    while len(entries) < MAX_ENTRIES:
        answer, payload = await context.links.request(link, "history", before, timeout_s=SHORT_TIMEOUT_S)
        page = _unpack_page(payload) if answer.found else []
        if not page:
            break
        entries[:0] = page
        before = name_of(page[0])
        if any(name_of(entry) in known for entry in page):
            break
    await context.compute(check_entries, entries, context.prover)
    while entries and not leads_to(entries, head):
        entries.pop()  # rounds since the head was asked for
    if not entries:
        raise PeerLostError(f"{link.peer_id} has no history of its head")
    return entries


def _unpack_page(payload: bytes) -> list[Entry]:
    try:
        return list(msgspec.msgpack.decode(payload, type=Page))
    except ValueError as error:
        raise WireError(f"bad history: {error}") from None


def check_pins(pins: Pins, signed: SignedHead, entries: Sequence[Entry]) -> None:
    """Raises RunMismatchError unless this is the run that the user wants."""
    check_founder(pins, signed.genesis.founder)
    if pins.anchor and not any(entry.commit and name_of(entry) == pins.anchor for entry in entries):
        raise RunMismatchError(
            f"anchor = {pins.anchor}: the last {MAX_ENTRIES} rounds of the run do not have this record; give a newer "
            "one, or check that these are peers of your run"
        )


def check_founder(pins: Pins, founder: PeerId) -> None:
    """Raises RunMismatchError unless the user wants a run with this founder."""
    if pins.founder not in ("", founder):
        raise RunMismatchError(
            f"founder = {pins.founder}: the run that was found was founded by {shown(founder)}; check the id, or "
            "that these are peers of your run"
        )


def is_preferred(
    head: Head, ours: Sequence[Entry], other: Head, theirs: Sequence[Entry], present: Collection[PeerId],
    *, has_company: bool,
) -> bool:  # fmt: skip
    """Whether a peer at `head` goes on from another head. Both histories have been checked.

    Args:
        present: the voters of our head that are in our lineage now.
        has_company: whether other peers are at our round.
    """
    if shared(ours, theirs) is not None:
        return is_better(ours, theirs, present)
    if head.genesis == other.genesis:
        # Out of touch for longer than histories are kept: like a peer that joins, if there is nobody to lose.
        return not has_company
    # Two starts of one run: a peer that never had company joins those that have, or another such peer.
    return was_alone(ours) and (not was_alone(theirs) or rank_of(other) > rank_of(head))


def rank_of(place: Head | Beat) -> tuple[int, int, int, tuple[int, ...]]:
    """Sort key of states: most tokens, then youngest lineage, then latest round, then smallest lineage id."""
    return (
        place.tokens_total,
        generation_of(place.lineage),
        place.round,
        tuple(-ord(character) for character in place.lineage),
    )
