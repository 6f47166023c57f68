"""An outer step that an error interrupts goes on where it was: to the same bits, and with the same landing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import trio

from p2ptrain.algorithms.codec import Codec, codec
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS
from p2ptrain.peer.worker import Workers
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import Epoch, Snapshot
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.landing import outer_step
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution
from p2ptrain.protocol.wire.messages import Contributor, Part, Record
from p2ptrain.settings.config import RunConfig

# The last 300 blocks, from within the third chunk, are only averaged.
BLOCKS, STEPPED = 3000, 2700
BOUNDS = Grid(0, BLOCKS).bounds(0, BLOCKS)
CODEC = codec("int8")


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((BLOCKS, 64), np.float32)


def failing(call: Callable[..., Any], number: int, *, late: bool = False) -> Callable[..., Any]:
    """The call, which raises once: the one with this number, before or after its work."""
    calls = iter(range(1000))

    def struck(*args: Any, **kwargs: Any) -> Any:
        strikes = next(calls) == number
        if strikes and not late:
            raise MemoryError
        result = call(*args, **kwargs)
        if strikes:
            raise MemoryError
        return result

    return struck


def stepped(
    optimizer: str, coding: Codec = CODEC, errors: int = 0, threads: int = 1
) -> tuple[AnchorState, OwnContribution]:
    """The state after a round with our contribution, and what lands of it, after so many errors."""
    state = AnchorState(BLOCKS, OUTER_OPTIMIZERS[optimizer].num_moments, STEPPED)
    for seed, vector in enumerate(state.vectors):
        vector[:] = abs(values(seed))
    own = OwnContribution(Snapshot(Epoch(), torch.from_numpy(values(10)), 0, 0, 0, False, 0.0), Grid(0, BLOCKS))
    for chunk in BOUNDS:
        own.encode(state.anchor, CODEC, chunk)
    mean = b"".join(bytes(own.chunks[start]) for start, _ in BOUNDS)
    record = Record(
        "0-g", "0-g", 1, "", (Contributor("x", "x.1", 1.0, b""),), (Part(0, BLOCKS, "mean", "x"),),
        optimizer, 0.7, 0.9, 20, 100, (), 0.0, 0.0, (),
    )  # fmt: skip
    progress = outer_step.Progress(record)
    averaging = averaging_of(RunConfig())

    async def step_all() -> None:
        workers, land = Workers(threads), functools.partial(own.land, coding)
        blobs = {"mean": mean}.__getitem__
        step = functools.partial(outer_step.step_chunk, state, averaging, progress, blobs, land)
        try:
            await in_parallel(workers, step, BOUNDS)
        finally:
            workers.close()

    failures = 0
    while len(progress.stepped) < len(BOUNDS):
        try:
            trio.run(step_all)
        except MemoryError:
            failures += 1
    # Several threads may meet two errors at once.
    assert (failures == errors) if threads == 1 else (errors > 0) <= failures <= errors
    assert progress.stepped == {start for start, _ in BOUNDS}
    return state, own


@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
@pytest.mark.parametrize("chunk", range(len(BOUNDS)))
@pytest.mark.parametrize("where", ["our own chunk is decoded", "before the step", "after the step", "after both"])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupted_chunk_is_stepped_once(
    threads: int, where: str, chunk: int, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, landed = stepped(optimizer)
    coding, step, errors = CODEC, outer_step.outer_step, 1
    if where in ("our own chunk is decoded", "after both"):
        coding = dataclasses.replace(CODEC, _add=failing(CODEC.add, chunk))
    if where == "before the step":
        monkeypatch.setattr(outer_step, "outer_step", failing(step, chunk))
    elif where == "after the step":
        monkeypatch.setattr(outer_step, "outer_step", failing(step, chunk, late=True))
    elif where == "after both":
        # Again, once the chunk is tried again.
        monkeypatch.setattr(outer_step, "outer_step", failing(step, chunk + 1, late=True))
        errors = 2
    state, own = stepped(optimizer, coding, errors, threads)
    for ours, theirs in zip(state.vectors, plain.vectors, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert own.snapshot.weights.numpy().tobytes() == landed.snapshot.weights.numpy().tobytes()
