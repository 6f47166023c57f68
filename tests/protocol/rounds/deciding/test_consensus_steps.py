"""Each transition of `consensus.step`, and invalid messages."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import msgspec
import pytest

from p2ptrain.errors import RoundFailedError, WireError
from p2ptrain.protocol.rounds.deciding.consensus import step
from p2ptrain.protocol.rounds.deciding.events import (
    MAX_COUNTERS_AHEAD,
    MAX_UNHELD,
    NO_ATTEMPT,
    Average,
    Averaged,
    Broadcast,
    Effect,
    Event,
    Fetch,
    Held,
    Lead,
    LeaderEnded,
    LeaderFailed,
    Learned,
    Limits,
    Lost,
    MemberEnded,
    MemberFailed,
    Prepare,
    Prepared,
    Received,
    Send,
    State,
    Tick,
    deadline_s,
)
from p2ptrain.protocol.rounds.deciding.policy import drawn, rank
from p2ptrain.protocol.rounds.deciding.record import check_company, expected
from p2ptrain.protocol.rounds.deciding.voters import is_quorum
from p2ptrain.protocol.wire.messages import (
    MAX_REASON,
    Abort,
    Attempt,
    Call,
    Commit,
    Contributor,
    Due,
    Head,
    Join,
    Message,
    Proposal,
    Propose,
    Ready,
    Record,
    Refuse,
    Roster,
    Vote,
    Withdraw,
    pack,
    unpack,
)
from tests.protocol.explore import restarted

VOTERS = (("a", "1"), ("b", "1"), ("c", "1"))
HEAD = Head("genesis", "0-x", 4, "state", "anchor", VOTERS, 100, 1000, None)
LIMITS = Limits(window_s=10.0, grace_s=5.0, attempt_s=60.0)
FIRST, SECOND = Attempt(1, "a", "1"), Attempt(2, "b", "1")


def record(name: str = "sgd", **changes: Any) -> Record:
    plain = Record("genesis", "0-x", 5, "state", (), (), name, 1.0, 0.0, 110, 1100, (), 0.0, 0.0, ())
    return msgspec.structs.replace(plain, **changes)


def call(attempt: Attempt, window_s: float = 1.0) -> Call:
    return Call("0-x", 5, attempt, window_s)


def join(
    attempt: Attempt, ready_attempt: Attempt | None = None, ready: Record | None = None, incarnation: str = "1"
) -> Join:
    return Join(
        "0-x", 5, attempt, incarnation, "state", True, 10, 0, 100, 1.0, 1.0, (), False, None, ready_attempt,
        Proposal(ready, ()) if ready is not None else None,
    )  # fmt: skip


def averaged(attempt: Attempt, of: Record) -> Averaged:
    return Averaged(attempt, Proposal(of, ()))


def propose(attempt: Attempt, of: Record) -> Propose:
    return Propose(attempt, Proposal(of, ()))


def ready(attempt: Attempt, of: Record, incarnation: str = "1") -> Ready:
    return Ready("0-x", 5, attempt, incarnation, of.sha256, b"")


def commit(of: Record, attempt: Attempt = FIRST, *names: str) -> Commit:
    return Commit(of, attempt, tuple(Vote(name, "1", b"") for name in names or "ab"))


def peer(name: str = "c", incarnation: str = "1") -> State:
    return State(name, incarnation, HEAD, LIMITS)


class Run:
    """Steps a state through events; `now` is the time of those that come next."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.now = 0.0

    def __call__(self, event: Event) -> list[Effect]:
        self.state, effects = step(self.state, event, self.now)
        return list(effects)

    def hears(self, sender: str, message: Message) -> list[Effect]:
        return self(Received(sender, message))


def joined(attempt: Attempt = FIRST, state: State | None = None) -> Run:
    """A member that has joined an attempt."""
    run = Run(state or peer())
    run.hears(attempt.leader, call(attempt))
    run(Prepared(attempt, join(attempt)))
    return run


def accepted(attempt: Attempt = FIRST, of: Record | None = None) -> Run:
    """A member that is READY for a record."""
    run, of = joined(attempt), of or record()
    run.hears(attempt.leader, propose(attempt, of))
    run(Held(attempt, of.sha256))
    return run


