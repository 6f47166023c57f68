"""Fragment selection: the blocks that a step pushes, from a seeded shuffle that every peer can compute.

SPARTA draws a fresh random set of parameters at each step. Going through a shuffled partition of 1/p slots instead,
reshuffled each cycle, covers every parameter in 1/p steps (fresh draws: 63 %) and leaves 0.41 times the disagreement
for the same bytes (measured in simulation). Fresh draws are kept as the paper's mode.

Where 1/p is not near a whole number, a step pushes several of more slots, and what is left of a cycle is skipped: 2 of
5 for p = 0.4, so that a cycle is two steps and covers four fifths.

A shuffle of N blocks would take O(N) time and memory. A keyed bijection gives any part of it in O(pN): a four-round
Feistel network permutes the numbers below the next power of two, and *cycle walking* (encrypting again until the
result is below N) restricts it to N (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It is integer
arithmetic only, so every machine gets the same blocks.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_ROUNDS = 4
# Domains smaller than 2^8 are permuted as part of 2^8: with halves of one or two bits, four rounds shuffle badly.
_MIN_BITS = 8
# Up to this size (half a million parameters) a whole cycle takes hardly longer than one slot: below a millisecond.
_SMALL_BLOCKS = 8192
# How far from p the share that a step pushes may be. At p = 3 % and below one slot a step is near enough.
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Walk:
    """The walk of steps through a cycle: the number of slots in the model, and the number that one step pushes."""

    num_slots: int
    per_step: int

    @property
    def steps(self) -> int:
        """Steps of a cycle."""
        return self.num_slots // self.per_step

    @classmethod
    def of(cls, fragment_fraction: float) -> Walk:
        """The walk with the fewest slots whose steps push `fragment_fraction` (above 0, at most 1), within 2 %."""
        for per_step in itertools.count(1):
            num_slots = round(per_step / fragment_fraction)
            if num_slots and abs(per_step / num_slots - fragment_fraction) <= _TOLERANCE * fragment_fraction:
                return cls(num_slots, per_step)
        raise AssertionError("unreachable")


def slot_blocks(
    seed: int, cycle: int, slot: int, slot_count: int, num_slots: int, num_blocks: int
) -> npt.NDArray[np.int64]:
    """Return the blocks of slots [slot, slot + slot_count) of one cycle: SPARTA's fragment, with cyclic selection.

    The slots of a cycle are disjoint and together hold every block once. If there are more slots than blocks, some
    slots are empty.

    Args:
        seed: the run's seed.
        cycle: number of the cycle; each has its own shuffle.
        slot, slot_count: a range within the `num_slots` slots of the cycle.
        num_blocks: blocks of the model.

    Returns:
        (n,) int64 distinct blocks in no particular order, n within 1 of slot_count · num_blocks / num_slots.
    """
    assert 0 <= slot < slot + slot_count <= num_slots, (slot, slot_count, num_slots)
    start, stop = slot * num_blocks // num_slots, (slot + slot_count) * num_blocks // num_slots
    key = f"cycle {seed} {cycle}"
    if num_blocks <= _SMALL_BLOCKS:
        return _permuted(num_blocks, key)[start:stop]
    return permute(np.arange(start, stop), num_blocks, key)


def fresh_blocks(seed: int, draw: int, slot_count: int, num_slots: int, num_blocks: int) -> npt.NDArray[np.int64]:
    """Return uniformly random blocks: SPARTA's fragment as in the paper.

    Args:
        seed: the run's seed.
        draw: number of this draw; draws are independent of each other.
        slot_count, num_slots: the draw takes the fraction slot_count / num_slots of all blocks.
        num_blocks: blocks of the model.

    Returns:
        (n,) int64 distinct blocks. If the fraction is not a whole number of blocks, n is rounded up or down by draw.
    """
    count = (draw + slot_count) * num_blocks // num_slots - draw * num_blocks // num_slots
    return permute(np.arange(min(count, num_blocks)), num_blocks, f"draw {seed} {draw}")


@lru_cache(maxsize=4)
def _permuted(size: int, key: str) -> npt.NDArray[np.int64]:
    """The whole permutation. The last few are cached, as senders and receivers ask for the same cycles."""
    return permute(np.arange(size), size, key)


def permute(positions: npt.NDArray[np.int64], size: int, key: str) -> npt.NDArray[np.int64]:
    """Map positions in [0, size), (n,) int64 and only read, by a pseudo-random permutation of [0, size).

    `key` selects the permutation; different keys give unrelated ones. Distinct positions have distinct results.
    """
    bits = max(_MIN_BITS, (size - 1).bit_length())
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), "<u8").astype(np.uint64)
    walked = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(walked >= size)
    while outside.size:
        again = _feistel(walked[outside], bits, keys)
        walked[outside] = again
        outside = outside[again >= size]
    return walked.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One pass of the Feistel network over [0, 2^bits). In each round the halves swap places and widths."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & _mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash without collisions: SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
