import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.algorithms.fragments import Walk, fresh_blocks, permute, slot_blocks


def plain_permute(position: int, size: int, key: str) -> int:
    """Reference: the bijection on one Python integer."""
    bits = max(8, (size - 1).bit_length())
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]
    while True:
        widths = [bits // 2, bits - bits // 2]
        left, right = divmod(position, 2 ** widths[1])
        for key_word in keys:
            word = right ^ key_word
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (word ^ word >> 31) % 2 ** widths[0]
            widths.reverse()
        position = left * 2 ** widths[1] + right
        if position < size:
            return position


def is_plausible_chi_square(counts: np.ndarray, expected: float) -> bool:
    """Whether counts are within 4 standard deviations of what a uniform draw gives (many degrees of freedom)."""
    freedom = counts.size - 1
    statistic = float(np.square(counts - expected).sum() / expected)
    return abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 1000, 5000])
def test_permute_agrees_with_the_plain_reference(size: int) -> None:
    positions = np.arange(0, size, max(1, size // 50))
    expected = [plain_permute(int(position), size, "key") for position in positions]
    assert permute(positions, size, "key").tolist() == expected


@settings(max_examples=100)
@given(size=st.integers(1, 3000), key=st.text(max_size=8))
def test_permute_is_a_bijection(size: int, key: str) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**63 - 1), cycle=st.integers(0, 2**40), slots=st.integers(1, 60), blocks=st.integers(1, 500)
)
def test_the_slots_of_a_cycle_cover_every_block_once(seed: int, cycle: int, slots: int, blocks: int) -> None:
    drawn = [slot_blocks(seed, cycle, slot, 1, slots, blocks) for slot in range(slots)]
    assert np.array_equal(np.sort(np.concatenate(drawn)), np.arange(blocks))
    assert all(abs(len(part) - blocks / slots) < 1 for part in drawn)


@pytest.mark.parametrize(("first", "second"), [((1, 0), (1, 1)), ((1, 0), (2, 0)), ((12, 3), (1, 23))])
def test_seed_and_cycle_choose_unrelated_shuffles(first: tuple[int, int], second: tuple[int, int]) -> None:
    """Slots of 1000 of 10,000 blocks share about 100; the standard deviation is 9."""
    one, two = (slot_blocks(*key, 0, 1, 10, 10_000) for key in (first, second))
    assert 60 < len(np.intersect1d(one, two)) < 140


def test_a_slot_is_the_same_each_time_and_on_every_machine() -> None:
    blocks = slot_blocks(7, 3, 2, 1, 200, 1_944_372)
    assert len(blocks) == 9722
    assert np.array_equal(blocks, slot_blocks(7, 3, 2, 1, 200, 1_944_372))
    assert blocks[:4].tolist() == [plain_permute(p, 1_944_372, "cycle 7 3") for p in range(19443, 19447)]


def test_coalesced_slots_are_the_slots_in_turn() -> None:
    together = slot_blocks(1, 2, 3, 4, 20, 777)
    assert np.array_equal(together, np.concatenate([slot_blocks(1, 2, slot, 1, 20, 777) for slot in range(3, 7)]))


@pytest.mark.parametrize(("slot", "slot_count"), [(-1, 1), (0, 0), (9, 2), (10, 1)])
def test_slots_outside_the_cycle_are_a_defect_of_the_caller(slot: int, slot_count: int) -> None:
    with pytest.raises(AssertionError):
        slot_blocks(1, 0, slot, slot_count, 10, 100)


