"""An outer step that an error interrupts goes on where it was: to the same bits, and with the same landing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.algorithms.codec import Codec, codec
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import Epoch, Snapshot
from p2ptrain.protocol.rounds import outer_step
from p2ptrain.protocol.rounds.averaging import averaging_of
from p2ptrain.protocol.rounds.contribution import OwnContribution
from p2ptrain.protocol.rounds.grid import chunk_bounds
from p2ptrain.protocol.wire.messages import Contributor, Part, Record
from p2ptrain.settings.config import RunConfig

# The last 300 blocks, from within the third chunk, are only averaged.
BLOCKS, STEPPED = 3000, 2700
BOUNDS = chunk_bounds(0, BLOCKS)
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


def stepped(optimizer: str, coding: Codec = CODEC, errors: int = 0) -> tuple[AnchorState, OwnContribution]:
    """The state after a round with our contribution, and what lands of it, after so many errors."""
    state = AnchorState(BLOCKS, OUTER_OPTIMIZERS[optimizer].num_moments, STEPPED)
    for seed, vector in enumerate(state.vectors):
        vector[:] = abs(values(seed))
    own = OwnContribution(Snapshot(Epoch(), torch.from_numpy(values(10)), 0, 0, 0, False, 0.0))
    own.encode(state.anchor, CODEC, BOUNDS)
    mean = b"".join(bytes(own.chunks[start]) for start, _ in BOUNDS)
    record = Record(
        "0-g", "0-g", 1, "", (Contributor("x", "x.1", 1.0, b""),), (Part(0, BLOCKS, "mean", "x"),),
        optimizer, 0.7, 0.9, 20, 100, (), 0.0, 0.0,
    )  # fmt: skip
    progress = outer_step.Progress(record)
    averaging = averaging_of(RunConfig())

    def step() -> None:
        land = functools.partial(own.land, coding)
        outer_step.step_chunks(state, averaging, progress, {"mean": mean}.__getitem__, (0, BLOCKS), land)

    for _ in range(errors):
        with pytest.raises(MemoryError):
            step()
    step()
    assert progress.stepped == BLOCKS
    return state, own


@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
@pytest.mark.parametrize("chunk", range(len(BOUNDS)))
@pytest.mark.parametrize("where", ["our own chunk is decoded", "before the step", "after the step", "after both"])
def test_an_interrupted_chunk_is_stepped_once(
    where: str, chunk: int, optimizer: str, monkeypatch: pytest.MonkeyPatch
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
    state, own = stepped(optimizer, coding, errors)
    for ours, theirs in zip(state.vectors, plain.vectors, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert own.snapshot.weights.numpy().tobytes() == landed.snapshot.weights.numpy().tobytes()
