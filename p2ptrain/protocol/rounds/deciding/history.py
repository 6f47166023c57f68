"""The history of a run: its committed rounds and the foundings of its lineages, as one peer knows them. Pure.

Each entry is proved by the voters of the one before, so two peers whose histories share an entry can tell, without
trusting each other, whose lineage goes on:

- A lineage that goes on from the last shared entry with a committed round has the signatures of a quorum of its voters.
  No other lineage can have them too, unless voters sign twice.
- If neither does, voters were lost and lineages were founded: the one with more of the voters goes on, or else the one
  whose id is smaller. This changes only when another of these voters signs in one of them, not with each round, so
  both sides decide alike at any pace.
- Without a shared entry nothing is proved: see `state_sync.provenance.is_preferred`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.lineage import new_lineage
from p2ptrain.protocol.rounds.deciding.proof import Prover
from p2ptrain.protocol.rounds.deciding.record import check_size
from p2ptrain.protocol.rounds.deciding.voters import Voter
from p2ptrain.protocol.wire.messages import Commit, Entry, Founding, Head, pack
from p2ptrain.protocol.wire.transport import PeerId

# Entries kept in memory, so that a part of a swarm that was cut off can come back.
MAX_ENTRIES = 2048
# Of a history, packed. In memory about 2.2 times as much (computed). With a round every two minutes: nearly three days
# with 4 peers, nine hours with 64 contributors. A peer that compares a history with its own asks for no more.
MAX_HISTORY_BYTES = 8 * 1024 * 1024
# Entries that a checkpoint keeps, and that a joiner asks for.
RECENT_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where a history stands after an entry, and who may add the next committed round."""

    lineage: str
    round: int
    voters: tuple[Voter, ...]


def place_of(entry: Entry) -> Place:
    """The place after an entry. Raises WireError unless it is a commit or a founding."""
    match entry:
        case Entry(Commit() as commit, None):
            record = commit.record
            return Place(record.lineage, record.round, record.voters)
        case Entry(None, Founding() as founding):
            return Place(lineage_of(founding), founding.round, ((founding.founder, founding.incarnation),))
    raise WireError("an entry of a history that is not either a commit or a founding")


def lineage_of(founding: Founding) -> str:
    """The lineage that it begins."""
    return new_lineage(founding.parent, founding.round, founding.founder, founding.incarnation)


def name_of(entry: Entry) -> str:
    """What is equal for two peers' copies of an entry: their signatures may differ. Raises WireError."""
    if entry.commit is not None:
        return entry.commit.record.sha256
    place = place_of(entry)
    return f"{place.lineage}/{place.round}"


def check_genesis(genesis: Founding, head: Head, prover: Prover, digest: str) -> None:
    """Raises WireError unless this founding began the run of a head, with these settings."""
    prover.verify_founding(genesis)
    if (genesis.parent, genesis.round) != (digest, -1) or lineage_of(genesis) != head.genesis:
        raise WireError("the genesis of another run")
    if head.round < 0 and head.state_hash != genesis.state_hash:
        raise WireError("a head before the first round, with another state than the run was founded with")


def check_entries(entries: Sequence[Entry], prover: Prover) -> None:
    """Raises WireError unless each entry is proven by the one before."""
    place: Place | None = None
    before: Entry | None = None
    for entry in entries:
        if entry.founding is not None:
            prover.verify_founding(entry.founding)
            if place and (entry.founding.parent, entry.founding.round) != (place.lineage, place.round):
                raise WireError("a lineage that does not begin where the history stood")
        if entry.commit is not None:
            check_size(entry.commit.record)
        if entry.commit is not None and place is not None:
            record = entry.commit.record
            if (record.lineage, record.round) != (place.lineage, place.round + 1):
                raise WireError(f"round {record.round} of a history after round {place.round}")
            if before is not None and before.founding and before.founding.state_hash != record.parent_hash:
                raise WireError("a lineage whose first round starts from another state than it was founded with")
            prover.verify_commit(entry.commit, place.voters)
        place, before = place_of(entry), entry


def ends_at(entries: Sequence[Entry], head: Head) -> bool:
    """Whether a history stands at a head."""
    return bool(entries) and place_of(entries[-1]) == Place(head.lineage, head.round, head.voters)


def continues_from(entries: Sequence[Entry], head: Head) -> bool:
    """Whether a history has a head, and only committed rounds after it, each signed by a quorum of voters."""
    for entry in reversed(entries):
        if place_of(entry) == Place(head.lineage, head.round, head.voters):
            return True
        if entry.commit is None:
            return False
    return False


