"""A round has the same bits with any number of worker threads, with the loops in C and with numpy."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
import trio

from p2ptrain.algorithms import kernels
from p2ptrain.algorithms.codec import CHUNK_BLOCKS
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS
from p2ptrain.peer.worker import Workers
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.exchange.types import Epoch, Snapshot
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of, check_decodes
from p2ptrain.protocol.rounds.deciding.grid import Grid, gradient_codec
from p2ptrain.protocol.rounds.deciding.timeouts import Timeouts
from p2ptrain.protocol.rounds.landing.outer_step import Progress, step_chunk
from p2ptrain.protocol.rounds.moving.collection import Collection, ReceivedChunk
from p2ptrain.protocol.rounds.moving.reducer import ExpectedMean
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution
from p2ptrain.protocol.wire.messages import Contributor, Part, Record, RosterPart
from p2ptrain.settings.config import RunConfig

# Twelve chunks and a shorter one, whose last blocks are only averaged.
BLOCKS = 12 * CHUNK_BLOCKS + 500
STEPPED = BLOCKS - 300
BOUNDS = Grid(0, BLOCKS).bounds(0, BLOCKS)
MEMBERS = ("a", "b", "c")
TIMEOUTS = Timeouts(peer_timeout_s=30.0, round_timeout_s=60.0)


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((BLOCKS, 64), np.float32)


async def play(workers: Workers, run: RunConfig) -> tuple[object, ...]:
    """One round of three members, as their nodes go through it. Returns all that is to be the same."""
    codec, averaging, part = gradient_codec(run), averaging_of(run), RosterPart(0, BLOCKS, "a", ())
    state = AnchorState(BLOCKS, OUTER_OPTIMIZERS[run.outer_optimizer].num_moments, STEPPED)
    for seed, vector in enumerate(state.vectors):
        vector[:] = abs(values(seed))
    gradients: dict[str, OwnContribution] = {}
    for seed, name in enumerate(MEMBERS, 10):
        weights = torch.from_numpy(state.anchor + 0.1 * values(seed))
        error, next_error = (np.zeros_like(state.anchor) if codec.error_decay else None for _ in range(2))
        own = gradients[name] = OwnContribution(
            Snapshot(Epoch(), weights, 0, 0, 0, False, 0.0), Grid(0, BLOCKS), error=error, next_error=next_error
        )
        await in_parallel(workers, functools.partial(own.encode, state.anchor, codec), BOUNDS)
        own.seal(await in_parallel(workers, own.leaf, BOUNDS))
    collection = Collection(part, MEMBERS, Grid(0, BLOCKS), codec, TIMEOUTS, 0.0, num_stepped=STEPPED, audited=True)
    received = [ReceivedChunk(name, start, own.chunks[start]) for name, own in gradients.items() for start, _ in BOUNDS]
    measures = await in_parallel(workers, collection.measure, received)
    expected = ExpectedMean(
        Grid(0, BLOCKS).bounds(part.start, part.stop),
        [Contributor(name, f"{name}.1", 1.0, b"") for name in MEMBERS],
        averaging,
    )
    chunks = {name: dict(own.chunks) for name, own in gradients.items()}
    mean = b""
    while not expected.is_complete:
        mean += b"".join(await in_parallel(workers, expected.average, expected.take(chunks, workers.threads)))
    record = Record(
        "0-g", "0-g", 1, "", tuple(Contributor(name, f"{name}.1", 1.0, b"") for name in MEMBERS),
        (Part(0, BLOCKS, "mean", "a"),), run.outer_optimizer, 0.7, 0.9, 20, 100, (), 0.0, 0.0, (),
    )  # fmt: skip
    blobs, own, progress = {"mean": mean}.__getitem__, gradients["a"], Progress(record)
    norms = await in_parallel(workers, functools.partial(check_decodes, averaging, record, blobs, STEPPED), BOUNDS)
    land = functools.partial(own.land, codec)
    await in_parallel(workers, functools.partial(step_chunk, state, averaging, progress, blobs, land), BOUNDS)
    hashes = state.combine(await in_parallel(workers, state.chunk_hash, range(state.num_chunks)))
    roots = [gradient.name for gradient in gradients.values()]
    return roots, measures, mean, norms, hashes, own.snapshot.weights.numpy().tobytes()


@pytest.mark.parametrize(
    ("codec", "optimizer"),
    [*itertools.product(["int8", "int4"], ["nesterov", "adam"]), ("int2", "sgd"), ("fp16", "sgdm")],
)
def test_a_round_has_the_same_bits_however_it_is_computed(
    codec: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(threads: int) -> tuple[object, ...]:
        workers = Workers(threads)
        try:
            return await play(workers, RunConfig(round_codec=codec, outer_optimizer=optimizer))
        finally:
            workers.close()

    native, seen = kernels.library(), list[tuple[object, ...]]()
    for threads, library in itertools.product((1, 4), {native, None}):
        monkeypatch.setattr(kernels, "library", lambda library=library: library)
        seen.append(trio.run(main, threads))
    assert len(seen) >= 2
    for other in seen[1:]:
        assert other == seen[0]
