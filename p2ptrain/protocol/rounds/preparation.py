"""What this peer brings to the round at hand: its snapshot, taken once and kept over all attempts, and its expenses."""

from __future__ import annotations

import numpy as np
import trio

from p2ptrain.protocol.exchange import Exchange
from p2ptrain.protocol.exchange_types import Snapshot, SnapshotWanted
from p2ptrain.protocol.faults import Faults
from p2ptrain.protocol.links.link import Traffic
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.rounds.contribution import OwnContribution
from p2ptrain.protocol.rounds.outcome import Spent, touched_buffer
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.protocol.wire.transport import Compute
from p2ptrain.settings.config import RunConfig


class Preparation:
    """Asks the training thread for a snapshot, and makes it the outer gradient that every attempt of a round sends.

    Attributes:
        own: the contribution to the round at hand; None until the snapshot is there.
    """

    def __init__(
        self, run: RunConfig, exchange: Exchange, state: AnchorState, links: Links, compute: Compute, faults: Faults
    ) -> None:
        self.own: OwnContribution | None = None
        self._exchange = exchange
        self._num_blocks = state.num_blocks
        self._links = links
        self._compute = compute
        self._faults = faults
        # What top-k has not sent yet. With other codecs it stays in the weights, and is sent with the next gradient.
        self._error = np.zeros_like(state.anchor) if run.round_codec == "topk" else None
        self._arrived = trio.Event()
        self._sits_out: bool | None = None
        self._began_s = 0.0
        self._traffic_before = (0, 0)

    def begin(self) -> None:
        """The first attempt at a round begins: what it costs is counted from here."""
        self._began_s, self._traffic_before = trio.current_time(), self._traffic()

    async def take(self, window_s: float) -> OwnContribution | None:
        """The snapshot of this round, taken now if there is none yet; None when training does not come by in time."""
        if self._sits_out is None:
            self._sits_out = self._faults.loses_gradient()
        if self._sits_out:
            return None
        if self.own is None:
            called_s = trio.current_time()
            buffer = await self._compute(touched_buffer, self._num_blocks)
            # The training thread comes by once a step, and on a busy machine later than that: half a window of room.
            self._exchange.want_snapshot(SnapshotWanted(buffer, called_s + 0.5 * window_s))
            with trio.move_on_at(called_s + window_s):
                await self._arrived.wait()
        return self.own

    def arrive(self, snapshot: Snapshot) -> None:
        """The training thread has taken the snapshot that was asked for."""
        if self.own is None:
            self.own = OwnContribution(
                snapshot.weights, snapshot.tokens, snapshot.steps, snapshot.run_step, snapshot.at_length,
                snapshot.held_s, {}, self._error, None if self._error is None else np.zeros_like(self._error),
            )  # fmt: skip
            self._arrived.set()

    def note_included(self) -> None:
        """The round took our contribution: of top-k, what was not sent is owed from now on."""
        if self.own is not None and self.own.next_error is not None:
            self._error = self.own.next_error

    def forget(self) -> None:
        """The round is resolved, or skipped: the next one takes a snapshot of its own."""
        self.own = None
        self._arrived = trio.Event()
        self._sits_out = None
        self._exchange.want_snapshot(None)

    def spent(self) -> Spent:
        """What the round has cost so far."""
        sent, received = (now - then for now, then in zip(self._traffic(), self._traffic_before, strict=True))
        return Spent(sent, received, trio.current_time() - self._began_s)

    def _traffic(self) -> tuple[int, int]:
        counters = self._links.counters
        return counters.sent[Traffic.ROUND], counters.received[Traffic.ROUND]