def leading(*joining: str) -> Run:
    """Leader a of attempt FIRST, joined by these."""
    run = Run(peer("a"))
    run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
    for name in joining:
        run.hears(name, join(FIRST))
    return run


def proposing(of: Record) -> Run:
    run = leading("a", "b", "c")
    run(averaged(FIRST, of))
    return run


# --- who decides -----------------------------------------------------------------------------------------------------


def test_any_two_quorums_share_a_voter() -> None:
    for count in range(1, 6):
        voters = [(str(i), "1") for i in range(count)]
        sets = [{v for i, v in enumerate(voters) if bits >> i & 1} for bits in range(2**count)]
        quorums = [some for some in sets if is_quorum(some, voters)]
        assert quorums
        assert all(one & other for one in quorums for other in quorums)
    assert not is_quorum(set(), [])


def test_a_record_needs_half_of_those_present_as_contributors_with_a_weight() -> None:
    present = {*VOTERS, ("x", "1")}
    named = (Contributor("x", "1", 1.0, b""), Contributor("a", "1", 0.5, b""))
    check_company(record(contributors=named), present)
    for alone in (named[:1], (named[0], msgspec.structs.replace(named[1], weight=0.0))):
        with pytest.raises(RoundFailedError, match="names 1 of the 4 peers that we see"):
            check_company(record(contributors=alone), present)


def test_a_record_of_drawn_peers_may_lack_some_of_them_but_not_most() -> None:
    present = [(f"p{i}", "1") for i in range(20)]
    by_rank = sorted(present, key=lambda voter: rank(HEAD.state_hash, voter[0]))
    assert {name for name, _ in by_rank[:8]} == set(drawn(HEAD.state_hash, [name for name, _ in present], 8))

    def check(named: list[tuple[str, str]], seen: list[tuple[str, str]], swarm_size: float = 0.0) -> None:
        some = record(contributors=tuple(Contributor(*voter, 1.0, b"") for voter in named))
        check_company(some, expected(some, seen, 8, swarm_size))

    for swarm_size in (0.0, 20.0):
        check(by_rank[:7], present, swarm_size)
        check(by_rank[1:9], present, swarm_size)
        check(by_rank[:8], by_rank[:2] + by_rank[9:], swarm_size)
    for others in (by_rank[:3], by_rank[12:], by_rank[:3] + by_rank[15:]):
        with pytest.raises(RoundFailedError, match="of the 8 peers that we see"):
            check(others, present)
    # Neither a size that is far too large nor made-up contributors of low rank make others be expected less.
    made_up = drawn(HEAD.state_hash, [f"x{i}" for i in range(1000)], 8)
    for size, others in ((1e9, by_rank[19:]), (20.0, [(name, "1") for name in made_up])):
        with pytest.raises(RoundFailedError, match="a record that names 0 of the 2 peers that we see"):
            check(others, present, size)


# --- acceptor --------------------------------------------------------------------------------------------------------


def test_a_member_goes_from_call_to_ready() -> None:
    run, of = Run(peer()), record()
    assert run.hears("a", call(FIRST)) == [Prepare(FIRST, 1.0)]
    assert run(Prepared(FIRST, join(FIRST))) == [Send("a", join(FIRST))]
    assert run.hears("a", propose(FIRST, of)) == [Fetch(FIRST, of)]
    assert run(Held(FIRST, of.sha256)) == [Send("a", ready(FIRST, of))]
    assert run.hears("a", commit(of)) == [Learned(commit(of))]


def test_a_repeated_message_has_one_effect() -> None:
    run, of = Run(peer()), record()
    run.hears("a", call(FIRST))
    assert run.hears("a", call(FIRST)) == []
    run(Prepared(FIRST, join(FIRST)))
    assert run(Prepared(FIRST, join(FIRST))) == []
    run.hears("a", propose(FIRST, of))
    assert run.hears("a", propose(FIRST, of)) == []
    run(Held(FIRST, of.sha256))
    assert run(Held(FIRST, of.sha256)) == []
    # The leader may have lost our READY.
    assert run.hears("a", propose(FIRST, of)) == [Send("a", ready(FIRST, of))]


