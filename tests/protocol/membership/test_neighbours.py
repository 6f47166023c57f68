"""Whom a peer dials, how many neighbours it needs, and which links it ends."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from p2ptrain.protocol.membership.neighbours import (
    DIALLED_AT_ONCE,
    FIRST_DIAL_S,
    MAX_DIALLED,
    MAX_NEIGHBOURS,
    MAX_ROUND_LINKS,
    NAMED_AT_ONCE,
    NEIGHBOURS,
    KnownPeer,
    free_dials,
    in_order,
    missing_neighbours,
    time_limit_s,
    whom_to_dial,
    whom_to_leave,
)


def peer(*, dials: int = 0, cut_short: bool = False, teller: str = "", is_ours: bool = False) -> KnownPeer:
    return KnownPeer((), "trainer", 0.0, teller, dials=dials, cut_short=cut_short, is_ours=is_ours)


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{i:03d}" for i in range(count)]


def peers(ids: Iterable[str], **what: bool | str) -> dict[str, KnownPeer]:
    return {peer_id: peer(**what) for peer_id in ids}  # type: ignore[arg-type]


def rng() -> random.Random:
    return random.Random(0)


# --- in which order ----------------------------------------------------------------------------------------------


def test_of_many_the_initial_peers_come_first_and_then_those_dialled_least_often() -> None:
    known = peers(names("new", 9)) | {"hung": peer(cut_short=True), "failed": peer(dials=1)} | peers(names("old", 9))
    for peer_id in names("old", 9):
        known[peer_id].dials = 2
    known["initial"] = peer(dials=7)
    order = in_order(list(known), known, {"initial"}, rng())
    assert order[0] == "initial"
    assert set(order[1:10]) == set(names("new", 9))
    assert order[10:12] == ["hung", "failed"]
    assert set(order[12:]) == set(names("old", 9))
    assert order[1:10] != names("new", 9), "made-up ids could come before all others"


def test_few_are_dialled_as_they_come() -> None:
    due = names("p", DIALLED_AT_ONCE)[::-1]
    assert in_order(due, peers(due), set(), rng()) == due


@pytest.mark.parametrize(
    ("one", "is_chosen", "due", "limit_s"),
    [
        (peer(), False, DIALLED_AT_ONCE + 1, FIRST_DIAL_S),
        (peer(), False, DIALLED_AT_ONCE, math.inf),
        (peer(), True, DIALLED_AT_ONCE + 1, math.inf),
        (peer(cut_short=True), False, DIALLED_AT_ONCE + 1, math.inf),
        (peer(dials=1), False, DIALLED_AT_ONCE + 1, math.inf),
    ],
)
def test_a_first_dial_is_cut_short_while_more_peers_wait(
    one: KnownPeer, is_chosen: bool, due: int, limit_s: float
) -> None:
    assert time_limit_s(one, is_chosen=is_chosen, due=due) == limit_s


@pytest.mark.parametrize(
    ("linked", "dialling", "free"),
    [
        (0, 0, DIALLED_AT_ONCE),
        (0, DIALLED_AT_ONCE, 0),
        (MAX_DIALLED - 3, 0, 3),
        (MAX_DIALLED - 3, 2, 1),
        (MAX_DIALLED + 9, 0, 0),
    ],
)
def test_so_many_dials_start_as_links_are_missing_and_dials_are_free(linked: int, dialling: int, free: int) -> None:
    assert free_dials(linked, dialling, MAX_DIALLED) == free


# --- whom, in a large swarm --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "missing"),
    [
        (0, 0, NEIGHBOURS),
        (0, 5, NEIGHBOURS - 5),
        (NEIGHBOURS // 2, NEIGHBOURS // 2, 0),
        (NEIGHBOURS, 0, NEIGHBOURS // 2),
        (100, NEIGHBOURS // 2 - 1, 1),
        (100, NEIGHBOURS, 0),
    ],
)
def test_half_of_the_neighbours_are_chosen_by_the_peer_itself(theirs: int, ours: int, missing: int) -> None:
    assert missing_neighbours([peer()] * theirs + [peer(is_ours=True)] * ours) == missing


def test_all_peers_of_the_round_are_dialled_and_as_many_others_as_are_missing() -> None:
    of_round, others = names("r", 40), names("o", 60)
    linked = peers(names("l", NEIGHBOURS - 3), is_ours=True)
    known = peers(of_round) | peers(others) | linked
    whom = whom_to_dial([*others, *of_round], known, list(linked), (), of_round, rng())
    assert whom[:40] == of_round
    assert len(whom) == 40 + 3
    assert set(whom[40:]) < set(others)
    assert whom[40:] != others[:3], "not those that came first"


def test_links_to_peers_of_the_round_are_no_neighbours() -> None:
    of_round, others = names("r", NEIGHBOURS), names("o", 60)
    known = peers(of_round, is_ours=True) | peers(others)
    assert len(whom_to_dial(others, known, of_round, (), of_round, rng())) == NEIGHBOURS


def test_few_peers_of_the_round_that_were_only_named_are_dialled_at_once_and_after_those_that_were_found() -> None:
    named, found = names("n", 20), names("f", 5)
    known = peers(named, teller="liar") | peers(found) | peers(["l", "m"], teller="liar")
    of_round = set(known)
    linked = peers(names("k", NEIGHBOURS), is_ours=True)
    due = [*named, *found]
    assert whom_to_dial(due, known | linked, linked, (), of_round, rng()) == found + named[:NAMED_AT_ONCE]
    dialling = ["l", "m", "forgotten meanwhile"]
    assert whom_to_dial(due, known | linked, linked, dialling, of_round, rng()) == found + named[: NAMED_AT_ONCE - 2]


@pytest.mark.parametrize("missing", [0, 5])
def test_no_more_than_so_many_links_are_opened_for_a_round(missing: int) -> None:
    linked = peers(names("l", MAX_ROUND_LINKS - missing), is_ours=True)
    of_round = names("r", 40)
    whom = whom_to_dial(of_round, peers(of_round) | linked, linked, (), of_round, rng())
    assert whom == of_round[:missing]


# --- whom to leave -----------------------------------------------------------------------------------------------


def test_no_link_is_ended_while_there_are_not_too_many() -> None:
    neighbours = peers(names("p", MAX_NEIGHBOURS))
    assert whom_to_leave(neighbours, neighbours, (), rng()) == []


def test_as_many_are_left_as_are_too_many_but_none_that_the_peer_chose_and_needs() -> None:
    ours, theirs = peers(names("o", NEIGHBOURS), is_ours=True), peers(names("t", 20))
    known = ours | theirs
    left = whom_to_leave(known, known, (), rng())
    assert len(set(left)) == NEIGHBOURS + 20 - MAX_NEIGHBOURS
    assert set(left) < set(theirs)


def test_of_more_own_neighbours_than_needed_some_are_left_and_those_in_use_are_kept() -> None:
    ours = peers(names("o", MAX_NEIGHBOURS + 10), is_ours=True)
    in_use = names("o", MAX_NEIGHBOURS + 10)[-NEIGHBOURS:]
    left = whom_to_leave(ours, ours, in_use, rng())
    assert len(set(left)) == 10
    assert not set(left) & set(in_use)


def test_no_link_in_use_is_ended_however_many_there_are() -> None:
    theirs = peers(names("t", 100))
    assert whom_to_leave(theirs, theirs, list(theirs), rng()) == []
    left = whom_to_leave(theirs, theirs, names("t", 95), rng())
    assert sorted(left) == names("t", 100)[95:]
