"""The outer step of a decided round on anchor and moments. Pure, for worker threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from p2ptrain.algorithms.outer import outer_step
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import Landing
from p2ptrain.protocol.rounds.deciding.averaging import Averaging, Blobs
from p2ptrain.protocol.wire.messages import Commit, Head, Record

Land = Callable[[int, np.ndarray, np.ndarray], None]


@dataclass(slots=True)
class Progress:
    """Progress of a record's outer step, to resume it after an error.

    `stepped` has the first blocks of the chunks that are done; `landing` is set once the training thread has it.
    """

    record: Record
    stepped: set[int] = field(default_factory=set)
    landing: Landing | None = None


def step_chunk(
    state: AnchorState,
    averaging: Averaging,
    progress: Progress,
    blobs: Blobs,
    land: Land | None,
    chunk: tuple[int, int],
) -> None:
    """Take the outer step on a chunk of the grid, in place: A, m ← step(A, m, mean). Does nothing if that is done.

    The new values are made in memory of their own, and replace the old ones once nothing can fail any more. So an error
    leaves the chunk as it was, and the next call tries again. Chunks share no memory, so worker threads may step
    different ones at the same time.

    Args:
        progress: holds the record; updated.
        blobs: the bytes that the record names, already verified by hash.
        land: takes the chunk's first block, the change of its anchor, and the new values of its last blocks, if these
            are only averaged (`OwnContribution.land`). If it raises, it must have changed nothing.
    """
    record, (low, high) = progress.record, chunk
    if low in progress.stepped:
        return
    codec, mean = averaging.mean(record, blobs, low, high)
    gradient = codec.decode(mean, high - low)
    stepped = max(low, min(high, state.num_stepped))
    old = [*(vector[low:stepped] for vector in state.vectors), state.anchor[stepped:high]]
    anchor, *moments, averaged = new = [values.copy() for values in old]
    outer_step(
        record.outer_optimizer,
        anchor,
        moments,
        gradient[: stepped - low],
        lr=record.outer_lr,
        momentum=record.outer_momentum,
        round_=record.round,
    )
    np.subtract(averaged, gradient[stepped - low :], out=averaged)
    if land is not None:
        np.subtract(anchor, old[0], out=gradient[: stepped - low])
        land(low, gradient, averaged)
    for values, replacement in zip(old, new, strict=True):
        values[:] = replacement
    progress.stepped.add(low)


def head_of(commit: Commit, state: AnchorState) -> Head:
    """The head after a committed record's outer step."""
    record = commit.record
    return Head(
        record.genesis,
        record.lineage,
        record.round,
        state.hashes.state,
        state.hashes.anchor,
        record.voters,
        record.run_step,
        record.tokens_total,
        commit,
    )
