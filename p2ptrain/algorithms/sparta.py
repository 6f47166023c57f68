"""The receiver's side of SPARTA gossip: the weight of a fragment, and which fragments to refuse; `mixing` mixes it.

Receiver-mix: θ += ½ (received - θ), with the current θ. It needs no snapshot and no reply, and cannot over-correct. In
simulation it was at least as good as the delta form.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

# Two steps are always allowed: with a large p (2 % and a slow link) nothing else would be left.
_MIN_AGE_STEPS = 2.0
# The clip rule remembers so many fragments: few enough to forget senders that have left (guess).
_WINDOW = 64
# With fewer fragments the rule knows nothing about the senders.
_WARM = 8
# Within an interval between rounds the disagreement grows from nearly nothing. Four times the recent median lets that
# pass (guess).
_MIXED_FACTOR = 4.0
# A distance that most senders have is normal, even if it was refused until now.
_SEEN_FACTOR = 1.1
# No fragment farther than this times rms(θ) is mixed: it holds little of θ. Zeros are at 1.0, unrelated weights of the
# same size at 1.4, a flipped sign at 2.0. Honest peers were at 0.55 at most with rounds (simulated: 4 peers that began
# at random, H = 60, p = 2 %), and at 0.97 without any (240 steps, p = 0.5 %).
_MAX_RELATIVE = 0.99
# Fragments nearer than this times rms(θ) are always mixed: int8 alone makes 0.008 (simulated), so that a lower limit
# would follow only the codec, or a sender that copies what we sent.
_MIN_RELATIVE = 0.02
# After so many refusals in a row a sender is an outlier. An honest peer comes back with the next round.
_MAX_REFUSALS = 100
# Senders whose refusals are counted; beyond it the oldest count is forgotten.
_MAX_COUNTED = 256


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
    """Limits how far a fragment may be from the receiver's weights, by what is normal among the senders.

    This bounds the harm of a bad sender (self-centred clipping: He, Karimireddy and Jaggi, 2022). Usage::

        limit = rule.limit(own_rms)
        rms = Mixing(view, plan, received).mix(weight, limit)
        rule.record(sender, rms, mixed=rms <= limit)

    The limit is the larger of two medians over distinct senders, so that sending more counts no more:

    - 4 × the median distance of each sender's last mixed fragment. It follows the disagreement as it grows between
      rounds, from the noise of the codec to half of the weights within 60 steps (simulated). Medians over more than one
      fragment of each follow too late.
    - 1.1 × the median distance of each sender's last fragment, mixed or not. An honest swarm needs it after a jump: a
      late round, a higher learning rate, a receiver that was left behind. Once most senders are far, far is normal.
      Refusals of a minority move nothing, however many and however far they are.

    It stays between 0.02 and 0.99 × rms(θ) of the fragment's blocks. Until eight fragments were seen it is the latter:
    all peers of a run begin with the same weights.

    Of two senders the nearer one counts: with two other peers nobody knows who lies, and gossip that is lost costs less
    than weights that are. Against a single other peer only the 0.99 protects. In a run without rounds, peers
    that are farther apart than that stay apart; a round brings them together.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[str, float, bool]] = deque(maxlen=_WINDOW)
        self._refused: dict[str, int] = {}
        self._normal = 0.0

    def limit(self, own_rms: float) -> float:
        """The largest rms(received - θ) that is mixed. `own_rms`: that of θ in the fragment's blocks."""
        most = _MAX_RELATIVE * own_rms
        if len(self._seen) < _WARM:
            return most
        return min(most, max(self._normal, _MIN_RELATIVE * own_rms))

    def record(self, sender: str, rms: float, *, mixed: bool) -> None:
        """Record a fragment's distance. A fragment equal to θ (rms 0) does not count as a sample of what is normal."""
        if mixed:
            self._refused.pop(sender, None)
        else:
            self._refused[sender] = self._refused.get(sender, 0) + 1
            if len(self._refused) > _MAX_COUNTED:
                del self._refused[next(iter(self._refused))]
        if rms == 0:
            return
        self._seen.append((sender, math.inf if math.isnan(rms) else rms, mixed))
        latest = {name: distance for name, distance, _ in self._seen}
        latest_mixed = {name: distance for name, distance, passed in self._seen if passed}
        self._normal = max(_MIXED_FACTOR * _median_of(latest_mixed), _SEEN_FACTOR * _median_of(latest))

    def is_outlier(self, sender: str) -> bool:
        """Whether a sender was refused 100 times in a row, and another one was mixed lately. It then counts from 0.

        Among two peers nobody can tell which one is wrong.
        """
        if self._refused.get(sender, 0) < _MAX_REFUSALS:
            return False
        del self._refused[sender]
        return any(mixed and other != sender for other, _, mixed in self._seen)


def _median_of(distances: Mapping[str, float]) -> float:
    """The median; the lower of the middle two, and 0 without distances."""
    return statistics.median_low(distances.values()) if distances else 0.0
