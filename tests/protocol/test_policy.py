"""Contributors, weights and reducers, with false claims of single members."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.rounds.deciding import policy
from p2ptrain.protocol.rounds.deciding.averaging import Conclusion, averaging_of
from p2ptrain.protocol.rounds.deciding.guard import guarded, norms_of, scaled_down
from p2ptrain.protocol.rounds.deciding.record import MOST_INTERVALS, check_advance, check_record, record_of
from p2ptrain.protocol.wire.messages import (
    Arrived,
    Attempt,
    Contributor,
    Head,
    Join,
    Part,
    Record,
    RosterPart,
    pack,
    unpack,
)
from p2ptrain.settings.config import RunConfig

ATTEMPT = Attempt(1, "a", "a.1")
HEAD = Head("0-g", "0-g", 0, "s", "a", (("a", "a.1"),), 20, 2**62, None)


def join_of(peer_id: str, linked: tuple[str, ...] = (), **fields: object) -> Join:
    join = Join(
        "0-g", 1, ATTEMPT, f"{peer_id}.1", "state", True, 100, 0, 20, 10.0, 1e6, linked, False, None, None
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
    assert policy.agreed_state(joins, "other") == "state"
    assert policy.agreed_state({"b": joins["b"], "c": joins["c"]}, "other") == "other"
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
    assert list(policy.averageable(joins, ())) == list(names)
    silent = joins | {"c": join_of("c", linked=())}
    assert list(policy.averageable(silent, ())) == list(names)  # it can average for all, until it fails to
    assert list(policy.averageable(silent, {"c"})) == ["a", "b", "d", "e"]
    unlinked = {name: msgspec.structs.replace(j, linked=tuple(set(j.linked) - {"c"})) for name, j in silent.items()}
    assert list(policy.averageable(unlinked, ())) == ["a", "b", "d", "e"]
    accomplice = joins | {"c": join_of("c", linked=("d",))}
    assert list(policy.averageable(accomplice, ())) == list(names)
    assert list(policy.averageable(accomplice, {"c", "d"})) == ["a", "b", "d", "e"]
    # Two of four that reach each other, and nobody else, are no majority.
    apart = {name: join_of(name, linked=other) for name, other in zip(names[:4], [("b",), ("a",), (), ()], strict=True)}
    assert list(policy.averageable(apart, ())) == list(names[:4])


def test_nobody_is_in_the_mean_that_is_not_whole_everywhere() -> None:
    complete = {"a": {0, 1}, "b": {0}, "c": {0, 1}, "d": set[int]()}
    sends = {name: {0, 1} for name in "abcd"}
    assert policy.included(sends, complete, [0, 1], {"c"}) == ["a"]
    assert policy.included(sends, complete, [0], ()) == ["a", "b", "c"]


def test_a_member_is_whole_where_all_that_it_sends_arrived_if_anybody_has_it() -> None:
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
    record = record_of(RunConfig(), HEAD, joins, contributors, Conclusion((), ((1e300,) * 9,)))
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


WHOLE = {"a": {0, 1, 2}, "b": {0, 1, 2}, "c": {0, 1, 2}, "x": {0, 1, 2}}
THREE = {name: WHOLE[name] for name in "abx"}


def test_a_reducer_that_alone_gives_up_half_of_the_others_is_doubted() -> None:
    complete = {**WHOLE, "a": {0, 1}, "b": {0, 1}}
    assert policy.is_doubted(2, {"a", "b"}, WHOLE, complete, [0, 1, 2])
    assert not policy.is_doubted(2, {"a"}, WHOLE, {**WHOLE, "a": {0, 1}}, [0, 1, 2])


def test_a_member_that_nobody_receives_is_at_fault_itself() -> None:
    silent = {"a": {0, 1}, "b": {0, 1}, "x": set[int]()}
    assert not policy.is_doubted(0, {"x"}, THREE, silent, [0, 1])
    assert policy.is_doubted(0, {"x"}, THREE, {**silent, "x": {1}}, [0, 1])


def test_a_reducer_is_judged_by_those_who_send_to_it() -> None:
    sends = {"a": {0, 1}, "b": {0, 1}, "c": {1}, "x": {0}}
    assert policy.is_doubted(0, {"a"}, sends, {**sends, "a": {1}}, [0, 1])
    assert not policy.is_doubted(0, {"a"}, {**sends, "c": {0, 1}}, {**sends, "a": {1}}, [0, 1])


def test_an_only_reducer_is_doubted_when_it_gives_up_more_than_half() -> None:
    none: dict[str, set[int]] = {"a": set(), "b": set(), "x": {0}}
    assert policy.is_doubted(0, {"a", "b"}, THREE, none, [0])
    assert not policy.is_doubted(0, {"a"}, THREE, none, [0])


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
    record = record_of(run, head, joins, contributors, Conclusion((Part(0, 1024, "", "a"),), ((),)))
    check_record(record, run, averaging_of(run), 1024)
    check_advance(record, run, head)
    assert 20 <= record.run_step <= (run.total_steps or 20 + MOST_INTERVALS * run.sync_every)
    assert (record.outer_lr == 1.0 and record.outer_optimizer == "sgd") == at_length
