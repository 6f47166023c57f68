"""Takes snapshots of the weights for the node.

The node requests one at a time. If it withdraws its request while the weights are copied, the copy is dropped. A copy
that fails is made again at the next step.

A large model is copied in slices over several steps. A fragment that is merged meanwhile changes a block before or
after that is copied, and both are right: the outer gradient is the anchor minus the copy, and a landing adds to the
weights, so a block keeps what it learned after the copy. If a round changes the weights meanwhile, the copy begins
again, as its blocks would be of two epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.algorithms.transfers import Transfer, has_ended
from p2ptrain.protocol.exchange.containment import Containment
from p2ptrain.protocol.exchange.position import Position
from p2ptrain.protocol.exchange.slices import Slice
from p2ptrain.protocol.exchange.types import Epoch, Snapshot, SnapshotWanted


@dataclass(slots=True)
class _Taking:
    """A snapshot on its way into host memory, and the request for it. `in_part`: some slices were copied, not all."""

    wanted: SnapshotWanted
    weights: Transfer[None]
    snapshot: Snapshot
    in_part: bool = False


class Snapshotter:
    """Takes snapshots. For the training thread, except `want` and `is_wanted`, which are for the node.

    Args:
        read: begins to copy what is requested into its buffer (`FlatTransfers.read`).
        clock: seconds on the node's clock.
        containment: logs errors, after each of which the copy is tried again.
    """

    def __init__(
        self, read: Callable[[SnapshotWanted], Transfer[None]], clock: Callable[[], float], containment: Containment
    ) -> None:
        self._read = read
        self._clock = clock
        self._containment = containment
        self._taking: _Taking | None = None
        # The current request, whether or not a step has begun with it. Only the node writes it.
        self._current: SnapshotWanted | None = None
        # The same until a step begins with it. Both sides write it, under the lock.
        self._lock = threading.Lock()
        self._untaken: SnapshotWanted | None = None

    def want(self, wanted: SnapshotWanted | None) -> None:
        """Request a snapshot at the next due step. None withdraws the request, and drops a snapshot already taken."""
        self._current = wanted
        with self._lock:
            self._untaken = wanted

    def is_wanted(self, wanted: SnapshotWanted) -> bool:
        """Whether a request was neither withdrawn nor replaced."""
        return self._current is wanted

    def begin(self, now: float, position_of: Callable[[], Position], epoch: Epoch, tokens: int) -> None:
        """Begin to take the requested snapshot, if it is due and no other is on its way.

        Args:
            now: on the node's clock.
            position_of: returns this peer's position. It is read after the request, as the node writes it before that.
            epoch, tokens: of the weights, for the snapshot.
        """
        if self._taking is not None and not self.is_wanted(self._taking.wanted):
            self.restart()
        if self._taking is not None or self._untaken is None:
            return
        with self._lock:
            wanted, position = self._untaken, position_of()
            if wanted is None or not (position.due or now >= wanted.latest_s):
                return
            self._untaken = None
        try:
            weights = self._read(wanted)
        except Exception as error:
            self._want_again(wanted, error)
            return
        snapshot = Snapshot(
            epoch, wanted.buffer, tokens, position.steps, position.run_step, position.at_length, self._clock() - now
        )
        self._taking = _Taking(wanted, weights, snapshot)

    def take_arrived(self, step_slice: Slice) -> tuple[SnapshotWanted, Snapshot] | None:
        """Copy the next slice. Returns the snapshot and the request for it once all has arrived in host memory."""
        taking = self._taking
        if taking is None or not has_ended(taking.weights):
            return None
        start = self._clock()
        try:
            taking.in_part = not step_slice.finish(taking.weights, taking.wanted.whole_by_s)
        except Exception as error:
            self._taking = None
            self._want_again(taking.wanted, error)
            return None
        taking.snapshot.held_s += self._clock() - start
        if taking.in_part:
            return None
        self._taking = None
        return taking.wanted, taking.snapshot

    def restart(self) -> None:
        """Drop a snapshot of which only some slices were copied. The next step begins again if it is still wanted."""
        if self._taking is not None and self._taking.in_part:
            wanted, self._taking = self._taking.wanted, None
            self._put_back(wanted)

    @property
    def under_way(self) -> bool:
        """Whether a snapshot is on its way to host memory. Never blocks."""
        return self._taking is not None and not self._taking.weights.done

    def _want_again(self, wanted: SnapshotWanted, error: Exception) -> None:
        """Log why a snapshot failed, and put its request back."""
        self._containment.note("a snapshot of the weights", "it is tried again at each step", error)
        self._put_back(wanted)

    def _put_back(self, wanted: SnapshotWanted) -> None:
        """Make a request wait for a step again, unless it was withdrawn or replaced."""
        with self._lock:
            if self._untaken is None and self.is_wanted(wanted):
                self._untaken = wanted
