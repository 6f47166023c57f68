import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.algorithms.topology import TOPOLOGIES, partners


def names(count: int) -> list[str]:
    return [f"peer {i}" for i in range(count)]


def draw(topology: str, count: int, *, fan_out: int = 1, step: int = 0, rng: random.Random) -> dict[str, list[str]]:
    """The partners of every peer of a swarm at one step."""
    peers = names(count)
    return {own: partners(topology, own, peers, fan_out=fan_out, seed=7, step=step, rng=rng) for own in peers}


def mixing_matrix(chosen: dict[str, list[str]]) -> np.ndarray:
    """(k, k) mixing matrix: every peer takes the mean of its weights and of the fragments that reached it."""
    place = {peer: i for i, peer in enumerate(chosen)}
    matrix = np.eye(len(chosen))
    for sender, receivers in chosen.items():
        for receiver in receivers:
            matrix[place[receiver], place[sender]] = 1
    return matrix / matrix.sum(axis=1, keepdims=True)


def disagreement_left(matrix: np.ndarray) -> float:
    """Share of the variance between independent peers that is left after mixing."""
    centred = matrix - matrix.mean(axis=0)
    return float(np.square(centred).sum() / (len(matrix) - 1))


@pytest.mark.parametrize(
    ("topology", "fan_out", "peers", "relative"),
    [
        ("pairs", 1, 8, 1.75),
        ("push", 1, 8, 2.23),
        ("push", 2, 8, 1.46),
        ("groups", 3, 8, 1.17),
        ("pairs", 1, 64, 1.97),
        ("push", 1, 64, 2.66),
        ("push", 2, 64, 1.72),
        ("groups", 3, 64, 1.31),
        ("all", 1, 64, 1.00),
    ],
)
def test_steady_disagreement_relative_to_a_full_average(
    topology: str, fan_out: int, peers: int, relative: float
) -> None:
    """The module's table: a step adds as much as an exchange removes, so the level is 1 over the share removed."""
    rng = random.Random(1)
    left = [
        disagreement_left(mixing_matrix(draw(topology, peers, fan_out=fan_out, step=step, rng=rng)))
        for step in range(1600 // peers)
    ]
    assert 1 / (1 - np.mean(left)) == pytest.approx(relative, rel=0.04)


def test_pairs_settle_at_1_75_times_the_disagreement_of_a_full_average() -> None:
    """Random walks: every step moves every peer at random and exchanges one of 20 fragments."""

    def steady(topology: str) -> float:
        rng, noise = random.Random(2), np.random.default_rng(2)
        weights, levels = np.zeros((8, 20, 40)), []
        for step in range(600):
            weights += noise.standard_normal(weights.shape)
            fragment = noise.integers(20)
            weights[:, fragment] = mixing_matrix(draw(topology, 8, step=step, rng=rng)) @ weights[:, fragment]
            if step >= 200:
                levels.append(weights.var(axis=0).mean())
        return float(np.mean(levels))

    assert steady("pairs") / steady("all") == pytest.approx(1.75, rel=0.1)


@given(
    topology=st.sampled_from(TOPOLOGIES),
    count=st.integers(1, 12),
    fan_out=st.integers(1, 14),
    step=st.integers(0, 2**40),
)
def test_partners_are_distinct_others(topology: str, count: int, fan_out: int, step: int) -> None:
    for own, chosen in draw(topology, count, fan_out=fan_out, step=step, rng=random.Random(0)).items():
        assert own not in chosen
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(names(count))
        if topology == "push":
            assert len(chosen) == min(fan_out, count - 1)


@given(count=st.integers(1, 20), step=st.integers(0, 2**40))
def test_pairs_choose_each_other_and_at_most_one_is_left_over(count: int, step: int) -> None:
    chosen = draw("pairs", count, step=step, rng=random.Random(0))
    assert all(chosen[other] == [own] for own, others in chosen.items() for other in others)
    assert sum(not others for others in chosen.values()) == count % 2


@given(count=st.integers(1, 20), fan_out=st.integers(1, 6), step=st.integers(0, 2**40))
def test_groups_know_each_other_and_fill_up(count: int, fan_out: int, step: int) -> None:
    chosen = draw("groups", count, fan_out=fan_out, step=step, rng=random.Random(0))
    groups = {frozenset([own, *others]) for own, others in chosen.items()}
    assert sorted(peer for group in groups for peer in group) == sorted(names(count))
    sizes = Counter(map(len, groups))
    assert sizes[fan_out + 1] == count // (fan_out + 1)
    assert sum(sizes.values()) - sizes[fan_out + 1] == (count % (fan_out + 1) > 0)


def test_all_is_everybody() -> None:
    chosen = draw("all", 5, rng=random.Random(0))
    assert all(sorted([own, *others]) == names(5) for own, others in chosen.items())


@pytest.mark.parametrize(
    ("topology", "fan_out", "share"),
    [("push", 1, 1 / 5), ("push", 2, 2 / 5), ("pairs", 1, 1 / 5), ("groups", 2, 2 / 5)],
)
def test_every_ordered_pair_is_equally_likely(topology: str, fan_out: int, share: float) -> None:
    rng, steps, counts = random.Random(3), 1500, Counter[tuple[str, str]]()
    for step in range(steps):
        for own, others in draw(topology, 6, fan_out=fan_out, step=step, rng=rng).items():
            counts.update((own, other) for other in others)
    expected = steps * share
    pairs = list(itertools.permutations(names(6), 2))
    # Pairs of one step are not independent, so each is tested separately: 5 standard deviations.
    assert all(abs(counts[pair] - expected) < 5 * (expected * (1 - share)) ** 0.5 for pair in pairs)


@pytest.mark.parametrize("topology", ["pairs", "groups"])
def test_a_shuffle_is_the_same_for_all_and_another_at_each_step_and_seed(topology: str) -> None:
    peers, rng = names(32), random.Random(0)

    def chosen(seed: int, step: int, view: list[str]) -> list[str]:
        return sorted(partners(topology, "peer 3", view, fan_out=1, seed=seed, step=step, rng=rng))

    assert chosen(1, 2, peers) == chosen(1, 2, peers[::-1]) == chosen(1, 2, [p for p in peers if p != "peer 3"])
    assert len({tuple(chosen(1, step, peers)) for step in range(50)}) > 10
    assert len({tuple(chosen(seed, 2, peers)) for seed in range(50)}) > 10


def test_matchings_are_golden() -> None:
    """Peers on different machines must choose each other."""
    rng = random.Random(0)
    pairs = [draw("pairs", 6, step=step, rng=rng)["peer 0"] for step in range(6)]
    assert pairs == [["peer 2"], ["peer 1"], ["peer 5"], ["peer 4"], ["peer 4"], ["peer 5"]]
    groups = [sorted(draw("groups", 6, fan_out=2, step=step, rng=rng)["peer 0"]) for step in range(3)]
    assert groups == [["peer 2", "peer 4"], ["peer 1", "peer 4"], ["peer 2", "peer 5"]]
