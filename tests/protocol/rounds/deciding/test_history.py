"""Histories of runs: what they prove, and whose lineage goes on when two of them meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from p2ptrain.errors import RunMismatchError, WireError
from p2ptrain.protocol.rounds.deciding.history import (
    MAX_ENTRIES,
    MAX_HISTORY_BYTES,
    History,
    check_entries,
    check_genesis,
    ends_at,
    is_better,
    is_continued,
    is_rooted,
    is_unbroken,
    lineage_of,
    merged,
    name_of,
    place_of,
    shared,
    was_alone,
)
from p2ptrain.protocol.rounds.deciding.lineage import check_head
from p2ptrain.protocol.state_sync.provenance import Pins, is_preferred
from p2ptrain.protocol.state_sync.starts import is_larger_start
from p2ptrain.protocol.wire.messages import Attempt, Commit, Entry, Head, Vote, pack
from tests.protocol.signing import Past, founding_of, genesis_of, prover_of, record_after, signed_by

DIGEST = "d" * 64
PROVER = prover_of("x", DIGEST)
Write = Callable[[Past], Past]


def common() -> Past:
    """Four peers that have committed together; they vote in the order a, b, c, d."""
    return Past(DIGEST).commit("abcd")


def test_a_history_proves_each_entry_by_the_one_before() -> None:
    past = common().commit("abc").commit("bcd", signers="bc").found("d").commit("de", signers="d").commit("d", "de")
    check_entries(past.entries, PROVER)
    check_entries(past.entries[3:], PROVER)
    assert (place_of(past.entries[-1]).lineage, place_of(past.entries[-1]).round) == (past.lineage, past.round)


@pytest.mark.parametrize(
    "write",
    [
        lambda past: past.commit("xyz", signers="xyz"),
        lambda past: past.commit("abcd", signers="a"),
        lambda past: past.commit("abcd", signers="ab").commit("abcd").entries.pop(-2) and past,
        lambda past: past.found("x").commit("xyz", signers="y"),
        lambda past: past.entries.append(founding_of("x", "0-elsewhere", 0, DIGEST)) or past,
        lambda past: past.entries.append(founding_of("x", past.lineage, 9, DIGEST)) or past,
        lambda past: past.entries.append(Entry(None, genesis_of("x", "another run"))) or past,
        lambda past: past.entries.append(Entry(None, None)) or past,
        lambda past: past.entries.append(Entry(past.entries[-1].commit, past.genesis)) or past,
    ],
    ids=[
        "signed by others than the voters", "signed by one of four", "a round left out", "signed by a stranger",
        "founded elsewhere", "founded at another round", "a genesis in between", "nothing", "both",
    ],
)  # fmt: skip
def test_an_entry_that_does_not_follow_is_refused(write: Write) -> None:
    past = write(common())
    with pytest.raises(WireError):
        check_entries(past.entries, PROVER)


def test_a_founding_is_its_founders() -> None:
    genuine = founding_of("a", "0-x", 3, DIGEST).founding
    assert genuine is not None
    forged = type(genuine)("0-x", 3, "0" * 64, "b", "b.1", genuine.signature)
    with pytest.raises(WireError, match="its founder has not signed"):
        check_entries([Entry(None, forged)], PROVER)


def better(ours: Past, theirs: Past, present: str = "") -> bool:
    check_entries(theirs.entries, PROVER)
    return is_better(ours.entries, theirs.entries, set(present))


def test_a_lineage_with_the_quorum_goes_on() -> None:
    fork = common()
    quorum = fork.copy().commit("abc", signers="abc").commit("abc").commit("abc")
    minority = fork.copy().found("d")
    # However much longer it is, and whoever has joined it since.
    for _ in range(9):
        minority.commit("dabcxyz", signers=minority.voters)
    assert better(minority, quorum)
    assert not better(quorum, minority, "abc")
    assert not better(quorum, minority)
    assert better(fork, quorum, "d")
    assert not better(quorum, fork)


def test_no_peer_leaves_for_a_lineage_founded_from_our_own_head_while_voters_are_linked() -> None:
    ours, stranger, voter = common(), common().found("x").commit("xyz", "x"), common().found("d").commit("dx", "d")
    assert not better(ours, stranger, "abcd")
    assert not better(ours, stranger, "d")
    assert not better(ours, voter, "abc")
    # But when they are gone, whoever goes on is followed.
    assert better(ours, stranger, "")
    assert better(ours, voter, "")


def test_of_two_lineages_without_a_quorum_the_one_with_more_of_the_voters_goes_on() -> None:
    fork = common()
    two, one, first = fork.copy().found("c").commit("cd", "c").commit("cd", "cd"), fork.copy().found("b"), fork.copy()
    assert better(one, two)
    assert not better(two, one)
    first.found("a")
    assert better(one, first)  # as many, and the first of them
    assert not better(first, one)


def test_of_two_alike_exactly_one_is_left() -> None:
    fork = common()
    for one, other in itertools.combinations("bcdxy", 2):
        ours, theirs = fork.copy().found(one), fork.copy().found(other)
        assert better(ours, theirs) != better(theirs, ours)


@pytest.mark.parametrize("founders", itertools.permutations("abx", 2))
@pytest.mark.parametrize("rounds", [(1, 0), (0, 1), (3, 90), (90, 3)])
def test_which_of_two_goes_on_does_not_change_with_the_rounds_that_either_commits(
    founders: tuple[str, str], rounds: tuple[int, int]
) -> None:
    """They grow while their peers compare them, and each would leave, or none."""
    ours, theirs = (common().found(founder).commit(founder) for founder in founders)
    before = better(ours, theirs), better(theirs, ours)
    for past, count in zip((ours, theirs), rounds, strict=True):
        for _ in range(count):
            past.commit(past.voters)
    assert (better(ours, theirs), better(theirs, ours)) == before
    assert before.count(True) == 1


def test_which_of_two_goes_on_changes_when_another_of_the_voters_signs_in_one() -> None:
    one, two = common().found("a").commit("ac", "a"), common().found("b")
    assert better(two, one)
    two.commit("bd", "b").commit("bd", "bd")
    assert better(one, two)
    one.commit("ac", "ac").commit("ac")
    assert better(one, two) != better(two, one)  # as many again


def test_equal_entries_with_other_signatures_are_shared() -> None:
    ours, theirs = common(), common()
    ours.commit("abcd", signers="abc").commit("ab", "abcd")
    theirs.commit("abcd", signers="bcd").commit("cd", "abcd")
    assert shared(ours.entries, theirs.entries) == (2, 2)
    assert shared(ours.entries, Past(DIGEST, "b").commit("ab").entries) is None
    assert merged(ours.entries[1:], theirs.entries[2:]) == [ours.entries[1], *theirs.entries[2:]]


def head_at(past: Past, **fields: object) -> Head:
    voters = place_of(past.entries[-1]).voters
    return Head(past.genesis_id, past.lineage, past.round, "0" * 64, "a", voters, 1, 1, None)


def prefers(ours: Past, theirs: Past, *, trusted: bool = True) -> bool:
    return is_preferred(
        head_at(ours), ours.entries, head_at(theirs), theirs.entries, set(), is_trusted=trusted
    )  # fmt: skip


def test_two_starts_of_a_run_become_one_only_while_a_peer_is_alone() -> None:
    alone, other_alone = Past(DIGEST, "a").commit("a"), Past(DIGEST, "b").commit("b").commit("b")
    together = Past(DIGEST, "c").commit("cd")
    assert prefers(alone, other_alone) != prefers(other_alone, alone)
    assert prefers(alone, together)
    assert not prefers(alone, together, trusted=False), "a stranger's"
    assert not prefers(together, alone)
    assert not prefers(together, Past(DIGEST, "x").commit("xyz").commit("xyz"))


def test_a_history_is_rooted_if_it_begins_where_the_run_was_founded() -> None:
    past = common().commit("abcd", "abc")
    assert is_rooted(past.entries, past.genesis_id)
    assert is_rooted(past.entries[:1], past.genesis_id)
    for entries in ([], past.entries[1:], Past(DIGEST, "x").entries):
        assert not is_rooted(entries, past.genesis_id)


def test_a_history_is_unbroken_if_nobody_has_founded_a_lineage_in_it() -> None:
    past = common()
    assert is_unbroken(past.commit("abcd", "abc").entries, past.genesis_id)
    assert is_unbroken(past.entries[:1], past.genesis_id)
    assert not is_unbroken(past.found("x").commit("x").entries, past.genesis_id)
    assert not is_unbroken(past.entries[1:], past.genesis_id)


def test_of_two_starts_without_a_proof_the_larger_one_goes_on_whatever_its_rank() -> None:
    other = msgspec.structs.replace(head_at(Past(DIGEST)), genesis="0-2", round=-1, tokens_total=2**60)
    assert is_larger_start("0-1", other, here=1, there=2)
    assert not is_larger_start("0-1", other, here=2, there=2)
    assert is_larger_start("0-3", other, here=2, there=2), "the smaller id"
    with_round = msgspec.structs.replace(other, round=0)
    assert is_larger_start("0-1", with_round, here=2, there=2)
    assert not is_larger_start("0-3", with_round, here=2, there=1)


@pytest.mark.parametrize("counts", [{"run_step": 9}, {"tokens_total": 9}])
def test_a_head_before_the_first_round_has_no_steps_and_no_tokens(counts: dict[str, int]) -> None:
    head = msgspec.structs.replace(head_at(Past(DIGEST)), round=-1, run_step=0, tokens_total=0)
    check_head(head)
    with pytest.raises(WireError, match="before the first round"):
        check_head(msgspec.structs.replace(head, **counts))


def test_out_of_touch_for_longer_than_histories_are_kept() -> None:
    ours, theirs = common().commit("abcd"), common()
    for _ in range(5):
        theirs.commit("bcd", signers=theirs.voters)
    theirs.entries = theirs.entries[-3:]
    assert shared(ours.entries, theirs.entries) is None
    assert prefers(ours, theirs)
    assert not prefers(theirs, ours)
    assert not prefers(ours, theirs, trusted=False)


def test_a_history_keeps_a_bounded_number_of_bytes() -> None:
    past = Past(DIGEST)
    record = record_after(past.genesis_id, past.lineage, 0, "a")
    entry = Entry(Commit(record, Attempt(1, "a", "a.1"), (Vote("a", "a.1", bytes(2048)),) * 31), None)
    size = len(pack(entry))
    history = History(past.genesis, [entry] * (MAX_HISTORY_BYTES // size + 9))
    assert len(history.entries) == MAX_HISTORY_BYTES // size


def test_a_history_keeps_a_bounded_number_of_entries_and_gives_them_in_pages() -> None:
    past = Past(DIGEST)
    history = History(past.genesis, past.entries)
    for _ in range(MAX_ENTRIES + 9):
        past.round += 1
        record = record_after(past.genesis_id, past.lineage, past.round, "a")
        past.entries.append(Entry(Commit(record, Attempt(1, "a", "a.1"), ()), None))
        history.add(past.entries[-1])
    assert len(history.entries) == MAX_ENTRIES
    pages, before = [], ""
    while page := history.page(before, 500):
        pages.insert(0, page)
        before = name_of(page[0])
    assert [entry for page in pages for entry in page] == past.entries[-MAX_ENTRIES:]
    assert [len(page) for page in pages] == [48, 500, 500, 500, 500]
    assert history.page("unknown", 50) == []
    assert ends_at(history.entries, head_at(past))
    assert not ends_at([], head_at(past))


def test_a_peer_is_alone_if_it_has_committed_no_round_with_others() -> None:
    assert was_alone(Past(DIGEST).commit("a").found("a").commit("a").entries)
    assert not was_alone(Past(DIGEST).commit("ab").commit("a", "ab").entries)


def test_a_genesis_is_of_this_run_and_of_this_head() -> None:
    past = Past(DIGEST)
    check_genesis(past.genesis, head_at(past), PROVER, DIGEST)
    for genesis in (genesis_of("b", DIGEST), genesis_of("a", "another run")):
        with pytest.raises(WireError):
            check_genesis(genesis, head_at(past), PROVER, DIGEST)
    assert lineage_of(past.genesis) == past.genesis_id


def test_pins_refuse_any_other_run() -> None:
    past = common().commit("abcd")
    record = name_of(past.entries[1])
    for pins in (Pins(), Pins(founder="a"), Pins(anchor=record), Pins(record, "a")):
        pins.check(past.genesis, past.entries)
    genesis_entry = name_of(past.entries[0])
    for pins in (Pins(founder="b"), Pins(anchor="0" * 64), Pins(anchor=genesis_entry), Pins(record, "b")):
        with pytest.raises(RunMismatchError, match=r"^--(founder|anchor) "):
            pins.check(past.genesis, past.entries)


def test_an_anchor_holds_only_for_those_who_may_go_on_from_it() -> None:
    """A copy of the genuine rounds, and a lineage of one's own behind them."""
    past = common().commit("abcd", "abc")
    anchor = name_of(past.entries[-1])
    assert is_continued(past.copy().commit("abc", "abc").entries, anchor)
    assert is_continued(past.copy().found("d").commit("dx", "d").entries, anchor)
    assert not is_continued(past.copy().found("x").commit("xyz", "x").entries, anchor)
    assert not is_continued(past.copy().found("d").found("x").entries, anchor)


def test_a_lineage_founded_from_our_head_has_our_state() -> None:
    ours, theirs = common(), common().found("a")
    assert prefers(ours, theirs, trusted=False)
    head = msgspec.structs.replace(head_at(ours), state_hash="another")
    assert not is_preferred(head, ours.entries, head_at(theirs), theirs.entries, set(), is_trusted=True)
    theirs.commit("ab", "a", parent_hash="another")
    with pytest.raises(WireError, match="starts from another state"):
        check_entries(theirs.entries, PROVER)


def test_records_of_absurd_size_are_refused() -> None:
    past = common()
    past.commit("abcd", "abc", intervals=tuple((f"p{i}", 1) for i in range(65)))
    with pytest.raises(WireError, match="more than 64"):
        check_entries(past.entries, PROVER)


def test_who_signs_a_round_twice_is_believed_by_each_for_what_it_has() -> None:
    """Two quorums that conflict need a voter that lies: no rule helps, and nobody goes to and fro."""
    fork = common()
    one, other = fork.copy().commit("abc", "abc"), fork.copy().commit("bcd", "bcd")
    assert not better(one, other)
    assert not better(other, one)
    assert signed_by("abc", one.entries[-1].commit.record, DIGEST)  # type: ignore[union-attr]
