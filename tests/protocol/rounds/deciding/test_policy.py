"""Contributors, weights and reducers, with false claims of single members."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.rounds.deciding import policy
from p2ptrain.protocol.rounds.deciding.averaging import Conclusion, averaging_of
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.deciding.guard import guarded, norms_of, scaled_down
from p2ptrain.protocol.rounds.deciding.policy import (
    MARGIN,
    RECENT_ROUNDS,
    RecentContributors,
    drawn,
    may_be_drawn,
    rank,
)
from p2ptrain.protocol.rounds.deciding.record import (
    MOST_INTERVALS,
    check_advance,
    check_company,
    check_record,
    proposal_of,
)
from p2ptrain.protocol.wire.messages import (
    Arrived,
    Attempt,
    Commit,
    Contributor,
    Head,
    Join,
    Part,
    Record,
    Reduced,
    RosterPart,
    pack,
    unpack,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.wire.test_messages import example_of

ATTEMPT = Attempt(1, "a", "a.1")
HEAD = Head("0-g", "0-g", 0, "s", "a", (("a", "a.1"),), 20, 2**62, None)


def join_of(peer_id: str, linked: tuple[str, ...] = (), **fields: object) -> Join:
    join = Join(
        "0-g", 1, ATTEMPT, f"{peer_id}.1", "state", True, 100, 0, 20, 10.0, 1e6, linked, False, None, None, None
    )  # fmt: skip
    return msgspec.structs.replace(join, **fields)


def arrived_of(attempt: Attempt, part: int, complete: tuple[str, ...], root: bytes = bytes(32)) -> Arrived:
    """A report of members with one norm and one root."""
    return Arrived("0-g", 1, attempt, part, complete, (), (1.0,) * len(complete), (root,) * len(complete))


def scales(
    norms: dict[str, float], leader: str | None = "a", guard: str = "exclude", mean: str = "weighted", **tokens: int
) -> list[float]:
    joins = {name: join_of(name, tokens=tokens.get(name, 100)) for name in norms}
    verdicts = guarded(RunConfig(round_guard=guard, round_mean=mean), joins, norms, leader)
    assert list(verdicts) == list(norms)
    return [verdict.scale for verdict in verdicts.values()]


def test_a_member_that_is_scaled_has_its_share_times_its_scale_however_large_it_is() -> None:
    assert scaled_down([2.0, 1.0], [1.0, 1.0]) == [2.0, 1.0]
    for scale in (0.5, 1e-6):
        first, second, third = scaled_down([2.0, 1.0, 1.0], [1.0, 1.0, scale])
        assert (first, second) == (2.0, 1.0)
        assert third / (2 + 1 + third) == pytest.approx(scale / 4)
    # A liar of two with 1000 times the norm of the other moves the mean as far as one with 3 times.
    assert scaled_down([0.0, 4.0], [1.0, 0.25]) == [3.0, 1.0]  # one without tokens
    first, second = scaled_down([1.0, 1.0], scales({"a": 1.0, "b": 1000.0}))
    assert 1000 * second / (first + second) == pytest.approx(3 / 2)


def test_who_is_above_three_times_the_median_norm_is_left_out_or_scaled_down() -> None:
    norms = {"a": 1.0, "b": 2.0, "c": 6.0, "d": 1e6, "e": 1.5}
    assert scales(norms) == [1, 1, 1, 0, 1]
    assert scales({**norms, "c": 6.01}) == [1, 1, 0, 0, 1]
    assert scales(norms, guard="clip") == [1, 1, 1, 6e-6, 1]
    assert scales(norms, guard="off") == [1] * 5
    assert scales({"a": 1.0, "b": 1e6, "c": 1.0}, leader="b") == [1, 0, 1]  # whoever leads


def test_of_two_members_the_leader_judges_by_its_own_unless_it_is_new() -> None:
    assert scales({"a": 1.0, "b": 3.0}) == [1, 1]
    assert scales({"a": 1.0, "b": 3.1}, leader="b") == [1, 1]
    for guard in ("exclude", "clip"):
        assert scales({"a": 1.0, "b": 10.0}, guard=guard) == [1, pytest.approx(0.3)]
    # Three means of two are the weighted one; the disjoint mean does not scale.
    assert scales({"a": 1.0, "b": 10.0}, mean="clipped") == [1, pytest.approx(0.3)]
    assert scales({"a": 1.0, "b": 10.0}, mean="disjoint") == [1, 0]
    assert scales({"a": 1.0, "b": 10.0}, guard="off") == [1, 1]
    assert scales({"a": 1.0, "b": 100.0}, leader=None) == [1, 1]
    assert scales({"a": 1e9}) == [1]


def test_more_tokens_allow_a_larger_norm_within_limits() -> None:
    norms = {"a": 1.0, "b": 4.0, "c": 1.0}
    assert scales(norms) == [1, 0, 1]
    assert scales(norms, b=180) == [1, 1, 1]
    assert scales({**norms, "b": 4.3}, b=2**53) == [1, 0, 1]
    # Fewer than the median take nothing away.
    assert scales(norms, b=180, c=1) == [1, 1, 1]


def test_members_without_any_change_do_not_leave_out_those_that_have_trained() -> None:
    assert scales({"a": 0.0, "b": 0.0, "c": 5.0}) == [1, 1, 1]
    assert scales({"a": 0.0, "b": 5.0}) == [1, 1]
    assert scales({"a": 0.0, "b": 0.0}) == [1, 1]
    assert scales({"a": 0.0, "b": 5.0, "c": 5.0, "d": 16.0}, a=0) == [1, 1, 1, 0]


def test_norms_are_summed_over_the_parts_and_of_several_reports_the_median_counts() -> None:
    plan = [RosterPart(0, 1024, "a", ()), RosterPart(1024, 2048, "b", ())]
    squares = {0: {"a": 9.0, "b": 1.0}, 1: {"a": 16.0, "b": 0.0}}
    assert norms_of(plan, {0, 1}, squares, ["a", "b"]) == {"a": 5.0, "b": 1.0}
    # As "gather" has it: all reducers receive everything.
    plan = [RosterPart(0, 1024, name, ()) for name in "abc"]
    squares = {0: {"a": 4.0}, 1: {"a": 4.0}, 2: {"a": 1e300}}
    assert norms_of(plan, {0, 1, 2}, squares, ["a"]) == {"a": 2.0}
    assert norms_of(plan, {0, 1}, {0: {"a": 4.0}, 1: {}}, ["a"]) == {"a": 2.0}


def test_reducers_that_report_other_roots_than_the_agreed_one_are_named() -> None:
    plan = [RosterPart(8 * n, 8 * n + 8, name, ()) for n, name in enumerate("abc")]
    roots = {0: {"x": b"1", "y": b"1"}, 1: {"x": b"1", "y": b"2"}, 2: {"x": b"2", "y": b"2"}}
    assert policy.conflicts_of(roots, plan, "x") == {2: {"x"}, 0: {"y"}}
    assert policy.conflicts_of(roots, plan, "c") == {0: {"x", "y"}, 1: {"x"}}
    assert policy.conflicts_of({0: roots[0]}, plan, "x") == {}


def test_of_too_many_members_a_sample_contributes_another_in_each_round() -> None:
    joins = {f"p{i:03}": join_of(f"p{i:03}") for i in range(200)}
    counts: Counter[str] = Counter()
    for round_ in range(50):
        state = f"state {round_}"
        joins = {name: msgspec.structs.replace(join, state_hash=state) for name, join in joins.items()}
        members = policy.members_of(joins, state, 64)
        assert len(members) == 64
        assert members == sorted(members)
        assert members == policy.members_of(dict(reversed(joins.items())), state, 64)
        counts.update(members)
    assert set(counts) == set(joins)
    assert max(counts.values()) < 32  # 16 on the mean
    few = dict(list(joins.items())[:64])
    assert policy.members_of(few, state, 64) == sorted(few)


def test_who_has_no_snapshot_or_stands_elsewhere_does_not_contribute() -> None:
    joins = {"a": join_of("a"), "b": join_of("b", has_snapshot=False), "c": join_of("c", state_hash="other")}
    assert policy.members_of(joins, "state", 64) == ["a"]


def test_an_incredible_rate_is_one_of_the_best_and_not_the_best_by_far() -> None:
    names = ("a", "b", "c", "d")
    joins = {name: join_of(name, tuple(other for other in names if other != name)) for name in names}
    joins["a"] = msgspec.structs.replace(joins["a"], rate=8e6)
    joins["d"] = msgspec.structs.replace(joins["d"], rate=1e300)
    # Both count as four times the median, and then the id decides.
    assert policy.reducers_of(joins, ()) == ["a", "d", "b", "c"]
    assert policy.reducers_of(joins, {"d"}) == ["a", "b", "c"]
    assert policy.reducers_of(joins, set(names)) == ["a", "d", "b", "c"]
    joins["b"] = msgspec.structs.replace(joins["b"], linked=("a", "c"))
    assert policy.reducers_of(joins, ()) == ["a", "b", "c"]
    with pytest.raises(RoundFailedError, match="no member is linked to all others"):
        policy.reducers_of({name: msgspec.structs.replace(joins[name], linked=()) for name in names}, ())


def test_a_member_that_names_too_few_links_cannot_stop_rounds() -> None:
    names = ("a", "b", "c", "d", "e")
    joins = {name: join_of(name, linked=tuple(n for n in names if n != name)) for name in names}
    voters = [(name, joins[name].incarnation) for name in names]
    assert list(policy.averageable(joins, (), voters)) == list(names)
    silent = joins | {"c": join_of("c", linked=())}
    assert list(policy.averageable(silent, (), voters)) == list(names)  # it can average for all, until it fails to
    assert list(policy.averageable(silent, {"c"}, voters)) == ["a", "b", "d", "e"]
    unlinked = {name: msgspec.structs.replace(j, linked=tuple(set(j.linked) - {"c"})) for name, j in silent.items()}
    assert list(policy.averageable(unlinked, (), voters)) == ["a", "b", "d", "e"]
    accomplice = joins | {"c": join_of("c", linked=("d",))}
    assert list(policy.averageable(accomplice, (), voters)) == list(names)
    assert list(policy.averageable(accomplice, {"c", "d"}, voters)) == ["a", "b", "d", "e"]
    # Two of four that reach each other, and nobody else, are no majority.
    apart = {name: join_of(name, linked=other) for name, other in zip(names[:4], [("b",), ("a",), (), ()], strict=True)}
    assert list(policy.averageable(apart, (), voters)) == list(names[:4])


def test_strangers_that_join_and_name_each_other_only_are_left_out_once_they_are_avoided() -> None:
    members, strangers = ("a", "b", "c"), ("w", "x", "y", "z")
    joins = {name: join_of(name, linked=members + strangers) for name in members}
    joins |= {name: join_of(name, linked=strangers) for name in strangers}
    voters = [(name, joins[name].incarnation) for name in members]
    assert list(policy.averageable(joins, (), voters)) == [*members, *strangers]
    assert list(policy.averageable(joins, strangers, voters)) == list(members)
    assert list(policy.averageable(joins, strangers, voters[:1])) == list(members)


def test_strangers_that_name_one_voter_do_not_make_it_the_only_reducer() -> None:
    members, strangers = ("a", "b", "c"), ("w", "x", "y", "z")
    joins = {name: join_of(name, linked=members + strangers) for name in members}
    joins |= {name: join_of(name, linked=("a",)) for name in strangers}
    voters = [(name, joins[name].incarnation) for name in members]
    assert list(policy.averageable(joins, {"a", *strangers}, voters)) == list(members)
    # Nor does an avoided voter that is the only one keep them all.
    apart = {name: join_of(name, linked=strangers) if name in strangers else joins[name] for name in joins}
    assert list(policy.averageable(apart, {"a", *strangers}, voters[:1])) == list(members)


@pytest.mark.parametrize("voters", [3, 4, 5, 8, 16])
@pytest.mark.parametrize("strangers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("reach", ["leader", "all"])
def test_strangers_that_each_deny_a_link_with_other_voters_stop_no_round(
    voters: int, strangers: int, reach: str
) -> None:
    """Every voter is left out by one of them, so that none can reduce, and they name more links than voters have."""
    members, liars = [f"m{number:02}" for number in range(voters)], [f"x{number:02}" for number in range(strangers)]
    joins = {name: join_of(name, linked=tuple(members)) for name in members}
    for name in members if reach == "all" else members[:1]:
        joins[name] = join_of(name, linked=(*members, *liars))
    for number, name in enumerate(liars):
        joins[name] = join_of(name, linked=(*liars, *(m for i, m in enumerate(members) if i % strangers != number)))
    avoided = liars if reach == "all" else []  # as reducers they have been silent
    left = policy.averageable(joins, avoided, [(name, joins[name].incarnation) for name in members])
    assert set(policy.reducers_of(left, avoided)) <= set(members)
    assert 2 * len(left.keys() & set(members)) > len(members)


def test_without_an_only_voter_that_is_avoided_those_that_are_linked_go_on() -> None:
    joins = {name: join_of(name, linked=tuple("abcdef")) for name in "bcdef"}
    joins |= {"a": join_of("a", linked=tuple("bcdefg")), "g": join_of("g", linked=("a",))}
    left = policy.averageable(joins, {"a"}, [("a", joins["a"].incarnation)])
    assert list(left) == list("bcdefa")
    assert policy.reducers_of(left, {"a"}) == list("bcdef")


def test_members_that_are_linked_with_one_voter_only_are_not_left_out_for_it() -> None:
    """Nobody else can reduce, so it does although it is avoided."""
    joins = {"a": join_of("a", linked=tuple("bcdefg"))} | {name: join_of(name, linked=("a",)) for name in "bcdefg"}
    assert list(policy.averageable(joins, {"a"}, [("a", joins["a"].incarnation)])) == list("abcdefg")


def test_where_all_reducers_report_the_same_hashes_ours_count_else_those_of_most() -> None:
    plan = [RosterPart(0, 9, reducer, ()) for reducer in "xabc"]
    true, false = ({i: Reduced("l", 1, ATTEMPT, i, (digest,), (), False) for i in range(4)} for digest in "tf")
    assert policy.counted_reports({0: false[0]}, plan, (), "a") == {}
    assert policy.counted_reports({0: false[0], 1: true[1]}, plan, (), "a") == {1: true[1]}
    # z reduces nothing, and waits until more than half agree, or for all that are not gone.
    assert policy.counted_reports({1: true[1], 2: true[2], 3: true[3]}, plan, (), "z").keys() == {1, 2, 3}
    reports = {0: false[0], 1: true[1], 2: true[2]}
    assert policy.counted_reports(reports, plan, (), "z") == {}
    assert policy.counted_reports(reports, plan, {"c"}, "z") == {1: true[1], 2: true[2]}
    assert policy.counted_reports({}, plan, set("xabc"), "z") == {}
    apart = [RosterPart(number, number + 1, part.reducer, ()) for number, part in enumerate(plan)]
    assert policy.counted_reports(reports, apart, (), "a") == reports


def test_only_members_that_arrived_whole_at_every_reducer_are_in_the_mean() -> None:
    complete = {"a": {0, 1}, "b": {0}, "c": {0, 1}, "d": set[int]()}
    sends = {name: {0, 1} for name in "abcd"}
    assert policy.included(sends, complete, [0, 1], {"c"}) == ["a"]
    assert policy.included(sends, complete, [0], ()) == ["a", "b", "c"]


def test_a_member_is_whole_at_a_reducer_if_all_that_it_sends_there_arrived() -> None:
    plan = [RosterPart(0, 9, "a", ("a", "b")), RosterPart(0, 9, "b", ("b",)), RosterPart(9, 18, "c", ())]
    sends = policy.parts_of(["a", "b", "c"], plan)
    assert sends == {"a": {0, 2}, "b": {0, 1, 2}, "c": {2}}
    complete = {"a": {0, 2}, "b": {0, 2}, "c": {2}}
    assert policy.included(sends, complete, [0, 1, 2], ()) == ["a", "c"]
    assert policy.included(sends, complete, [0, 2], ()) == ["a", "b", "c"]
    assert policy.included(sends, complete, [0], ()) == ["a", "b"]


def test_incredible_speeds_and_counts_fit_the_wire() -> None:
    joins = {"a": join_of("a"), "b": join_of("b"), "c": join_of("c", speed=1e300, tokens=2**53, run_step=2**53)}
    contributors = [Contributor(name, f"{name}.1", 1.0, bytes(32)) for name in joins]
    record = proposal_of(RunConfig(), HEAD, joins, list(joins), contributors, Conclusion((), ((1e300,) * 9,))).record
    assert unpack(Record, pack(record)) == record
    assert dict(record.intervals)["c"] == 16 * RunConfig().sync_every


@pytest.mark.parametrize(
    ("weights", "expected"), [("tokens", [10.0, 100.0, 200.0]), ("equal", [1.0, 1.0, 1.0]), ("shard", [5.0, 6.0, 7.0])]
)
def test_no_outer_gradient_weighs_more_than_twice_the_median(weights: str, expected: list[float]) -> None:
    joins = [
        join_of(name, tokens=tokens, shard_tokens=shard)
        for name, tokens, shard in (("a", 10, 5), ("b", 100, 6), ("c", 10**9, 7))
    ]
    assert policy.weights_of(RunConfig(round_weights=weights), joins) == expected


@pytest.mark.parametrize(
    ("tokens", "speeds", "expected"),
    [
        ((0, 0, 70), (1, 1, 1), (1, 1, 1)),  # two loops report no tokens
        ((0, 0, 70), (0, 0, 1), (0, 0, 70)),  # two peers have just joined
        ((0, 0, 0, 70), (0, 1, 1, 1), (0, 1, 1, 1)),
        ((0, 70), (1, 1), (0, 70)),
        ((0, 0, 70, 70), (1, 1, 1, 1), (0, 0, 70, 70)),
        ((0, 0), (1, 0), (1, 0)),
        ((0, 0), (0, 0), (1, 1)),
    ],
)
def test_where_most_that_train_tell_no_tokens_all_of_them_weigh_the_same(
    tokens: tuple[int, ...], speeds: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    joins = [
        join_of(name, tokens=count, shard_tokens=count, speed=speed)
        for name, count, speed in zip("abcd", tokens, speeds, strict=False)
    ]
    for weights in ("tokens", "shard"):
        assert tuple(policy.weights_of(RunConfig(round_weights=weights), joins)) == expected


def reports(names: str, *lines: str) -> tuple[dict[int, set[str]], dict[str, set[int]]]:
    """By part, the members that its reducer gives up; by member, the parts where it is complete.

    A line for each reducer: what it says of each member in the order of `names`; "+": complete, "-": given up, ".":
    awaited.
    """
    failed = {part: {n for n, said in zip(names, line, strict=True) if said == "-"} for part, line in enumerate(lines)}
    complete = {n: {part for part, line in enumerate(lines) if line[i] == "+"} for i, n in enumerate(names)}
    return failed, complete


@pytest.mark.parametrize(
    ("says", "faulty"),
    [
        (["+++", "+++", "+++"], ""),
        (["+"], ""),
        # One gives up at least half of the others, who are complete elsewhere.
        (["++++", "++++", "++++", "--.+"], "d"),
        (["++++", "++++", "++++", "-..+"], ""),
        (["+++", "+++", "-.+"], "c"),
        (["++", "-+"], "b"),
        # Its chunks reach no reducer: it is itself at fault.
        (["++-", "++-", "..+"], ""),
        (["++++-", "++++-", "++++-", "++++-", "....+"], ""),
        # Two of five, and three of seven, that say that nothing arrives: each is given up by the other.
        (["+++++", "+++++", "+++++", "---+-", "----+"], "de"),
        (["+" * 7] * 4 + ["----+--", "-----+-", "------+"], "efg"),
        # So does half of the reducers, and the others contradict.
        (["++++", "++++", "--+-", "---+"], "cd"),
        # Two members send to none of three: they are at fault, and no reducer is.
        (["+++--", "+++--", "+++--", "+++++", "+++++"], ""),
        # One liar of three gives up an honest one, and withholds from the other.
        (["+++", "++-", "--+"], "c"),
        # The line between two groups of the same size: each says so of the other.
        (["++--", "++--", "--++", "--++"], "abcd"),
        (["+++---"] * 3 + ["---+++"] * 3, "abcdef"),
        # Of a small and a large group, only the small one's.
        (["+++--", "+++--", "+++--", "---++", "---++"], "de"),
    ],
)
def test_a_reducer_that_gives_up_half_of_those_who_are_complete_at_most_others_is_at_fault(
    says: list[str], faulty: str
) -> None:
    names = "abcdefg"[: len(says[0])]
    failed, complete = reports(names, *says)
    parts = range(len(says))
    sends = {name: set(parts) for name in names}
    assert policy.at_fault(failed, sends, complete, parts) == {names.index(name) for name in faulty}
    # Those that are not to be blamed, as a leader itself.
    for part in parts:
        others = {p: members for p, members in failed.items() if p != part}
        assert part not in policy.at_fault(others, sends, complete, parts)


def test_if_somebody_is_at_fault_those_are_who_give_up_the_most() -> None:
    """Each liar gives up less than half, and together they give up all honest members."""
    failed, complete = reports("abcdxy", *["++++++"] * 4, "--++++", "++--++")
    parts = range(6)
    sends = {name: set(parts) for name in "abcdxy"}
    assert policy.at_fault(failed, sends, complete, parts) == set()
    assert policy.at_fault(failed, sends, complete, parts, must_blame=True) == {4, 5}
    assert policy.at_fault({4: {"a"}, 5: set()}, sends, {**complete, "a": set()}, parts, must_blame=True) == set()


def test_a_reducer_is_judged_by_those_who_send_to_it() -> None:
    sends = {"a": {0, 1}, "b": {0, 1}, "c": {1}, "x": {0}}
    assert policy.at_fault({0: {"a"}}, sends, {**sends, "a": {1}}, [0, 1]) == {0}
    assert not policy.at_fault({0: {"a"}}, {**sends, "c": {0, 1}}, {**sends, "a": {1}}, [0, 1])


def test_an_only_reducer_is_at_fault_when_it_gives_up_more_than_half() -> None:
    none: dict[str, set[int]] = {"a": set(), "b": set(), "x": {0}}
    three = {name: {0, 1, 2} for name in "abx"}
    assert policy.at_fault({0: {"a", "b"}}, three, none, [0]) == {0}
    assert not policy.at_fault({0: {"a"}}, three, none, [0])


@pytest.mark.parametrize(
    ("says", "gone", "awaited"),
    [
        (["+++", "+++", "+++"], "", False),
        (["+++", "++.", "+++"], "", True),
        (["+++", "++.", "+++"], "c", False),
        (["++-", "++.", "+++"], "", True),  # it may turn out that a is at fault
        (["++-", "++-", "+++"], "", False),
        (["++-", "++-", "++."], "", False),
    ],
)
def test_members_are_awaited_while_they_can_become_complete(says: list[str], gone: str, awaited: bool) -> None:
    failed, complete = reports("abc", *says)
    parts = range(len(says))
    sends = {name: set(parts) for name in "abc"}
    assert policy.is_anyone_awaited(failed, sends, complete, parts, gone) == awaited


@pytest.mark.parametrize("claimed", [0, 20, 60, 100, 101, 2**53])
@pytest.mark.parametrize("speed", [0.0, 1e-9, 30.0, 1e9])
@pytest.mark.parametrize(
    "run",
    [
        RunConfig(),
        RunConfig(sync_every=1, total_steps=0),
        RunConfig(total_steps=100, outer_lr_schedule="cosine", sync_schedule="grow"),
        RunConfig(total_steps=100, outer_optimizer="adam", outer_lr=1e9, round_weights="equal", sync_schedule="shrink"),
    ],
    ids=["plain", "endless", "cosine", "adam"],
)
def test_a_record_passes_the_check_whatever_the_members_claim(run: RunConfig, speed: float, claimed: int) -> None:
    at_length = 0 < run.total_steps <= claimed
    joins = {
        "a": join_of("a", tokens=2**53, run_step=claimed, at_length=at_length, speed=speed),
        "b": join_of("b", tokens=0, run_step=claimed, at_length=at_length),
    }
    weights = policy.weights_of(run, list(joins.values()))
    contributors = [
        Contributor(name, f"{name}.1", weight, bytes(32)) for name, weight in zip(joins, weights, strict=True)
    ]
    head = msgspec.structs.replace(HEAD, tokens_total=1000)
    conclusion = Conclusion((Part(0, 1024, "", "a"),), ((),))
    record = proposal_of(run, head, joins, list(joins), contributors, conclusion).record
    check_record(record, run, averaging_of(run), Grid(0, 1024))
    check_advance(record, run, head)
    assert 20 <= record.run_step <= (run.total_steps or 20 + MOST_INTERVALS * run.sync_every)
    assert (record.outer_lr == 1.0 and record.outer_optimizer == "sgd") == at_length


SWARM = [f"peer-{i}" for i in range(1000)]


def test_all_are_drawn_if_a_round_can_hold_them() -> None:
    assert drawn("state", ["b", "a"], 64) == ["a", "b"]
    assert may_be_drawn(2**64 - 1, 64, 64.0)


def test_each_round_draws_others_and_all_peers_in_turn() -> None:
    draws = [drawn(f"state {round_}", SWARM, 64) for round_ in range(200)]
    assert all(len(draw) == 64 for draw in draws)
    assert draws[0] != draws[1]
    assert set().union(*draws) == set(SWARM)


def test_ids_chosen_for_one_draw_are_not_drawn_more_often_in_the_next_ones() -> None:
    """Nobody knows the state that a later round starts from, so nobody can choose ids for it."""
    chosen = drawn("state", [f"made-{i}" for i in range(20_000)], 64)
    assert len(set(drawn("state", SWARM + chosen, 64)).intersection(chosen)) >= 56
    later = [set(drawn(f"state {round_}", SWARM + chosen, 64)).intersection(chosen) for round_ in range(50)]
    assert max(map(len, later)) <= 12  # 3.9 on the mean


def test_a_peer_that_sees_a_part_of_the_swarm_draws_the_same_ones_of_it() -> None:
    whole = set(drawn("state", SWARM, 64))
    part = SWARM[::3]
    assert whole.intersection(part) <= set(drawn("state", part, 64))


def test_by_their_own_rank_somewhat_more_peers_take_part_than_are_drawn() -> None:
    likely = {name for name in SWARM if may_be_drawn(rank("state", name), 64, len(SWARM))}
    assert set(drawn("state", SWARM, 64)) <= likely
    assert 64 < len(likely) < 1.5 * MARGIN * 64


def head_of(round_: int, contributors: str, lineage: str = "L", record_lineage: str | None = None) -> Head:
    named = tuple(Contributor(peer_id, "1", 1.0, b"") for peer_id in contributors)
    record = msgspec.structs.replace(
        example_of(Record), lineage=record_lineage or lineage, round=round_, contributors=named
    )
    return Head("L", lineage, round_, "", "", (), 0, 0, Commit(record, Attempt(0, "a", "1"), ()))


def admitted(recent: RecentContributors) -> str:
    return "".join(filter(recent.admits, "abcdefgx"))


def test_before_the_first_round_everybody_is_admitted() -> None:
    assert admitted(RecentContributors()) == "abcdefgx"
    assert admitted(RecentContributors().after(Head("L", "L", -1, "", "", (), 0, 0, None))) == "abcdefgx"


def test_a_joiner_knows_the_contributors_of_its_head() -> None:
    assert admitted(RecentContributors().after(head_of(7, "ab"))) == "ab"


def test_contributors_of_the_last_eight_rounds_are_admitted() -> None:
    recent = RecentContributors().after(head_of(0, "abc"))
    for round_ in range(1, RECENT_ROUNDS):
        recent = recent.after(head_of(round_, "ab"))
        assert admitted(recent) == "abc"
    assert admitted(recent.after(head_of(RECENT_ROUNDS, "ad"))) == "abd"


def test_rounds_that_this_peer_missed_count_as_well() -> None:
    recent = RecentContributors().after(head_of(3, "ab")).after(head_of(4, "ac"))
    assert admitted(recent.after(head_of(9, "d"))) == "abcd"
    assert admitted(recent.after(head_of(11, "d"))) == "acd"
    assert admitted(recent.after(head_of(99, "d"))) == "d"


def test_another_lineage_begins_anew_and_one_that_follows_ours_does_not() -> None:
    recent = RecentContributors().after(head_of(3, "ab"))
    assert admitted(recent.after(head_of(4, "cd", lineage="M"))) == "cd"
    follows = recent.after(head_of(3, "ab", lineage="M", record_lineage="L"))
    assert admitted(follows) == "ab"
    assert admitted(follows.after(head_of(4, "a", lineage="M"))) == "ab"
    # Back to a checkpoint of before the first round.
    assert admitted(recent.after(Head("L", "M", -1, "", "", (), 0, 0, None))) == "abcdefgx"


def test_memory_is_bounded() -> None:
    recent = RecentContributors()
    for round_ in range(1000):
        recent = recent.after(head_of(round_, "ab"))
    assert len(recent.rounds) == RECENT_ROUNDS


def test_a_leader_that_names_as_few_as_it_may_keeps_half_of_the_contributors() -> None:
    """In each of the next rounds at least; whoever leads another one may name the others again."""
    names = "abcdefghijklmnop"
    recent = RecentContributors().after(head_of(0, names))
    for round_ in range(1, RECENT_ROUNDS + 1):
        known = {(name, "1") for name in names if recent.admits(name)}
        few, too_few = head_of(round_, names[:8]), head_of(round_, names[:7])
        assert few.record is not None
        assert too_few.record is not None
        check_company(few.record, known)
        with pytest.raises(RoundFailedError, match="names 7 of the 16 peers"):
            check_company(too_few.record, known)
        recent = recent.after(few)