@pytest.mark.parametrize("size", [3, 10, 37, 300])
@pytest.mark.slow
def test_every_block_comes_first_equally_often(size: int) -> None:
    """Over the cycles, the block at one position is uniform, also if the domain is smaller than 2^8."""
    cycles = 20 * size
    counts = np.zeros(size)
    for cycle in range(cycles):
        counts[slot_blocks(5, cycle, size // 2, 1, size, size)] += 1
    statistic = np.square(counts - 20).sum() / 20
    assert statistic < size - 1 + 4 * math.sqrt(2 * size)


def test_every_ordered_pair_of_blocks_is_equally_likely() -> None:
    """At neighbouring positions of a small domain, of which each cycle has 11."""
    size, expected = 12, 40
    counts = np.zeros((size, size))
    for cycle in range(expected * size):
        drawn = permute(np.arange(size), size, f"pair {cycle}")
        counts[drawn[:-1], drawn[1:]] += 1
    assert is_plausible_chi_square(counts[~np.eye(size, dtype=bool)], expected)


@pytest.mark.parametrize("stride", [12, 36, 48, 64, 7])
def test_a_slot_does_not_line_up_with_matrix_strides(stride: int) -> None:
    """Rows of 768 values are 12 blocks: no column of blocks is preferred within one slot."""
    counts = np.zeros(stride)
    for slot in range(5):
        counts += np.bincount(slot_blocks(11, 0, slot, 1, 200, 200 * 64 * 7 * 9) % stride, minlength=stride)
    expected = counts.sum() / stride
    assert np.square(counts - expected).sum() / expected < stride - 1 + 4 * math.sqrt(2 * stride)


def test_fresh_draws_are_uniform_and_without_repetition() -> None:
    counts = np.zeros(500)
    for draw in range(2000):
        blocks = fresh_blocks(3, draw, 1, 10, 500)
        assert len(np.unique(blocks)) == len(blocks) == 50
        counts[blocks] += 1
    # Drawing 50 of 500 without repetition has 0.9 of the variance of independent draws.
    statistic = np.square(counts - 200).sum() / (200 * 0.9)
    assert abs(statistic - 499) < 4 * math.sqrt(2 * 499)


def coverage(fragment_fraction: float, draws: int) -> float:
    """Expected share of the parameters touched by `draws` fresh draws: 1 - (1 - p)^n (SPARTA, section 3)."""
    return 1.0 - (1.0 - fragment_fraction) ** draws


def test_fresh_draws_cover_what_the_paper_says_and_a_cycle_covers_all() -> None:
    fresh = np.concatenate([fresh_blocks(9, draw, 1, 50, 10_000) for draw in range(50)])
    cyclic = np.concatenate([slot_blocks(9, 0, slot, 1, 50, 10_000) for slot in range(50)])
    assert len(np.unique(fresh)) / 10_000 == pytest.approx(1 - 0.98**50, abs=0.015)  # SPARTA, section 3
    assert len(np.unique(cyclic)) == 10_000


@settings(max_examples=50)
@given(draw=st.integers(0, 10_000), slots=st.integers(1, 300), blocks=st.integers(1, 400), data=st.data())
def test_fresh_draws_take_their_fraction_on_average(draw: int, slots: int, blocks: int, data) -> None:
    slot_count = data.draw(st.integers(1, slots))
    drawn = [fresh_blocks(1, draw + i, slot_count, slots, blocks) for i in range(3)]
    assert all(abs(len(part) - slot_count * blocks / slots) < 1 for part in drawn)
    assert sum(len(fresh_blocks(1, draw + i, 1, slots, blocks)) for i in range(slots)) == blocks


@pytest.mark.parametrize(
    ("fraction", "num_slots", "per_step"),
    [
        (1.0, 1, 1), (0.5, 2, 1), (0.25, 4, 1), (0.1, 10, 1), (0.05, 20, 1), (0.02, 50, 1), (0.005, 200, 1),
        (0.0005, 2000, 1), (0.99, 1, 1), (0.9, 9, 8), (0.7, 10, 7), (0.6, 5, 3), (0.4, 5, 2), (0.15, 20, 3),
    ],
)  # fmt: skip
def test_a_step_pushes_the_fraction_in_the_fewest_slots(fraction: float, num_slots: int, per_step: int) -> None:
    assert Walk.of(fraction) == Walk(num_slots, per_step)


@given(fraction=st.floats(1e-12, 1.0))
def test_every_fraction_is_pushed_within_two_percent(fraction: float) -> None:
    walk = Walk.of(fraction)
    assert walk.per_step / walk.num_slots == pytest.approx(fraction, rel=0.02)
    assert 1 <= walk.steps * walk.per_step <= walk.num_slots <= max(60, 1.02 / fraction)
