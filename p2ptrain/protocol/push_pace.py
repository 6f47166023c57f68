"""Decides how often a peer pushes fragments, so that gossip keeps only a part of the cores busy. Pure.

A push costs the same whether a step takes a second or a hundredth of one. So if steps are fast, or every core is busy,
gossip at every step would slow training. Then there are fewer pushes, each with the same fraction of the parameters.
"""

from __future__ import annotations

import statistics
from collections import deque

# At most about 20 pushes a second (measured): faster steps share one push.
MIN_PUSH_INTERVAL_S = 0.05
# We measure the CPU time of gathering, planning, encoding, decoding and mixing. A push costs more: waking threads, and
# caches that are cold for training after it, cost the same whatever its size; sockets and encryption grow with it.
# Measured with two peers and models of 0.2M to 124M parameters that kept two cores busy: see docs/log/.
FIXED_CPU_S = 0.005
WHOLE_FACTOR = 1.3
# Receiving a fragment of the same size costs up to twice as much as sending one (mixing). The cost of larger fragments
# is limited to four times.
MOST_RECEIVED = 4.0
# Costs are medians over this many pushes: a single slow one, as with a cold cache, does not count, and a machine that
# slows down soon does.
_REMEMBERED = 16


def push_interval_s(seen_cpu_s: float, budget: float) -> float:
    """The seconds from one push to the next with which gossip uses up its budget.

    Args:
        seen_cpu_s: measured CPU seconds of sending one push and receiving one.
        budget: cores that gossip may keep busy.
    """
    return (FIXED_CPU_S + WHOLE_FACTOR * seen_cpu_s) / budget


class PushPace:
    """Decides when the next push is due.

    The cost of a push is that of sending one and receiving one, because on average a peer receives as many as it sends.
    So other peers that push more often, or far larger fragments, do not silence this peer.

    Attributes:
        budget: cores that gossip may keep busy.
        interval_s: seconds from one push to the next; 0 while a cost is unknown.
        due_s: when the next push is due, on the caller's clock.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.interval_s = 0.0
        self.due_s = 0.0
        self._sent: deque[float] = deque(maxlen=_REMEMBERED)
        self._received: deque[float] = deque(maxlen=_REMEMBERED)

    def note_sent(self, cpu_s: float, now: float) -> None:
        """Note the CPU seconds of a push that was sent at `now`. After a pause, one missed push is made up for."""
        self._sent.append(cpu_s)
        self._measure()
        self.due_s = max(self.due_s, now - self.interval_s) + self.interval_s

    def note_received(self, cpu_s: float) -> None:
        """Note the CPU seconds of a fragment that was received and merged."""
        self._received.append(cpu_s)
        self._measure()

    def _measure(self) -> None:
        if self._sent and self._received:
            sent_s = statistics.median(self._sent)
            received_s = min(statistics.median(self._received), MOST_RECEIVED * sent_s)
            self.interval_s = push_interval_s(sent_s + received_s, self.budget)
