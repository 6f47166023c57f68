"""Snapshots of the weights: which one the node wants, and which copy is on its way into host memory.

The node requests one at a time, and may withdraw its request while the weights are copied: what was copied is then
dropped. A copy that fails is made again at the next step.

A large model is copied in slices over several steps. A fragment that is merged meanwhile changes a block before or
after it is copied, and both are right: the outer gradient is the anchor minus whatever was copied, and a landing adds
to the weights, so what a block has learned since stays there. If a round changes the weights meanwhile, the copy is
begun again, because its blocks would be of two epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from p2ptrain.algorithms.transfers import Transfer, has_ended
from p2ptrain.protocol.exchange.containment import Containment
from p2ptrain.protocol.exchange.position import Position
from p2ptrain.protocol.exchange.slices import Slice
from p2ptrain.protocol.exchange.types import Epoch, Snapshot, SnapshotWanted


@dataclass(slots=True)
class _Taking:
    """A snapshot on its way into host memory, and the request for it. `in_part`: its first slice was copied."""

    wanted: SnapshotWanted
    weights: Transfer[None]
    snapshot: Snapshot
    in_part: bool = False


class Snapshotter:
    """Takes snapshots. For the training thread, except `want` and `is_wanted`, which are for the node.

    Args:
        read: begins to copy all that rounds average (`FlatTransfers.read`).
        clock: seconds on the node's clock.
        containment: is told of errors, each of which costs a try.
    """

    def __init__(
        self, read: Callable[[torch.Tensor], Transfer[None]], clock: Callable[[], float], containment: Containment
    ) -> None:
        self._read = read
        self._clock = clock
        self._containment = containment
        self._taking: _Taking | None = None
        # The current request, taken or not; written by the node alone.
        self._current: SnapshotWanted | None = None
        # The same until a step begins with it; written by both sides, under the lock.
        self._lock = threading.Lock()
        self._untaken: SnapshotWanted | None = None

    def want(self, wanted: SnapshotWanted | None) -> None:
        """Request a snapshot at the next due step, or (None) withdraw the request: one already taken is dropped."""
        self._current = wanted
        with self._lock:
            self._untaken = wanted

    def is_wanted(self, wanted: SnapshotWanted) -> bool:
        """Whether a request was neither withdrawn nor replaced."""
        return self._current is wanted

    def begin(self, now: float, position_of: Callable[[], Position], epoch: Epoch, tokens: int) -> None:
        """Begin to take the snapshot that is wanted, if it is due and no other is on its way.

        Args:
            now: on the node's clock.
            position_of: the position of this peer; read after the request, which the node writes after it.
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
            weights = self._read(wanted.buffer)
        except Exception as error:
            self._want_again(wanted, error)
            return
        snapshot = Snapshot(
            epoch, wanted.buffer, tokens, position.steps, position.run_step, position.at_length, self._clock() - now
        )
        self._taking = _Taking(wanted, weights, snapshot)

    def take_arrived(self, step_slice: Slice) -> tuple[SnapshotWanted, Snapshot] | None:
        """The snapshot that has arrived in host memory, with the request for it."""
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
        """Drop what slices have copied, and begin again at the next step if it is still wanted."""
        if self._taking is not None and self._taking.in_part:
            wanted, self._taking = self._taking.wanted, None
            self._put_back(wanted)

    @property
    def under_way(self) -> bool:
        """Whether a snapshot is on its way to host memory. Never blocks."""
        return self._taking is not None and not self._taking.weights.done

    def _want_again(self, wanted: SnapshotWanted, error: Exception) -> None:
        """A snapshot failed: put its request back, unless it was withdrawn or replaced."""
        self._containment.note("a snapshot of the weights", "it is tried again at each step", error)
        self._put_back(wanted)

    def _put_back(self, wanted: SnapshotWanted) -> None:
        with self._lock:
            if self._untaken is None and self.is_wanted(wanted):
                self._untaken = wanted