def test_a_higher_call_ends_the_part_in_a_lower_attempt_and_tells_its_leader() -> None:
    run = joined(FIRST)
    assert run.hears("b", call(SECOND)) == [
        Send("a", Refuse("0-x", 5, FIRST, SECOND)),
        MemberEnded(FIRST, "b called a higher attempt"),
        Prepare(SECOND, 1.0),
    ]
    # What belongs to the old attempt changes nothing in the new one.
    before = run.state
    for event in (
        Received("a", Abort("0-x", 5, FIRST, "over")),
        Received("a", Roster("0-x", 5, FIRST, (), (), ())),
        Prepared(FIRST, join(FIRST)),
        MemberFailed(FIRST, "no snapshot"),
        Held(FIRST, record().sha256),
        Lost("a"),
    ):
        assert run(event) == []
        assert run.state == before
    assert run.hears("a", propose(FIRST, record())) == [Send("a", Refuse("0-x", 5, FIRST, SECOND))]


def test_a_lower_call_is_refused_with_what_was_promised() -> None:
    run = joined(SECOND)
    assert run.hears("a", call(FIRST)) == [Send("a", Refuse("0-x", 5, FIRST, SECOND))]
    assert run.state.member is not None
    assert run.state.member.attempt == SECOND


def test_a_fetch_that_ends_after_a_higher_promise_makes_no_member_ready() -> None:
    run, of = joined(FIRST), record()
    run.hears("a", propose(FIRST, of))
    run.hears("b", call(SECOND))
    assert run(Held(FIRST, of.sha256)) == []
    assert run.state.acceptor.proposal is None


def test_ready_is_reported_to_the_next_leader() -> None:
    run, of = accepted(FIRST), record()
    run.hears("b", call(SECOND))
    assert run(Prepared(SECOND, join(SECOND))) == [Send("b", join(SECOND, FIRST, of))]


def test_a_second_record_in_one_attempt_is_not_accepted() -> None:
    run = accepted(FIRST, record("sgd"))
    assert run.hears("a", propose(FIRST, record("nesterov"))) == []
    assert run.state.acceptor.proposal == Proposal(record("sgd"), ())
    # Nor one that is equal and has another hash.
    equal = record("sgd", cosine=-0.0)
    assert equal == record("sgd")
    assert equal.sha256 != record("sgd").sha256
    assert run.hears("a", propose(FIRST, equal)) == []
    # Nor before the first one is READY.
    run = joined(FIRST)
    run.hears("a", propose(FIRST, record("sgd")))
    assert run.hears("a", propose(FIRST, record("nesterov"))) == []
    assert run(Held(FIRST, record("nesterov").sha256)) == []
    assert run.state.acceptor.proposal is None


def test_a_record_of_another_state_makes_us_withdraw() -> None:
    for odd in (record(parent_hash="other"), record(genesis="other")):
        run = joined(FIRST)
        reason = "the record starts from another state than ours"
        assert run.hears("a", propose(FIRST, odd)) == [
            Send("a", Withdraw("0-x", 5, FIRST, reason)), MemberEnded(FIRST, reason),
        ]  # fmt: skip


def test_no_record_is_taken_by_one_that_has_not_joined() -> None:
    run = Run(peer())
    assert run.hears("a", propose(FIRST, record())) == []
    run.hears("a", call(FIRST))
    assert run.hears("a", propose(FIRST, record())) == []


def test_a_member_that_fails_withdraws() -> None:
    run = joined(FIRST)
    assert run(MemberFailed(FIRST, "a part is nowhere to be had")) == [
        Send("a", Withdraw("0-x", 5, FIRST, "a part is nowhere to be had")),
        MemberEnded(FIRST, "a part is nowhere to be had"),
    ]
    assert run.state.acceptor.promised == FIRST


def test_abort_and_a_lost_leader_end_the_part() -> None:
    assert joined().hears("a", Abort("0-x", 5, FIRST, "no quorum")) == [MemberEnded(FIRST, "no quorum")]
    assert joined()(Lost("a")) == [MemberEnded(FIRST, "the leader was lost")]
    assert joined()(Lost("b")) == []


def test_reasons_of_others_are_kept_without_control_characters_and_ours_are_cut() -> None:
    assert joined().hears("a", Abort("0-x", 5, FIRST, "\x1b[2J\nno")) == [MemberEnded(FIRST, "\\x1b[2J\\nno")]
    withdraw, _ = joined(FIRST)(MemberFailed(FIRST, "no " * MAX_REASON))
    assert isinstance(withdraw, Send)
    assert isinstance(withdraw.message, Withdraw)
    assert unpack(Withdraw, pack(withdraw.message)).reason == ("no " * MAX_REASON)[:MAX_REASON]
    with pytest.raises(WireError):
        unpack(Abort, msgspec.msgpack.encode(("0-x", 5, FIRST, "n" * (MAX_REASON + 1))))


