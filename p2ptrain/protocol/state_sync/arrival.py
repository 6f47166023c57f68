"""The landing of a whole state, adopted or founded, in the training thread."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.protocol.exchange.types import Epoch, Landing, LandingKind
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.wire.transport import PeerId


class Arrivals:
    """Lands the engine's new head, and records that. `record`: takes a name of an event and its fields."""

    def __init__(self, engine: RoundDriver, record: Callable[..., None]) -> None:
        self._engine = engine
        self._record = record

    @property
    def run_founder(self) -> PeerId:
        """The id of the peer that founded the run; "" before we have its state."""
        genesis = self._engine.history.genesis
        return genesis.founder if genesis is not None else ""

    async def land(self, kind: LandingKind, reason: str, run_step: int | None = None, *, founded: bool = False) -> None:
        """Land our new head, and wait until it has taken effect; kind "write" replaces the weights by the anchor.

        So does the head of the run's last round with either kind, as all peers end with the same weights. `run_step`:
        where weights from a checkpoint are; None for those of the head.
        """
        context, head, run = self._engine.context, self._engine.head, self._engine.context.run
        run_step = head.run_step if run_step is None else run_step
        finished = run.is_over_at(head.run_step)
        kind = "write" if finished else kind
        # The interval that a checkpoint interrupted goes on: its round is due after the rest of it, at once if it was
        # due. Steps in pairs have no head that says when the last one was.
        since = 0 if run.is_pairwise else max(0, min(run_step - head.run_step, run.sync_every))
        self._record(
            "adopt",
            founded=founded,
            founder=self.run_founder,
            reason=reason,
            lineage=head.lineage,
            round=head.round,
            run_step=run_step,
            anchor_hash=head.anchor_hash,
            state_hash=head.state_hash,
        )
        context.links.announce()
        landing = Landing(
            kind=kind,
            buffer=context.state.anchor_tensor() if kind == "write" else None,
            epoch=Epoch(head.lineage, head.round),
            sync_every=run.sync_every,
            run_step=run_step - since,
            included_tokens=0,
            snapshot_steps=context.exchange.steps - since if since else None,
            report=None,
            finished=finished,
        )
        await self._engine.committer.land(landing)