def is_rooted(entries: Sequence[Entry], genesis: str) -> bool:
    """Whether a history reaches back to the founding of its run: then each entry is proven, none only claimed."""
    return bool(entries) and name_of(entries[0]) == f"{genesis}/-1"


def is_unbroken(entries: Sequence[Entry], genesis: str) -> bool:
    """Whether a history is rooted and holds only rounds after the genesis; the founder signed the first."""
    return is_rooted(entries, genesis) and all(entry.commit is not None for entry in entries[1:])


def shared(ours: Sequence[Entry], theirs: Sequence[Entry]) -> tuple[int, int] | None:
    """The indices of the last entry that both histories have; None if there is none."""
    names = {name_of(entry): index for index, entry in enumerate(ours)}
    for index in range(len(theirs) - 1, -1, -1):
        own = names.get(name_of(theirs[index]))
        if own is not None:
            return own, index
    return None


def is_better(ours: Sequence[Entry], theirs: Sequence[Entry], present: Collection[PeerId]) -> bool:
    """Whether a peer leaves its history for another one that shares an entry with it; both have been checked.

    Args:
        present: the voters of our head that are in our lineage now, by our own links; none if the lineage has ended.
            They count while no round was committed since.
    """
    common = shared(ours, theirs)
    assert common is not None
    own, other = ours[common[0] + 1 :], theirs[common[1] + 1 :]
    if not other or (own and own[0].commit is not None):
        return False
    if other[0].commit is not None:
        return True
    # Lineages that were founded because the voters were lost. Not the longer one: both grow while they are compared.
    voters = [peer_id for peer_id, _ in place_of(ours[common[0]]).voters]
    mine = _support(voters, _signers(own) if own else present)
    others = _support(voters, _signers(other))
    if mine != others:
        return others > mine
    return not own or place_of(other[0]).lineage < place_of(own[0]).lineage


def _support(voters: Sequence[PeerId], peers: Collection[PeerId]) -> int:
    return sum(voter in peers for voter in voters)


def _signers(entries: Iterable[Entry]) -> set[PeerId]:
    found: set[PeerId] = set()
    for entry in entries:
        if entry.founding is not None:
            found.add(entry.founding.founder)
        if entry.commit is not None:
            found.update(vote.peer_id for vote in entry.commit.votes)
    return found


def is_continued(entries: Sequence[Entry], name: str) -> bool:
    """Whether a history has the record of this name, and only voters added to it since.

    That is, by quorums of voters, or by a lineage that one of the voters founded.
    """
    names = [name_of(entry) for entry in entries]
    if name not in names or entries[names.index(name)].commit is None:
        return False
    rest = entries[names.index(name) :]
    return all(
        entry.founding is None or entry.founding.founder in {peer_id for peer_id, _ in place_of(before).voters}
        for before, entry in pairwise(rest)
    )


def was_alone(entries: Iterable[Entry]) -> bool:
    """Whether no round of this history was committed by more than one peer."""
    return all(entry.commit is None or len(entry.commit.record.contributors) < 2 for entry in entries)


def merged(ours: Sequence[Entry], theirs: Sequence[Entry]) -> list[Entry]:
    """Their history, with what we know of the time before it."""
    common = shared(ours, theirs)
    return list(theirs) if common is None else [*ours[: common[0]], *theirs[common[1] :]]


class History:
    """The founding of the run, and the last entries of our own history, oldest first."""

    def __init__(self, genesis: Founding | None = None, entries: Sequence[Entry] = ()) -> None:
        self.genesis = genesis
        self.entries: list[Entry] = []
        self._sizes: list[int] = []
        self._size_bytes = 0
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add the entry that our head follows from now."""
        self.entries.append(entry)
        self._sizes.append(len(pack(entry)))
        self._size_bytes += self._sizes[-1]
        while len(self.entries) > MAX_ENTRIES or self._size_bytes > MAX_HISTORY_BYTES:
            self._size_bytes -= self._sizes[0]
            del self.entries[0], self._sizes[0]

    def page(self, before: str, count: int) -> list[Entry]:
        """The last `count` entries before the one of this name, oldest first; of all if the name is empty."""
        end = len(self.entries)
        if before:
            names = [name_of(entry) for entry in self.entries]
            end = names.index(before) if before in names else 0
        return self.entries[max(0, end - count) : end]