def test_other_rounds_and_lineages_change_nothing() -> None:
    run = joined()
    before = run.state
    for message in (
        Call("0-x", 6, SECOND, 1.0), Call("0-y", 5, SECOND, 1.0), Abort("0-x", 4, FIRST, ""),
        propose(FIRST, record(round=6)), commit(record(round=4)), commit(record(lineage="0-y")),
    ):  # fmt: skip
        assert run.hears("b" if isinstance(message, Call) else "a", message) == []
    assert run.state == before


# --- a leader that says nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_s", [1.0, 1e9, -5.0, math.nan, math.inf])
def test_a_leader_that_says_nothing_lets_its_members_go(window_s: float) -> None:
    run = Run(peer())
    (prepare,) = run.hears("a", call(FIRST, window_s))
    assert isinstance(prepare, Prepare)
    assert 0 <= prepare.window_s <= LIMITS.window_s
    run.now = LIMITS.window_s + LIMITS.grace_s
    assert deadline_s(run.state) <= run.now
    withdraw, ended = run(Tick())
    assert isinstance(withdraw, Send)
    assert isinstance(withdraw.message, Withdraw)
    assert ended == MemberEnded(FIRST, withdraw.message.reason)
    assert deadline_s(run.state) == math.inf


def test_rosters_without_end_do_not_hold_a_member() -> None:
    run = joined()
    for run.now in (0.0, 30.0, 59.0):
        run.hears("a", Roster("0-x", 5, FIRST, ("c",), (), ()))
    assert deadline_s(run.state) == LIMITS.attempt_s
    # The record may be fetched as long as an attempt lasts, and not longer.
    run.hears("a", propose(FIRST, record()))
    for run.now in (70.0, 90.0):
        run.hears("a", propose(FIRST, record()))
        run.hears("a", Roster("0-x", 5, FIRST, ("c",), (), ()))
    assert deadline_s(run.state) == 59.0 + LIMITS.attempt_s


# --- hostile ---------------------------------------------------------------------------------------------------------


def test_words_in_another_peers_name_break_the_rules() -> None:
    run = joined()
    before = run.state
    for message in (
        call(SECOND),
        propose(FIRST, record()),
        Abort("0-x", 5, FIRST, ""),
        Roster("0-x", 5, FIRST, (), (), ()),
    ):
        with pytest.raises(WireError, match="in another peer's name"):
            run.hears("x", message)
    with pytest.raises(WireError, match="no message of the consensus"):
        run.hears("x", Due("0-x", 5, 1))
    assert run.state == before


def test_a_huge_counter_blocks_no_round() -> None:
    run = Run(peer())
    for counter in (2**63 - 1, 10**6, -1, -(2**63)):
        (refuse,) = run.hears("x", call(Attempt(counter, "x", "1")))
        assert refuse == Send("x", Refuse("0-x", 5, Attempt(counter, "x", "1"), NO_ATTEMPT))
    assert run.hears("a", call(FIRST)) == [Prepare(FIRST, 1.0)]
    (called,) = run(Lead(("c",), 1.0, 0.5, 30.0))
    assert isinstance(called, Send)
    assert isinstance(called.message, Call)
    assert called.message.attempt == Attempt(2, "c", "1")


def test_a_refusal_with_a_huge_counter_raises_ours_by_what_others_believe() -> None:
    run, other = leading(), Run(peer("b"))
    run.hears("b", Refuse("0-x", 5, FIRST, Attempt(2**63 - 1, "x", "1")))
    run(LeaderFailed(FIRST, "over"))
    (called, *_) = run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
    assert isinstance(called, Send)
    assert isinstance(called.message, Call)
    assert called.message.attempt.counter <= MAX_COUNTERS_AHEAD
    assert isinstance(other.hears("a", called.message)[0], Prepare)


