"""The attacks that once ended peers or destroyed their model, each as a function of a liar and what it knows.

They run against the memory network (`test_attacks.py`) and against real processes (`make hostile`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from p2ptrain.algorithms.codec import codec as codec_named
from p2ptrain.algorithms.fragments import Walk, slot_blocks
from p2ptrain.protocol.rounds.deciding.history import lineage_of
from p2ptrain.protocol.wire.messages import (
    Answer,
    Attempt,
    Beat,
    Commit,
    Entry,
    Founding,
    Fragment,
    Head,
    Landed,
    Message,
    Record,
    Request,
    SignedHead,
    Vote,
    pack,
)
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig
from tests.hostile.liar import Liar, Sent


@dataclass(frozen=True)
class Known:
    """What a liar has learnt by linking to a peer: the run, its size, and the last head and founding."""

    run: RunConfig
    num_blocks: int
    head: Head
    genesis: Founding


Frames = Callable[[Liar, Known], Iterator[Sent]]


@dataclass(frozen=True)
class Attack:
    """A row of the table.

    Attributes:
        frames: what is sent to every victim, frame by frame, for as long as the attack takes.
        every_s: seconds between two frames.
        takes_s: how long it goes on.
        takes_over: whether the liar also gives out a state of its own.
    """

    frames: Frames
    every_s: float = 0.1
    takes_s: float = 7.0
    takes_over: bool = False


def next_record(known: Known, **lie: Any) -> Record:
    """A record of the round after the head, with lies in it."""
    head = known.head
    assert head.record is not None
    return msgspec.structs.replace(
        head.record, lineage=head.lineage, round=head.round + 1, parent_hash=head.state_hash, **lie
    )


def commits(*lies: dict[str, Any]) -> Frames:
    """Commits of forged records, with the liar's own vote, and with that vote in the names of all others."""

    def frames(liar: Liar, known: Known) -> Iterator[Sent]:
        for lie in itertools.cycle(lies):
            mine = liar.commit(next_record(known, **lie))
            yield mine, b""
            (vote,) = mine.votes
            voters = known.head.voters
            votes = tuple(Vote(peer_id, incarnation, vote.signature) for peer_id, incarnation in voters)
            yield Commit(mine.record, mine.attempt, votes), b""

    return frames


def beats(**lie: Any) -> Frames:
    """Heartbeats from the place of the honest peers but for the lies."""

    def frames(liar: Liar, known: Known) -> Iterator[Sent]:
        head = known.head
        plain = Beat(
            0.0, 0.0, 0.0, head.genesis, head.lineage, head.round + 1, head.tokens_total, head.run_step, "training",
            10.0, (), 1,
        )  # fmt: skip
        while True:
            yield msgspec.structs.replace(plain, **lie), b""

    return frames


def fragments(value: float) -> Frames:
    """Fragments that have this value everywhere, of all slots one after the other."""

    def frames(liar: Liar, known: Known) -> Iterator[Sent]:
        run, walk = known.run, Walk.of(known.run.fragment_fraction)
        for position in itertools.count():
            cycle, slot = divmod(position, walk.num_slots)
            count = len(slot_blocks(run.run_seed, cycle, slot, 1, walk.num_slots, known.num_blocks))
            payload = codec_named(run.fragment_codec).encode(np.full((count, 64), value, dtype=np.float32))
            head = known.head
            yield Fragment(
                head.lineage, head.round + position % 2, run.fragment_selection, cycle, slot, 1, walk.num_slots, 0.0
            ), payload  # fmt: skip

    return frames


def landings(liar: Liar, known: Known) -> Iterator[Sent]:
    """Landed under heads that nobody has."""
    for number in itertools.count():
        head = msgspec.structs.replace(known.head, round=known.head.round + 1, state_hash=f"{number:064x}")
        yield liar.prover.landed(head), b""
        yield Landed(head.lineage, head.round, known.head.voters[0][1], b"\0" * 64), b""


def crowd(count: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Members that do not exist."""
    return tuple((f"ghost{number}", (f"/memory/ghost{number}/p2p/ghost{number}",)) for number in range(count))


HUGE = 2**63 - 1
ATTACKS: dict[str, Attack] = {
    "Commit, intervals of 0": Attack(commits({"intervals": (("a", 0), ("b", 0), ("c", 0))})),
    "Commit, run_step of 10^12": Attack(commits({"run_step": 10**12})),
    "Commit, outer_lr of 10^30": Attack(commits({"outer_lr": 1e30})),
    "Beat of 10^15 tokens, and a state of its own": Attack(beats(tokens_total=10**15), takes_over=True),
    "Beat of lineage x-y, and a state of its own": Attack(beats(lineage="x-y", tokens_total=10**15), takes_over=True),
    "Beat of 2^63 - 1 tokens in every counter": Attack(
        beats(tokens_total=HUGE, round=HUGE, step=HUGE, reach=HUGE), takes_over=True
    ),
    "Beat of a lineage that it founded, from our head": Attack(beats(), takes_over=True),
    "fragments of 10^15, 40 a second": Attack(fragments(1e15), 1 / 40, 30.0),
    "fragments of zeros, 1000 a second": Attack(fragments(0.0), 1 / 1000),
    "Beat that names 2,800 members": Attack(beats(members=crowd(2800))),
    "Beats that name 4 members, 200 a second": Attack(beats(members=crowd(4)), 1 / 200),
    "Landed under made-up heads": Attack(landings, 1 / 100),
}


def take_over(liar: Liar, known: Known) -> None:
    """Give out a state of its own: a lineage that the liar founded from the head, and a round that it committed alone.

    Everything is signed by the liar, who can sign for no other voter.
    """
    head, me = known.head, (liar.peer_id, liar.incarnation)
    founding = liar.prover.founding(head.lineage, head.round, head.state_hash)
    lineage = lineage_of(founding)
    record = next_record(known, genesis=head.genesis, tokens_total=head.tokens_total + 320)
    contributor = msgspec.structs.replace(record.contributors[0], peer_id=me[0], incarnation=me[1], weight=1.0)
    record = msgspec.structs.replace(record, lineage=lineage, contributors=(contributor,), voters=(me,))
    commit = liar.commit(record, Attempt(1, *me))
    mine = msgspec.structs.replace(
        head, lineage=lineage, round=record.round, state_hash="f" * 64, anchor_hash="e" * 64, voters=(me,),
        run_step=record.run_step, tokens_total=record.tokens_total, commit=commit,
    )  # fmt: skip
    signed = SignedHead(mine, (Vote(*me, liar.prover.signature_of(mine)),), known.genesis)
    page = pack([Entry(None, founding), Entry(commit, None)])

    told = {"head": pack(signed), "history": page, "manifest": b"f" * 64, "chunk": b"\x7f" * 256 * 1024}
    place: dict[str, Any] = {"lineage": lineage, "round": record.round, "tokens_total": 10**15}

    def serve(request: Request) -> tuple[Answer, bytes]:
        return Answer(request.request, True, request.what), told.get(request.what, b"")

    def edit(to: PeerId, message: Message, payload: bytes) -> list[Sent]:
        """The same of a member, whose node answers and makes beats."""
        match message:
            case Answer(note=what) if what in told:
                return [(msgspec.structs.replace(message, found=True), told[what])]
            case Beat():
                return [(msgspec.structs.replace(message, **place), payload)]
        return [(message, payload)]

    liar.serve, liar.transport.edit = serve, edit
    liar.beat = msgspec.structs.replace(liar.beat, genesis=head.genesis, **place)
