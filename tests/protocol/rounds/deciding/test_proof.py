"""Signatures of READY, heads and foundings: what a quorum has not signed, or signed for something else, is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.proof import MAX_EARLY, HeadVotes
from p2ptrain.protocol.wire.messages import (
    MAX_VOTERS,
    Attempt,
    Commit,
    Contributor,
    Head,
    Landed,
    Part,
    Ready,
    SignedHead,
    Vote,
    pack,
)
from tests.protocol.signing import genesis_of, prover_of, record_after, signed_by, signed_head

DIGEST = "d" * 64
RECORD = record_after("0-g", "0-x", 5, "abc")
VOTERS = RECORD.voters
HEAD = Head("0-g", "0-x", 5, "state", "anchor", VOTERS, 5, 5, Commit(RECORD, Attempt(1, "a", "a.1"), ()))


def check(commit: Commit) -> None:
    prover_of("x", DIGEST).verify_commit(commit, VOTERS)


@pytest.mark.parametrize("names", ["ab", "bc", "ca", "abc"])
def test_a_quorum_of_the_voters_proves_a_commit(names: str) -> None:
    check(signed_by(names, RECORD, DIGEST))


@pytest.mark.parametrize("names", ["a", "c", "xyz"])
def test_fewer_or_others_do_not(names: str) -> None:
    with pytest.raises(WireError, match="without a quorum"):
        check(signed_by(names, RECORD, DIGEST))


def test_a_repeated_vote_counts_once() -> None:
    commit = signed_by("c", RECORD, DIGEST)
    with pytest.raises(WireError, match="without a quorum"):
        check(msgspec.structs.replace(commit, votes=commit.votes * 3))


def test_a_stranger_beside_the_quorum_is_refused() -> None:
    """Else records of one round would differ in what they carry."""
    with pytest.raises(WireError, match="votes of others"):
        check(signed_by("abx", RECORD, DIGEST))


@pytest.mark.parametrize(
    "forge",
    [
        lambda c: msgspec.structs.replace(c, record=msgspec.structs.replace(c.record, outer_lr=2.0)),
        lambda c: msgspec.structs.replace(c, record=msgspec.structs.replace(c.record, round=6)),
        lambda c: msgspec.structs.replace(c, record=msgspec.structs.replace(c.record, lineage="0-y")),
        lambda c: msgspec.structs.replace(c, attempt=Attempt(2, "a", "a.1")),
        lambda c: msgspec.structs.replace(c, votes=tuple(Vote("c", "c.1", v.signature) for v in c.votes)),
        lambda c: msgspec.structs.replace(c, votes=(c.votes[0], Vote("b", "b.1", c.votes[0].signature))),
        lambda c: msgspec.structs.replace(c, votes=tuple(Vote(v.peer_id, v.incarnation, b"") for v in c.votes)),
        lambda c: msgspec.structs.replace(c, votes=tuple(Vote(v.peer_id, "2", v.signature) for v in c.votes)),
    ],
    ids=["record", "round", "lineage", "attempt", "another voter", "another's signature", "no signature", "restarted"],
)
def test_a_signature_holds_for_exactly_what_was_signed(forge: Any) -> None:
    with pytest.raises(WireError):
        check(forge(signed_by("ab", RECORD, DIGEST)))


def test_votes_of_another_run_are_refused() -> None:
    with pytest.raises(WireError, match="wrong signature"):
        check(signed_by("ab", RECORD, "another digest"))


def test_ready_is_signed_by_its_sender() -> None:
    prover, attempt = prover_of("a", DIGEST), Attempt(1, "b", "b.1")
    ready = prover.signed_ready(Ready("0-x", 5, attempt, "a.1", RECORD.sha256, b""))
    prover_of("b", DIGEST).verify_ready("a", ready)
    for sender, wrong in (
        ("c", ready), ("a", msgspec.structs.replace(ready, record_sha256="0")),
        ("a", msgspec.structs.replace(ready, attempt=Attempt(2, "b", "b.1"))),
        ("a", msgspec.structs.replace(ready, signature=b"")),
    ):  # fmt: skip
        with pytest.raises(WireError, match="has not signed"):
            prover_of("b", DIGEST).verify_ready(sender, wrong)


def test_a_signature_under_one_kind_of_statement_is_none_under_another() -> None:
    prover = prover_of("a", DIGEST)
    signatures = {
        prover.signed_ready(Ready("0-x", 5, Attempt(1, "a", "a.1"), "a.1", "sha", b"")).signature,
        prover.landed(HEAD).signature, prover.founding("0-x", 5, "state").signature,
    }  # fmt: skip
    assert len(signatures) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"state_hash": "another"}, {"anchor_hash": "another"}, {"voters": (("x", "x.1"),)}, {"run_step": 6},
        {"tokens_total": 10**15}, {"round": 6}, {"lineage": "0-y"}, {"genesis": "0-h"},
    ],
)  # fmt: skip
def test_a_head_is_signed_with_all_that_a_joiner_takes_over(change: dict[str, Any]) -> None:
    prover = prover_of("x", DIGEST)
    signed = signed_head(HEAD, genesis_of("a", DIGEST), DIGEST, "ab")
    prover.verify_head(signed)
    with pytest.raises(WireError):
        prover.verify_head(msgspec.structs.replace(signed, head=msgspec.structs.replace(HEAD, **change)))


def test_a_head_of_other_voters_than_its_record_says_is_refused_though_they_signed_it() -> None:
    head = msgspec.structs.replace(HEAD, voters=(("x", "x.1"),))
    with pytest.raises(WireError, match="does not lead to"):
        prover_of("x", DIGEST).verify_head(signed_head(head, genesis_of("x", DIGEST), DIGEST, "x"))


def test_a_head_is_passed_on_once_a_quorum_has_landed() -> None:
    votes = HeadVotes(prover_of("a", DIGEST), ("a", "a.1"))
    # Of b it comes early, while the round lands here.
    votes.note("b", prover_of("b", DIGEST).landed(HEAD))
    assert votes.quorum is None
    votes.begin(HEAD, ())
    assert votes.quorum is None
    for sender, wrong in (
        ("c", prover_of("b", DIGEST).landed(HEAD)), ("x", prover_of("x", DIGEST).landed(HEAD)),
        ("c", prover_of("c", DIGEST).landed(msgspec.structs.replace(HEAD, state_hash="another"))),
        ("c", Landed("0-x", 5, "c.1", b"")),
    ):  # fmt: skip
        votes.note(sender, wrong)
        assert votes.quorum is None
    votes.note("a", prover_of("a", DIGEST).landed(HEAD))
    assert votes.quorum is not None
    prover_of("x", DIGEST).verify_head(SignedHead(HEAD, votes.quorum, genesis_of("a", DIGEST)))


def test_who_is_no_voter_does_not_sign_a_head() -> None:
    for own, signs in ((("a", "a.1"), True), (("a", "a.2"), False), (("x", "x.1"), False)):
        assert (HeadVotes(prover_of(own[0], DIGEST), own).begin(HEAD, ()) is not None) == signs


def test_only_voters_that_contributed_are_awaited_while_a_round_lands() -> None:
    """Who did not may be too slow for each round."""
    votes = HeadVotes(prover_of("a", DIGEST), ("a", "a.1"))
    head = msgspec.structs.replace(HEAD, voters=(*VOTERS, ("d", "d.1")))
    votes.begin(head, ())
    assert votes.is_landing([("b", "b.1"), ("d", "d.1")])
    assert not votes.is_landing([("d", "d.1"), ("x", "x.1")])
    votes.note("b", prover_of("b", DIGEST).landed(head))
    assert not votes.is_landing([("b", "b.1"), ("d", "d.1")])


def test_what_lands_early_takes_a_bounded_room() -> None:
    votes = HeadVotes(prover_of("a", DIGEST), ("a", "a.1"))
    for number in range(2 * MAX_EARLY):
        votes.note(f"x{number}", Landed("0-x", 10**9, "1", b""))
    assert len(votes._early) == MAX_EARLY
    # Until their links are lost.
    for number in range(MAX_EARLY):
        votes.note_lost(f"x{number}")
    votes.note("b", prover_of("b", DIGEST).landed(HEAD))
    votes.note("c", prover_of("c", DIGEST).landed(HEAD))
    votes.begin(HEAD, ())
    assert votes.quorum is not None


def test_the_proof_of_a_round_of_31_voters_has_less_than_32_kb() -> None:
    """With signatures, ids and hashes as long as they are in a network."""
    ids = [f"Qm{number:044d}" for number in range(MAX_VOTERS)]
    contributors = tuple(Contributor(peer_id, "0" * 16, 1.0, bytes(32)) for peer_id in ids)
    parts = tuple(Part(i * 10**6, (i + 1) * 10**6, "0" * 64, peer_id) for i, peer_id in enumerate(ids))
    intervals = tuple((peer_id, 100) for peer_id in ids)
    record = msgspec.structs.replace(
        RECORD, contributors=contributors, parts=parts, intervals=intervals, parent_hash="0" * 64
    )
    quorum = MAX_VOTERS // 2 + 1
    votes = tuple(Vote(peer_id, "0" * 16, bytes(560)) for peer_id in ids[:quorum])
    assert len(pack(Commit(record, Attempt(1, ids[0], "0" * 16), votes))) < 32_000
