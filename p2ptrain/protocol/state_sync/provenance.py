"""Asks another peer for its head and its history, verifies both, and decides whether to continue from there.

The word of one peer is not enough: a head has the signatures of its voters, and a history those of each round's voters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, NewType

import msgspec
import trio
from msgspec import Meta

from p2ptrain.errors import PeerLostError, RunMismatchError, WireError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.nursery import nursery_raising
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.history import (
    MAX_ENTRIES,
    MAX_HISTORY_BYTES,
    RECENT_ENTRIES,
    check_entries,
    check_genesis,
    continues_from,
    ends_at,
    is_better,
    is_continued,
    name_of,
    shared,
    was_alone,
)
from p2ptrain.protocol.rounds.deciding.lineage import check_head, generation_of
from p2ptrain.protocol.rounds.deciding.proof import Prover
from p2ptrain.protocol.wire.messages import Beat, Entry, Founding, Head, SignedHead, unpack
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import PeerId

# Time for a head and for a history. At 1 Mbit/s a history of 256 entries of 4 peers takes 7 s.
HEAD_TIMEOUT_S, HISTORY_TIMEOUT_S = 15.0, 30.0
# A linked donor that does not answer counts for this long, as its line or ours may be down (guess).
SILENT_S = 60.0
# Donors whose heads are compared (guess).
MOST_ASKED = 5
# Interval of requests to peers whose rounds wait for us: they wait 30 s for the next request.
DELAY_AGAIN_S = 10.0
# Entries in one answer: 0.2 MB with 4 peers, at most 2 MB with 31 voters.
PAGE_ENTRIES = 64

# Has a name, so that errors say what was bad.
HistoryPage = NewType("HistoryPage", Annotated[tuple[Entry, ...], Meta(max_length=PAGE_ENTRIES)])


@dataclass(frozen=True)
class Pins:
    """What the user knows of the run. No other run is joined, or continued from a checkpoint.

    Attributes:
        anchor: the hash of a record that must be in the run's history, as 64 hex digits; "" for any.
        founder: the id of the peer that founded the run; "" for any.
    """

    anchor: str = ""
    founder: PeerId = ""

    def allows_founding(self, peer_id: PeerId) -> bool:
        """Whether a run that this peer would found can be the one that the user wants."""
        return not self.anchor and self.founder in ("", peer_id)

    def check_founder(self, genesis: Founding) -> None:
        """Raises RunMismatchError unless the user wants a run with this founder."""
        if self.founder not in ("", genesis.founder):
            raise RunMismatchError(
                f"--founder {self.founder}: the run that was found was founded by {shown(genesis.founder)}; check the "
                "id, or that these are peers of your run"
            )

    def check(self, genesis: Founding, entries: Sequence[Entry]) -> None:
        """Raises RunMismatchError unless this founding and history are of the run that the user wants."""
        self.check_founder(genesis)
        if self.anchor and not is_continued(entries, self.anchor):
            raise RunMismatchError(
                f"--anchor {self.anchor}: the last {RECENT_ENTRIES} rounds of the run do not go on from this record; "
                "give a newer one, or check that these are peers of your run"
            )


NO_PINS = Pins()


class NotNowError(PeerLostError):
    """A donor cannot send its state at the moment. Ask again soon."""


class OvertakenError(NotNowError):
    """The requested state is gone: a round came first, and the donor has a newer state."""


async def ask_head(context: RoundContext, link: Link, times_overtaken: int = 0) -> SignedHead:
    """A partner's head, signed by a quorum of its voters.

    Args:
        times_overtaken: how many rounds in a row came before we had the state. The partner then delays the next one.

    Raises NotNowError if it cannot prove its head at the moment, PeerLostError, WireError.
    """
    answer, payload = await context.links.request(link, "head", index=times_overtaken, timeout_s=HEAD_TIMEOUT_S)
    if not answer.found:
        raise NotNowError(f"{link.peer_id} cannot send its state now")
    signed = unpack(SignedHead, payload)
    check_head(signed.head)

    def check() -> None:
        context.prover.verify_head(signed)
        check_genesis(signed.genesis, signed.head, context.prover, context.run.digest)

    await context.compute(check)
    return signed


class Silences:
    """Which donors have not answered requests on links that live, and for how long."""

    def __init__(self) -> None:
        # When the first of several requests in a row was sent, and the last one given up.
        self._spans_s: dict[tuple[Link, str], tuple[float, float]] = {}

    @contextlib.contextmanager
    def noting(self, donor: Link, what: str) -> Iterator[None]:
        """Note whether the donor answers the request in the block, unless it is cancelled."""
        asked_s, given_up_s = self._spans_s.get((donor, what), (0.0, -math.inf))
        if trio.current_time() - given_up_s > SILENT_S:
            asked_s = trio.current_time()  # long ago
        try:
            yield
        except (NotNowError, WireError, RunMismatchError):
            self._spans_s.pop((donor, what), None)
            raise
        except PeerLostError:
            self._spans_s[donor, what] = asked_s, trio.current_time()
            raise
        else:
            self._spans_s.pop((donor, what), None)

    def is_long(self, donor: Link) -> bool:
        """Whether a donor no longer counts."""
        spans = (span for (link, _), span in self._spans_s.items() if link is donor)
        return any(until_s - since_s >= SILENT_S for since_s, until_s in spans)


async def ask_heads(
    context: RoundContext,
    donors: Sequence[Link],
    times_overtaken: int,
    *,
    check: Callable[[Link, SignedHead], None] | None = None,
    silences: Silences | None = None,
    least: int = 1,
) -> tuple[Link, SignedHead]:
    """The head that more than half of the first `MOST_ASKED` donors have or lead to, and the first donor that has it.

    A head leads to another one if that one's history goes on from it by committed rounds. A liar may
    always answer, so a donor counts that cannot answer now, is lost, or (for SILENT_S) does not answer; one that is
    refused does not. Takes 45 s, or longer if donors answer other requests meanwhile.

    Args:
        check: raises RunMismatchError to refuse a donor for its head.
        silences: of earlier calls. Donors that are silent for long are only asked if there are no others.
        least: how many must have that head or lead to it.

    Raises PeerLostError if they do not agree now (NotNowError if all answered), WireError or RunMismatchError if none
    counts.
    """
    silences = Silences() if silences is None else silences
    asked = ([donor for donor in donors if not silences.is_long(donor)] or list(donors))[:MOST_ASKED]
    refused, unanswered = list[Exception](), list[Exception]()
    heads: dict[Link, SignedHead] = {}
    agreed: list[tuple[Link, SignedHead]] = []

    def agree(head: Head, entries: Sequence[Entry], of: int) -> None:
        """Take this head if more than half of so many have it, or by its history lead to it."""
        count = sum(is_same(head, other.head) or continues_from(entries, other.head) for other in heads.values())
        if 2 * count > of and count >= least:
            first = next(donor for donor in asked if donor in heads and is_same(heads[donor].head, head))
            agreed.append((first, heads[first]))
            nursery.cancel_scope.cancel()

    async def ask(donor: Link) -> None:
        try:
            with silences.noting(donor, "head"):
                signed = await ask_head(context, donor, times_overtaken)
            if check is not None:
                check(donor, signed)
        except (PeerLostError, WireError, RunMismatchError) as error:
            (unanswered if isinstance(error, PeerLostError) else refused).append(error)
        else:
            heads[donor] = signed
            agree(signed.head, (), len(asked))

    async def ask_back(donor: Link, head: Head) -> None:
        with contextlib.suppress(PeerLostError, WireError), silences.noting(donor, "history"):
            agree(head, await ask_history(context, donor, head, ()), len(heads) + len(unanswered))

    async with trio.open_nursery() as nursery:
        for donor in asked:
            nursery.start_soon(ask, donor)
    for signed in heads.values():
        agree(signed.head, (), len(heads) + len(unanswered))
    if not agreed and len(heads) > 1:
        async with trio.open_nursery() as nursery:
            for donor, signed in heads.items():
                nursery.start_soon(ask_back, donor, signed.head)
    if agreed:
        return agreed[0]
    if len(heads) > 1 or least > len(heads) > 0:
        # Next time they are asked to delay their round, so that they can agree.
        raise OvertakenError(
            "the peers that were asked show different states. If they still do after a minute, one lies or the run is "
            "split: name a member in --initial-peers"
        )
    raise (unanswered or refused)[0]


def is_same(head: Head, other: Head) -> bool:
    """Whether two heads are of one state and name the same voters. Their commits may have different votes."""
    return _without_votes(head) == _without_votes(other)


def _without_votes(head: Head) -> Head:
    return msgspec.structs.replace(head, commit=None)


@asynccontextmanager
async def delaying_rounds(context: RoundContext, donor: Link, times_overtaken: int) -> AsyncIterator[None]:
    """While the block runs, ask the donor's lineage to delay its next round, if rounds have overtaken our download."""

    async def ask(peer_id: PeerId) -> None:
        while True:
            if (link := context.links.get(peer_id)) is not None:
                with contextlib.suppress(PeerLostError, WireError):
                    await context.links.request(link, "head", index=times_overtaken, timeout_s=HEAD_TIMEOUT_S)
            await trio.sleep(DELAY_AGAIN_S)

    lineage = donor.beat.lineage if donor.beat is not None else ""
    members = [link.peer_id for link in context.links.trainers() if link.beat and link.beat.lineage == lineage != ""]
    async with nursery_raising(PeerLostError, WireError, RunMismatchError) as nursery:
        for peer_id in members if times_overtaken else ():
            nursery.start_soon(ask, peer_id)
        yield
        nursery.cancel_scope.cancel()