def test_each_member_raises_our_counter_once_in_an_attempt_and_strangers_never() -> None:
    run = leading()
    for sender in ("x", "b", "b", "b"):
        run.hears(sender, Refuse("0-x", 5, FIRST, Attempt(2**63 - 1, "x", "1")))
    assert run.state.highest <= MAX_COUNTERS_AHEAD


def test_a_peer_that_was_away_for_long_comes_to_believe_high_counters() -> None:
    run, counter = Run(peer()), 5 * MAX_COUNTERS_AHEAD
    for tries in range(10):
        (effect,) = run.hears("a", call(Attempt(counter + tries, "a", "1")))
        if isinstance(effect, Prepare):
            return
    pytest.fail("never believed")


def test_half_a_ready_record_or_one_from_the_future_breaks_the_rules() -> None:
    for odd in (
        join(FIRST, None, record()), join(FIRST, NO_ATTEMPT, None), join(FIRST, FIRST, record()),
        join(FIRST, SECOND, record()), join(FIRST, NO_ATTEMPT, record(round=6)),
        join(FIRST, NO_ATTEMPT, record(parent_hash="other")),
    ):  # fmt: skip
        run = leading()
        with pytest.raises(WireError):
            run.hears("b", odd)
    # Ignored if it is not for an attempt of ours.
    assert Run(peer()).hears("b", join(FIRST, FIRST, record())) == []


# --- proposer --------------------------------------------------------------------------------------------------------


def test_a_leader_goes_from_call_to_commit() -> None:
    run, of = Run(peer("a")), record()
    assert run(Lead(("c", "b", "a"), 1.0, 0.5, 30.0)) == [Send(name, call(FIRST)) for name in "abc"]
    assert run.hears("c", join(FIRST)) == []
    assert run.hears("a", join(FIRST)) == []
    joins = tuple((name, join(FIRST)) for name in "abc")
    assert run.hears("b", join(FIRST)) == [Average(FIRST, joins)]
    assert run(averaged(FIRST, of)) == [Send(name, propose(FIRST, of)) for name in "abc"]
    assert run.hears("c", ready(FIRST, of)) == []
    of_both = commit(of, FIRST, "a", "c")
    assert run.hears("a", ready(FIRST, of)) == [Broadcast(of_both), Learned(of_both)]
    assert run.hears("b", ready(FIRST, of)) == []


def test_a_leader_becomes_ready_last() -> None:
    """If others refuse its record, it is free to promise and to propose another one."""
    of = record()
    run = proposing(of)
    run.hears("a", call(FIRST))
    run(Prepared(FIRST, join(FIRST)))
    assert run.hears("a", propose(FIRST, of)) == [Fetch(FIRST, of)]
    assert run(Held(FIRST, of.sha256)) == []
    refused = deepcopy(run)
    assert run.hears("b", ready(FIRST, of)) == [Send("a", ready(FIRST, of))]
    assert run.hears("a", ready(FIRST, of))[-1] == Learned(commit(of))
    for name in "bc":
        refused.hears(name, Withdraw("0-x", 5, FIRST, "a record that names 1 of the 3 peers that we see"))
    assert refused.state.proposer is None
    refused.hears("b", call(SECOND))
    assert refused(Prepared(SECOND, join(SECOND))) == [Send("b", join(SECOND))]
    # Neither when it is the only voter, nor without a vote, does it wait for others.
    for voters in ((("a", "1"),), (("b", "1"), ("c", "1"))):
        run = Run(State("a", "1", msgspec.structs.replace(HEAD, voters=voters), LIMITS))
        run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
        run.hears("a", call(FIRST))
        run(Prepared(FIRST, join(FIRST)))
        for name in "abc":
            run.hears(name, join(FIRST))
        run(averaged(FIRST, of))
        run.hears("a", propose(FIRST, of))
        assert run(Held(FIRST, of.sha256)) == [Send("a", ready(FIRST, of))]


def test_the_window_closes_over_those_who_have_joined() -> None:
    run = leading("a", "b")
    assert deadline_s(run.state) == 1.5
    run.now = 1.5
    assert run(Tick()) == [Average(FIRST, (("a", join(FIRST)), ("b", join(FIRST))))]
    assert run.hears("c", join(FIRST)) == []


