"""Lands a state that was taken as a whole: founded, downloaded, or restored from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.protocol.exchange.types import Epoch, Landing, LandingKind
from p2ptrain.protocol.rounds.driver import RoundDriver


async def land_state(
    driver: RoundDriver,
    record: Callable[..., None],
    kind: LandingKind,
    reason: str,
    run_step: int | None = None,
    tokens: int | None = None,
    *,
    founded: bool = False,
) -> None:
    """Land the driver's new head in the training thread, record that, and wait until it has taken effect.

    Kind "write" replaces the weights by the anchor. The head of the run's last round always does, as all peers end with
    the same weights.

    Args:
        record: takes the name of an event, and its fields.
        reason: why the head is new, for the event.
        run_step: the position of weights from a checkpoint; None for that of the head.
        tokens: of weights from a checkpoint, as in `Restored`.
        founded: whether this peer founded the run.
    """
    context, head, run = driver.context, driver.head, driver.context.run
    run_step = head.run_step if run_step is None else run_step
    finished = run.is_over_at(head.run_step)
    kind = "write" if finished else kind
    # The interval in which a checkpoint was written continues: its round is due after the rest of it. With pairwise
    # steps, no head tells when the last step was.
    since = 0 if run.is_pairwise else max(0, min(run_step - head.run_step, run.sync_every))
    record(
        "adopt",
        founded=founded,
        founder=driver.founder,
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
        included_tokens=0 if tokens is None else context.exchange.tokens - tokens,
        snapshot_steps=context.exchange.steps - since if since else None,
        finished=finished,
    )
    await driver.committer.land(landing)