async def ask_history(context: RoundContext, link: Link, head: Head, ours: Sequence[Entry]) -> list[Entry]:
    """A partner's verified history up to its head. It begins before or at an entry that we have too, if there is one.

    Without entries of ours, only recent ones are requested. Makes a request for every 64 entries, and takes at most
    half a minute. Raises PeerLostError, WireError.
    """
    with trio.move_on_after(HISTORY_TIMEOUT_S):
        entries = await _ask_pages(context, link, {name_of(entry) for entry in ours})
        return await context.compute(_checked, entries, context.prover, head, link.peer_id)
    raise PeerLostError(f"{link.peer_id}: no history within {HISTORY_TIMEOUT_S:.0f} s")


async def _ask_pages(context: RoundContext, link: Link, known: Collection[str]) -> list[Entry]:
    entries: list[Entry] = []
    before, size_bytes = "", 0
    while len(entries) < (MAX_ENTRIES if known else RECENT_ENTRIES):
        answer, payload = await context.links.request(link, "history", before, timeout_s=HEAD_TIMEOUT_S)
        size_bytes += len(payload)
        page = unpack(HistoryPage, payload) if answer.found and size_bytes <= MAX_HISTORY_BYTES else ()
        if not page:
            break
        entries[:0] = page
        before = name_of(page[0])
        # Only the oldest page is not full. Without this check, a liar that repeats one entry is asked hundreds of
        # times.
        if len(page) < PAGE_ENTRIES or any(name_of(entry) in known for entry in page):
            break
    return entries