def test_without_a_quorum_of_promises_the_attempt_is_aborted() -> None:
    run = leading("b")
    run.now = 1.5
    *aborts, ended = run(Tick())
    reason = "1 of 3 voters joined within 1.0 s: no quorum"
    assert ended == LeaderEnded(FIRST, reason)
    assert aborts == [Send(name, Abort("0-x", 5, FIRST, reason)) for name in "abc"]
    assert run.state.proposer is None


def test_a_voter_that_was_started_anew_is_none() -> None:
    run = leading("b")
    run.hears("a", join(FIRST, incarnation="2"))
    *_, ended = run.hears("c", join(FIRST, incarnation="2"))
    assert ended == LeaderEnded(FIRST, "1 of 3 voters joined within 1.0 s: no quorum")


def test_the_ready_record_of_the_highest_attempt_is_finished_unchanged() -> None:
    older, newer = record("sgd"), record("nesterov")
    run = Run(peer("a"))
    run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0, counter=6))
    seventh = Attempt(7, "a", "1")
    run.hears("a", join(seventh))
    run.hears("b", join(seventh, Attempt(5, "c", "1"), newer))
    assert run.hears("c", join(seventh, Attempt(4, "z", "1"), older)) == [
        Send(name, propose(seventh, newer)) for name in "abc"
    ]
    # Averaged meanwhile or not: there is nothing else to propose.
    assert run(averaged(seventh, older)) == []


def test_only_a_voters_ready_record_must_be_finished() -> None:
    run = Run(peer("a"))
    run(Lead(("a", "b", "c", "x"), 1.0, 0.5, 30.0, counter=6))
    seventh = Attempt(7, "a", "1")
    for name in "ab":
        run.hears(name, join(seventh))
    run.hears("x", join(seventh, Attempt(5, "x", "1"), record()))
    (effect,) = run.hears("c", join(seventh, Attempt(4, "z", "1"), record(), incarnation="2"))
    assert isinstance(effect, Average)


def unheld_by_leader(of: Record) -> Run:
    """Leader a after attempt FIRST, in which c reported this record, and nobody had it."""
    run = Run(peer("a"))
    run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
    run.hears("a", call(FIRST))
    run(Prepared(FIRST, join(FIRST)))
    for name in "ab":
        run.hears(name, join(FIRST))
    assert Send("a", propose(FIRST, of)) in run.hears("c", join(FIRST, Attempt(0, "c", "1"), of))
    assert run.hears("a", propose(FIRST, of)) == [Fetch(FIRST, of)]
    assert Send("a", Withdraw("0-x", 5, FIRST, "nowhere")) in run(MemberFailed(FIRST, "nowhere"))
    run.hears("a", Withdraw("0-x", 5, FIRST, "nowhere"))
    ended = run.hears("b", Withdraw("0-x", 5, FIRST, "nowhere"))
    assert any(isinstance(effect, LeaderEnded) for effect in ended)
    return run


def test_a_ready_record_that_no_member_can_serve_is_left_out_with_its_promise() -> None:
    again = Attempt(2, "a", "1")
    # The same record, or another one of the same peer.
    for lie in (record("lie"), record("another lie")):
        run = unheld_by_leader(record("lie"))
        run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
        own, other = join(again), join(again)
        run.hears("a", own)
        run.hears("b", other)
        (average,) = run.hears("c", join(again, Attempt(0, "c", "1"), lie))
        assert average == Average(again, (("a", own), ("b", other)))


def test_without_a_quorum_of_the_others_a_record_that_was_not_had_is_proposed_again() -> None:
    run, again = unheld_by_leader(record("lie")), Attempt(2, "a", "1")
    run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
    run.hears("a", join(again))
    run.hears("c", join(again, Attempt(0, "c", "1"), record("lie")))
    assert Send("c", propose(again, record("lie"))) in run(Lost("b"))
    # Nor is one left out where b reports it as well: then it may have been committed.
    run, again = unheld_by_leader(record("lie")), Attempt(2, "a", "1")
    run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
    run.hears("a", join(again))
    run.hears("b", join(again, Attempt(0, "c", "1"), record("lie")))
    assert Send("b", propose(again, record("lie"))) in run.hears("c", join(again, Attempt(0, "c", "1"), record("lie")))


