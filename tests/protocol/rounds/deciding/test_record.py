"""Claims that no honest peer makes are refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.averaging import Conclusion, averaging_of
from p2ptrain.protocol.rounds.deciding.record import check_arrived, check_join, check_roster, name_of, proposal_of
from p2ptrain.protocol.wire.messages import Attempt, Contributor, Head, Part, Record, Roster, RosterPart
from p2ptrain.settings.config import RunConfig
from tests.protocol.rounds.deciding.test_policy import ATTEMPT, arrived_of, join_of
from tests.protocol.wire.test_messages import example_of


def test_a_report_has_one_norm_and_one_root_for_each_member() -> None:
    arrived = arrived_of(ATTEMPT, 0, ("a", "b"))
    check_arrived(arrived, audited=True, num_blocks=1)
    lies: list[dict[str, Any]] = [
        {"norms": (1.0,)}, {"norms": (1.0, -1e-9)}, {"roots": (bytes(32),)}, {"roots": (bytes(32), b"")}
    ]  # fmt: skip
    for lie in lies:
        with pytest.raises(WireError, match="Arrived"):
            check_arrived(msgspec.structs.replace(arrived, **lie), audited=True, num_blocks=1)
    with pytest.raises(WireError, match="root"):
        check_arrived(arrived, audited=False, num_blocks=1)
    check_arrived(arrived_of(ATTEMPT, 0, ("a",), root=b""), audited=False, num_blocks=1)


def test_a_reported_norm_is_one_that_values_within_the_limit_can_have() -> None:
    arrived = arrived_of(ATTEMPT, 0, ("a", "b"))
    most = 64 * 3 * (2e12) ** 2
    for norm in (0.0, 1.0, most):
        check_arrived(msgspec.structs.replace(arrived, norms=(1.0, norm)), audited=True, num_blocks=3)
    for norm in (1.01 * most, 1.7e308, math.inf, math.nan, -math.inf, -1e-9):
        with pytest.raises(WireError, match=r"squared norm .*: must be between 0 and 7\.68e\+26"):
            check_arrived(msgspec.structs.replace(arrived, norms=(norm, 1.0)), audited=True, num_blocks=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", -1),
        ("tokens", 2**53 + 1),
        ("shard_tokens", -1),
        ("run_step", -1),
        ("run_step", 2**53 + 1),
        ("shard_tokens", 2**53 + 1),
        ("rate", -5e-324),
    ],
)
def test_a_join_with_an_impossible_claim_is_refused(name: str, value: float) -> None:
    check_join(join_of("a"))
    with pytest.raises(WireError, match=name):
        check_join(join_of("a", **{name: value}))


@pytest.mark.parametrize("count", [0, 2**53])
def test_a_join_may_claim_the_least_and_the_most(count: int) -> None:
    check_join(join_of("a", tokens=count, shard_tokens=count, run_step=count, speed=float(count), rate=float(count)))


@pytest.mark.parametrize("total_steps", [1, 100])
@pytest.mark.parametrize(("at_end", "ends"), [("a", False), ("ab", True), ("abc", True)])
def test_the_run_ends_with_the_round_in_which_half_have_done_all_steps(
    total_steps: int, at_end: str, ends: bool
) -> None:
    run = RunConfig(total_steps=total_steps, sync_every=total_steps)
    voters = tuple((name, f"{name}.1") for name in "abcd")
    head = Head("0-g", "0-g", 0, "s", "a", voters, 0, 0, None)
    joins = {name: join_of(name, run_step=0, at_length=name in at_end) for name in "abcd"}
    contributors = [Contributor(name, f"{name}.1", 1.0, b"") for name in joins]
    record = proposal_of(run, head, joins, list(joins), contributors, Conclusion((), ((1.0,) * 16,))).record
    assert record.run_step == (total_steps if ends else 0)
    endless = proposal_of(
        RunConfig(total_steps=0), head, joins, list(joins), contributors, Conclusion((), ((1.0,) * 16,))
    ).record
    assert endless.run_step == 0


@pytest.mark.parametrize(
    ("voters", "expected"),
    [
        ("a", 5 + 4 * 10),
        ("ab", 5 + 4 * 10),
        ("abc", 300),
        ("bc", 300),
        ("ax", 5 + 4 * 10),
        ("abx", 5 + 4 * 10),
        ("x", 300),
    ],
)
def test_a_record_is_no_further_ahead_than_a_quorum_of_the_voters_accepts(voters: str, expected: int) -> None:
    run = RunConfig(total_steps=0, sync_every=10)
    head = Head("0-g", "0-g", 0, "s", "a", tuple((name, f"{name}.1") for name in voters), 3, 0, None)
    joins = {name: join_of(name, run_step=run_step) for name, run_step in (("a", 5), ("b", 300), ("c", 400))}
    contributors = [Contributor(name, f"{name}.1", 1.0, b"") for name in joins]
    record = proposal_of(run, head, joins, list(joins), contributors, Conclusion((), ((1.0,) * 9,))).record
    assert record.run_step == expected


def test_a_record_names_the_root_of_a_contribution_or_where_the_parts_are_contributions_their_hash() -> None:
    record = msgspec.structs.replace(
        example_of(Record),
        contributors=(Contributor("a", "a.1", 1.0, b"root of a"), Contributor("b", "b.1", 1.0, b"")),
        parts=(Part(0, 9, "hash", "a"),),
    )
    parts, gather = (averaging_of(RunConfig(averaging=averaging)) for averaging in ("parts", "gather"))
    assert [name_of(record, (name, f"{name}.1"), parts) for name in "abc"] == [b"root of a", b"", None]
    assert [name_of(record, (name, f"{name}.1"), gather) for name in "abc"] == [b"hash", b"", None]
    assert name_of(record, ("a", "a.2"), parts) is None


ROSTER = Roster(
    "0-g", 1, Attempt(1, "x", "x.1"), ("a", "b", "x"), (RosterPart(0, 9, "a", ("b", "x")), RosterPart(9, 18, "x", ())),
    tuple(Contributor(name, f"{name}.1", 1.0, b"") for name in "abx"),
)  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"members": ("b", "a", "x")},
        {"members": ("a", "a", "b", "x")},
        {"members": tuple(sorted(["a", "b", "x", *(f"m{i}" for i in range(62))]))},
        {"parts": (RosterPart(0, 9, "a", ()), RosterPart(9, 18, "a", ()))},
        {"parts": (RosterPart(0, 18, "y", ()),)},
        {"parts": (RosterPart(0, 18, "a", ("a", "y")),)},
        {"parts": (RosterPart(0, 18, "a", ("b", "a")),)},
        {"parts": (RosterPart(0, 18, "a", ("a",) * 4096),)},
        {"expected": ROSTER.expected[:2]},
        {"expected": tuple(Contributor(name, f"{name}.1", 0.0, b"") for name in "abx")},
        {"expected": (*ROSTER.expected[:2], Contributor("y", "y.1", 1.0, b""))},
        {"expected": (*ROSTER.expected[:2], Contributor("x", "x.1", -1.0, b""))},
        {"expected": (*ROSTER.expected[:2], Contributor("x", "x.1", float("inf"), b""))},
        {"expected": (*ROSTER.expected[:2], Contributor("x", "x.1", 1.0, bytes(32)))},
    ],
)
def test_a_roster_that_no_leader_could_make_is_refused(fields: dict[str, Any]) -> None:
    check_roster(ROSTER)
    check_roster(msgspec.structs.replace(ROSTER, expected=()))
    with pytest.raises(WireError):
        check_roster(msgspec.structs.replace(ROSTER, **fields))


def test_voters_that_joined_but_were_not_drawn_count_for_how_far_a_record_may_go() -> None:
    run = RunConfig(total_steps=0, sync_every=10, max_contributors=2)
    head = Head("0-g", "0-g", 0, "s", "a", (("a", "a.1"), ("b", "b.1")), 3, 0, None)
    joins = {name: join_of(name, run_step=run_step) for name, run_step in (("a", 295), ("b", 300), ("c", 300))}
    record = proposal_of(run, head, joins, ["c"], [Contributor("c", "c.1", 1.0, b"")], Conclusion((), ((1.0,),))).record
    assert record.run_step == 300
    assert [name for name, _ in record.intervals] == ["c"]
