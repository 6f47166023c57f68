"""The receiver's side of SPARTA gossip: how much of a fragment to take, and which fragments to refuse.

Receiver-mix: θ += ½ (received - θ), with θ as it is now. It needs no snapshot and no reply and cannot over-correct; in
simulation it was as good as the delta form or better.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Two steps are always allowed: with a large p (2 % and a slow link) nothing else would be left.
_MIN_AGE_STEPS = 2.0
# Clip rule, from DESIGN ("Gossip"). The window follows disagreement as it grows between rounds; the factor is a guess.
_WINDOW = 64
_WARM = 8
_CLIP_FACTOR = 4.0


def merge_weights(
    plans_before: Sequence[npt.NDArray[np.int64]], blocks: npt.NDArray[np.int64]
) -> float | npt.NDArray[np.float32]:
    """Weights that make the m fragments merged into one block in one step count 1/(m + 1) each, as θ does.

    They are merged one after the other; the c-th gets 1/(c + 1), which shrinks the share of those before it to the
    same. Hence nothing need be known of the fragments to come.

    Args:
        plans_before: sorted blocks of each fragment merged earlier in this step.
        blocks: (n,) sorted blocks of the next one.

    Returns:
        ½ when none of the blocks was merged before in this step, else (n, 1) float32.
    """
    if not plans_before:
        return 0.5
    earlier = np.zeros(len(blocks), np.int64)
    for merged in plans_before:
        earlier += np.isin(blocks, merged, assume_unique=True)
    if not earlier.any():
        return 0.5
    return (1 / (earlier + 2)).astype(np.float32)[:, None]


def max_age_steps(fragment_fraction: float, max_staleness: float) -> float:
    """The age in steps of the receiver above which a fragment is discarded: p · delay ≤ `max_staleness`, at least 2.

    0 for either means that none is too old.
    """
    if not fragment_fraction or not max_staleness:
        return math.inf
    return max(_MIN_AGE_STEPS, max_staleness / fragment_fraction)


class ClipRule:
    """Decides how far a fragment may be from the receiver's own weights: 4 × what was normal of late.

    Bounds the harm that one bad sender does (self-centred clipping: He, Karimireddy and Jaggi, 2022). Usage::

        limit = rule.threshold(own_rms)
        rms = view.mix_clipped(plan, received, weight, limit)
        if rms <= limit:
            rule.accept(rms)
        else:
            rule.refuse(limit)
    """

    def __init__(self) -> None:
        self._normal: deque[float] = deque(maxlen=_WINDOW)

    @property
    def warm(self) -> bool:
        """Whether enough was seen to judge by; before that, `threshold` needs the receiver's own rms."""
        return len(self._normal) >= _WARM

    def threshold(self, own_rms: float) -> float:
        """The largest rms(received - θ) to mix.

        Args:
            own_rms: rms of θ in the same blocks; used only while the rule is not `warm`.
        """
        return _CLIP_FACTOR * statistics.median(self._normal) if self.warm else own_rms

    def accept(self, rms: float) -> None:
        """Note a fragment that was mixed. One equal to θ (rms 0) says nothing about what is normal."""
        if rms > 0:
            self._normal.append(rms)

    def refuse(self, threshold: float) -> None:
        """Note a fragment beyond `threshold`, as one that was just at it.

        If most fragments are refused, it is the peers that have moved, and the threshold grows until they agree.
        """
        self.accept(threshold)
