"""What a committed round does to a peer: to its anchor and moments, and through a landing to its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from p2ptrain.algorithms.codec import Codec
from p2ptrain.protocol.exchange_types import Epoch, Landing, RoundReport
from p2ptrain.protocol.parts import PartStore
from p2ptrain.protocol.rounds.ballot import voters_of
from p2ptrain.protocol.rounds.contribution import OwnContribution, apply_outcome
from p2ptrain.protocol.state_sync.anchor import AnchorState
from p2ptrain.protocol.wire.messages import Head, Record
from p2ptrain.protocol.wire.transport import Compute, PeerId
from p2ptrain.settings.config import RunConfig


@dataclass(frozen=True, slots=True)
class Spent:
    """What a round has cost this peer so far: bytes on the wire, and seconds since its first attempt."""

    bytes_sent: int
    bytes_received: int
    wall_s: float


async def step_anchor(
    state: AnchorState, record: Record, parts: PartStore, codec: Codec, own: OwnContribution | None, compute: Compute
) -> None:
    """Take the outer step on anchor and moments, and on a contributor's buffer; the hashes stay as they were.

    Every part is here and decodes, so this cannot fail half-way.
    """
    buffer = own.buffer.numpy() if own is not None else None
    for part in record.parts:
        await compute(
            apply_outcome, state, codec, parts.get(part.sha256), (part.start, part.stop), record, buffer
        )  # fmt: skip


def head_of(record: Record, state: AnchorState) -> Head:
    """Where a peer stands that has taken a record's step."""
    return Head(
        record.genesis, record.lineage, record.round, state.hashes.state, state.hashes.anchor, voters_of(record),
        record.run_step, record.tokens_total, record,
    )  # fmt: skip


def landing(
    run: RunConfig,
    record: Record,
    state: AnchorState,
    peer_id: PeerId,
    own: OwnContribution | None,
    included: bool,
    missed_rounds: int,
    outstanding_tokens: int,
    spent: Spent,
) -> Landing:
    """What the training thread is to do about a round.

    A contributor takes what was agreed on and keeps what quantisation lost: θ += A′ − A + decode(own sent bytes). Who
    was left out once goes on from its own weights (DiLoCo, section 3.1, figure 8: the paper's rule); left out twice,
    it adopts the anchor, and what it learnt is discarded. After the run's last round there is no going on: all end
    with the anchor.
    """
    kind, buffer = "keep", None
    finished = 0 < run.total_steps <= record.run_step
    overwrite = not included and (finished or missed_rounds > run.max_missed_rounds)
    if included and own is not None:
        kind, buffer = "add", own.buffer
    elif overwrite:
        kind, buffer = "write", state.anchor_tensor()
    report = RoundReport(
        round=record.round,
        status="committed" if len(record.contributors) > 1 else "solo",
        lineage=record.lineage,
        contributors=tuple(c.peer_id for c in record.contributors),
        bytes_sent=spent.bytes_sent,
        bytes_received=spent.bytes_received,
        late=not included,
        parent_sha256=record.parent_sha256,
        wall_s=spent.wall_s,
        stall_s=own.held_s if own else 0.0,
        tokens_discarded=outstanding_tokens if overwrite else 0,
        cosine=record.cosine,
        mean_norm=record.mean_norm,
    )
    return Landing(
        kind=kind,
        buffer=buffer,
        epoch=Epoch(record.lineage, record.round),
        sync_every=dict(record.intervals).get(peer_id, run.sync_every),
        run_step=record.run_step,
        included_tokens=own.tokens if included and own else 0,
        snapshot_steps=own.steps if own else None,
        report=report,
        finished=finished,
    )


def touched_buffer(num_blocks: int) -> torch.Tensor:
    """A (num_blocks, 64) buffer whose pages exist already, so that the training thread does not pay for them."""
    return torch.empty((num_blocks, 64)).fill_(0.0)