def test_records_that_were_not_had_take_a_bounded_room() -> None:
    run = Run(peer())
    for counter in range(3 * MAX_UNHELD):
        attempt = Attempt(counter, "a", "1")
        run.hears("a", call(attempt))
        run(Prepared(attempt, join(attempt)))
        run.hears("a", propose(attempt, record(str(counter))))
        run(MemberFailed(attempt, "nowhere"))
        assert record(str(counter)).sha256 in run.state.unheld
        assert len(run.state.unheld) <= MAX_UNHELD
    assert run.state.doubted == frozenset()


def test_an_incarnation_votes_once_and_strangers_never() -> None:
    of = record()
    run = proposing(of)
    for sender, message in (
        ("b", ready(FIRST, of)), ("b", ready(FIRST, of)),  # said twice
        ("b", ready(FIRST, of, incarnation="2")), ("c", ready(FIRST, of, incarnation="2")),  # started anew
        ("x", ready(FIRST, of)), ("c", ready(FIRST, record("nesterov"))),  # no voter; another record
        ("c", ready(SECOND, of)),  # another attempt
    ):  # fmt: skip
        assert run.hears(sender, message) == []
    assert run.state.proposer is not None
    assert run.state.proposer.ready == ((("b", "1"), b""),)
    assert run.hears("c", ready(FIRST, of))[-1] == Learned(commit(of, FIRST, "b", "c"))


def test_a_leader_goes_on_while_there_can_be_a_quorum() -> None:
    withdraw = Withdraw("0-x", 5, FIRST, "too slow")
    run = proposing(record())
    assert run.hears("c", withdraw) == []
    *_, ended = run(Lost("b"))
    assert ended == LeaderEnded(FIRST, "no quorum can become READY without the lost members")
    run = leading("a", "b")
    assert run.hears("c", Refuse("0-x", 5, FIRST, SECOND)) == [Average(FIRST, (("a", join(FIRST)), ("b", join(FIRST))))]
    *_, ended = run.hears("b", msgspec.structs.replace(withdraw, reason="too\x1b[2J slow"))
    assert ended == LeaderEnded(FIRST, "b: too\\x1b[2J slow")


def test_an_attempt_that_takes_too_long_is_aborted() -> None:
    run = leading("a", "b", "c")
    run.now = 29.9
    assert run(Tick()) == []
    run.now = 30.0
    *_, ended = run(Tick())
    assert ended == LeaderEnded(FIRST, "not decided within 30 s", timed_out=True)


def test_averaging_that_fails_aborts_only_its_own_attempt() -> None:
    run = leading("a", "b", "c")
    assert run(LeaderFailed(SECOND, "old")) == []
    assert run(averaged(SECOND, record())) == []
    *_, ended = run(LeaderFailed(FIRST, "reducer b was lost"))
    assert ended == LeaderEnded(FIRST, "reducer b was lost")


def test_the_next_attempt_has_a_higher_number_also_after_a_restart_with_memory() -> None:
    run = leading("b")
    run.state = restarted(run.state)
    (called, *_) = run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0))
    assert called == Send("a", call(Attempt(2, "a", "1")))
    assert run(Lead(("a", "b", "c"), 1.0, 0.5, 30.0)) == []  # one at a time


# --- the outcome -----------------------------------------------------------------------------------------------------


def test_a_commit_counts_before_we_are_ready_and_without_an_attempt() -> None:
    of = record()
    for run in (Run(peer()), joined(), accepted(SECOND, record("nesterov"))):
        *_, learned = run.hears("x", commit(of))
        assert learned == Learned(commit(of))


def test_an_attempt_of_ours_is_aborted_when_another_was_decided() -> None:
    run, of = leading("a", "b"), record()
    *aborts, ended, learned = run.hears("c", commit(of, SECOND))
    assert [effect.to for effect in aborts if isinstance(effect, Send)] == ["a", "b", "c"]
    assert ended == LeaderEnded(FIRST, "another attempt was decided")
    assert learned == Learned(commit(of, SECOND))


def test_after_the_outcome_nothing_changes() -> None:
    run = accepted(FIRST)
    run.hears("a", commit(record()))
    before = run.state
    for event in (
        Received("b", call(SECOND)), Received("a", propose(FIRST, record("nesterov"))), Tick(), Lost("a"),
        Lead(("a", "b", "c"), 1.0, 0.5, 30.0), Received("b", commit(record("nesterov"))),
    ):  # fmt: skip
        assert run(event) == []
    assert run.state == before
    assert deadline_s(run.state) == math.inf
