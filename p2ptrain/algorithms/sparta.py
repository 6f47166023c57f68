"""The receiver's side of SPARTA gossip: the weight of a fragment, and which fragments to refuse.

Receiver-mix: θ += ½ (received - θ), with the current θ. It needs no snapshot and no reply, and cannot over-correct. In
simulation it was at least as good as the delta form.
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
# Clip rule. The window is short enough to follow the disagreement as it grows between rounds; the factor is a guess.
_WINDOW = 64
_WARM = 8
_CLIP_FACTOR = 4.0


def merge_weights(
    plans_before: Sequence[npt.NDArray[np.int64]], blocks: npt.NDArray[np.int64]
) -> float | npt.NDArray[np.float32]:
    """Return the weights with which to mix the next fragment of a step, so that all count the same.

    After m fragments of one block, θ and each fragment have the weight 1/(m + 1). The c-th fragment is mixed with
    1/(c + 1), which reduces the share of the earlier ones to the same, so later fragments need not be known.

    Args:
        plans_before: sorted blocks of each fragment merged earlier in this step.
        blocks: (n,) sorted blocks of the next fragment.

    Returns:
        ½ if none of the blocks was merged before in this step, else (n, 1) float32.
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
    """The largest age of a fragment that is merged, in steps of the receiver: max_staleness / p, at least 2.

    If either argument is 0, no fragment is too old.
    """
    if not fragment_fraction or not max_staleness:
        return math.inf
    return max(_MIN_AGE_STEPS, max_staleness / fragment_fraction)


class ClipRule:
    """Limits how far a fragment may be from the receiver's weights: 4 × the recent median distance.

    This bounds the harm of a bad sender (self-centred clipping: He, Karimireddy and Jaggi, 2022). Usage::

        limit = rule.threshold(own_rms)
        rms = view.mix_clipped(plan, received, weight, limit)
        rule.record(rms if rms <= limit else limit)

    A refused fragment counts as one at the limit. If most are refused, the peers have moved apart, and the limit grows
    until it fits again.
    """

    def __init__(self) -> None:
        self._normal: deque[float] = deque(maxlen=_WINDOW)

    @property
    def warm(self) -> bool:
        """Whether enough fragments have been seen; before that, `threshold` uses the receiver's own rms."""
        return len(self._normal) >= _WARM

    def threshold(self, own_rms: float) -> float:
        """The largest rms(received - θ) that is mixed. `own_rms`: that of θ there; used only until `warm`."""
        return _CLIP_FACTOR * statistics.median(self._normal) if self.warm else own_rms

    def record(self, rms: float) -> None:
        """Record a fragment's distance, at most the threshold. One equal to θ (rms 0) is not recorded."""
        if rms > 0:
            self._normal.append(rms)
