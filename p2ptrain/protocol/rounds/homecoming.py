"""Bringing a committed round home: the outer step on the anchor, and a landing in the weights that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import trio

from p2ptrain.algorithms.codec import Codec
from p2ptrain.protocol.exchange import Exchange
from p2ptrain.protocol.exchange_types import Landing, RoundReport
from p2ptrain.protocol.parts import PartStore
from p2ptrain.protocol.rounds.outcome import head_of, landing, step_anchor
from p2ptrain.protocol.rounds.preparation import Preparation
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.protocol.wire.messages import Head, Record
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig


class Homecoming:
    """Changes the agreed state, one round at a time, and hands each to the training thread.

    Attributes:
        lock: held while the state is stepped, replaced or copied.
        stepping: whether the anchor is being replaced, so that it must not be read.
    """

    def __init__(
        self,
        run: RunConfig,
        peer_id: PeerId,
        exchange: Exchange,
        state: AnchorState,
        parts: PartStore,
        compute: Compute,
    ) -> None:
        self.lock = trio.Lock()
        self.stepping = False
        self._run = run
        self._peer_id = peer_id
        self._exchange = exchange
        self._state = state
        self._parts = parts
        self._compute = compute
        self._missed_rounds = 0
        self._landed = trio.Event()
        self._held_s = 0.0
        exchange.on_landed = self._on_landed

    async def bring(
        self,
        record: Record,
        codec: Codec,
        preparation: Preparation,
        *,
        included: bool,
        stand_at: Callable[[Head], object],
    ) -> RoundReport:
        """Take the outer step of a record whose parts are all here, and land it.

        Args:
            codec: of the record's mean.
            preparation: what we brought to the round.
            included: whether our contribution is in the mean.
            stand_at: called once the state is that of the record, before anything else can be decided.

        Returns:
            What there is to say about the round, once it has landed.
        """
        async with self.lock:
            self.stepping = True
            # All or nothing, also for a checkpoint that is written when we leave in the middle of it.
            with trio.CancelScope(shield=True):
                own = preparation.own
                await step_anchor(
                    self._state, record, self._parts, codec, own if included else None, self._compute
                )  # fmt: skip
                if included:
                    preparation.note_included()
                self._missed_rounds = 0 if included else self._missed_rounds + 1
                outcome = landing(
                    self._run, record, self._state, self._peer_id, own, included, self._missed_rounds,
                    self._exchange.tokens, preparation.spent(),
                )  # fmt: skip
                # Training takes it up while the hashes are computed.
                self._hand_over(outcome)
                await self._compute(self._state.rehash)
                self._parts.keep(record)
                head = head_of(record, self._state)
                stand_at(head)
            self.stepping = False
        if not self._landed.is_set():
            await self._landed.wait()
        assert outcome.report is not None
        return dataclasses.replace(
            outcome.report,
            anchor_sha256=head.anchor_sha256,
            state_sha256=head.state_sha256,
            stall_s=outcome.report.stall_s + self._held_s,
        )

    async def land(self, landing: Landing) -> None:
        """Hand a landing to the training thread and wait until it has taken effect; one at a time."""
        self._hand_over(landing)
        await self._landed.wait()

    def _hand_over(self, landing: Landing) -> None:
        self._landed = trio.Event()
        self._exchange.land(landing)

    def _on_landed(self, landing: Landing, held_s: float) -> None:
        self._held_s = held_s
        self._landed.set()
