"""The draw of a round's contributors."""

from __future__ import annotations

from p2ptrain.protocol.rounds.deciding.policy import MARGIN, drawn, may_be_drawn, rank

NAMES = [f"peer-{i}" for i in range(1000)]


def test_all_are_drawn_if_a_round_can_hold_them() -> None:
    assert drawn("state", ["b", "a"], 64) == ["a", "b"]
    assert may_be_drawn(2**64 - 1, 64, 64.0)


def test_each_round_draws_others_and_all_peers_in_turn() -> None:
    draws = [drawn(f"state {round_}", NAMES, 64) for round_ in range(200)]
    assert all(len(draw) == 64 for draw in draws)
    assert draws[0] != draws[1]
    assert set().union(*draws) == set(NAMES)


def test_ids_chosen_for_one_draw_are_not_drawn_more_often_in_the_next_ones() -> None:
    """Nobody knows the state that a later round starts from, so nobody can choose ids for it."""
    chosen = drawn("state", [f"made-{i}" for i in range(20_000)], 64)
    assert len(set(drawn("state", NAMES + chosen, 64)).intersection(chosen)) >= 56
    later = [set(drawn(f"state {round_}", NAMES + chosen, 64)).intersection(chosen) for round_ in range(50)]
    assert max(map(len, later)) <= 12  # 3.9 on the mean


def test_a_peer_that_sees_a_part_of_the_swarm_draws_the_same_ones_of_it() -> None:
    whole = set(drawn("state", NAMES, 64))
    part = NAMES[::3]
    assert whole.intersection(part) <= set(drawn("state", part, 64))


def test_by_their_own_rank_somewhat_more_peers_take_part_than_are_drawn() -> None:
    likely = {name for name in NAMES if may_be_drawn(rank("state", name), 64, len(NAMES))}
    assert set(drawn("state", NAMES, 64)) <= likely
    assert 64 < len(likely) < 1.5 * MARGIN * 64