def _checked(entries: list[Entry], prover: Prover, head: Head, peer_id: PeerId) -> list[Entry]:
    check_entries(entries, prover)
    while entries and not ends_at(entries, head):
        entries.pop()  # rounds since the head was asked for
    if not entries:
        raise PeerLostError(f"{peer_id} has no history of its head")
    last = next((entry.commit.record for entry in reversed(entries) if entry.commit is not None), None)
    if last is not None and last != head.record:
        raise WireError("a head with another last record than its history")
    return entries


def is_preferred(
    head: Head,
    ours: Sequence[Entry],
    other: Head,
    theirs: Sequence[Entry],
    present: Collection[PeerId],
    *,
    is_trusted: bool,
) -> bool:
    """Whether a peer at `head` should continue from another head. Both histories have been checked.

    Args:
        present: the voters of our head that are in our lineage now.
        is_trusted: whether the other peer may be followed without a proof, as one that the user named.
    """
    common = shared(ours, theirs)
    if common is not None:
        after = theirs[common[1] + 1 :]
        founding = after[0].founding if common[0] == len(ours) - 1 and after else None
        # This lineage continues from our own head, so it must have our state.
        if founding is not None and founding.state_hash != head.state_hash:
            return False
        return is_better(ours, theirs, present)
    # Neither history proves anything about the other.
    if not is_trusted:
        return False
    if head.genesis == other.genesis:
        # We were away for longer than histories are kept, and follow a newer state of a trusted peer.
        return other.round > head.round
    # The run was started twice. A peer that committed all its rounds alone joins those that did not, or another such
    # one.
    return was_alone(ours) and (not was_alone(theirs) or rank_of(other) > rank_of(head))


def rank_of(place: Head | Beat) -> tuple[int, int, int, tuple[int, ...]]:
    """Sort key of states. The largest has most tokens, then the youngest lineage, the latest round, the smallest id."""
    return (
        place.tokens_total,
        generation_of(place.lineage),
        place.round,
        tuple(-ord(character) for character in place.lineage),
    )
