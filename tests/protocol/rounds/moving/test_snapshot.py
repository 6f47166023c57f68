"""A contribution's encoded chunks lie in its snapshot, and become what the landing adds to the live weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2ptrain.algorithms.codec import CODECS, codec
from p2ptrain.protocol.exchange.types import Epoch, Snapshot
from p2ptrain.protocol.rounds.deciding.grid import Grid
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution

BLOCKS = 2500
BOUNDS = Grid(0, BLOCKS).bounds(0, BLOCKS)


def values(seed: int, blocks: int = BLOCKS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((blocks, 64), np.float32)


def contribution_of(weights: np.ndarray, **buffers: np.ndarray) -> OwnContribution:
    return OwnContribution(
        Snapshot(Epoch(), torch.from_numpy(weights.copy()), 0, 0, 0, False, 0.0), Grid(0, BLOCKS), **buffers
    )


@pytest.mark.parametrize("name", [name for name in CODECS if not codec(name).error_decay])
def test_chunks_take_no_memory_of_their_own(name: str) -> None:
    anchor, weights, coding = values(1), values(2), codec(name)
    own = contribution_of(weights)
    for chunk in BOUNDS:
        own.encode(anchor, coding, chunk)
    for start, stop in BOUNDS:
        assert bytes(own.chunks[start]) == coding.encode(anchor[start:stop] - weights[start:stop])
        assert np.shares_memory(np.frombuffer(own.chunks[start], np.uint8), own.snapshot.weights.numpy())


@pytest.mark.parametrize("name", CODECS)
def test_what_lands_is_the_change_of_the_anchor_and_what_was_sent(name: str) -> None:
    anchor, weights, change, coding = values(1), values(2), values(3), codec(name)
    keeps_error = coding.error_decay > 0
    assert keeps_error == (name in ("int2", "topk"))
    own = contribution_of(weights, **{n: np.zeros_like(anchor) for n in ("error", "next_error") if keeps_error})
    for chunk in BOUNDS:
        own.encode(anchor, coding, chunk)
    added = {start: anchor[start:stop] - weights[start:stop] for start, stop in BOUNDS}
    if not keeps_error:
        added = {start: coding.decode(bytes(own.chunks[start]), stop - start) for start, stop in BOUNDS}
    averaged = values(4, 300)  # the last blocks are no outer gradients
    for start, stop in BOUNDS:
        middle = min(stop, BLOCKS - len(averaged))
        own.land(coding, start, change[start:stop].copy(), averaged[: stop - middle])
        landed = own.snapshot.weights.numpy()[start:stop]
        assert np.array_equal(landed[: middle - start], added[start][: middle - start] + change[start:middle])
        assert np.array_equal(landed[middle - start :], averaged[: stop - middle])
    assert own.is_whole
    assert not any(own.chunks.values())


@pytest.mark.parametrize("name", [name for name in CODECS if codec(name).error_decay])
def test_what_a_coarse_codec_does_not_send_is_kept_for_the_next_round(name: str) -> None:
    anchor, weights, error, coding = values(1), values(2), values(3), codec(name)
    own = contribution_of(weights, error=error, next_error=np.zeros_like(anchor))
    for chunk in BOUNDS:
        own.encode(anchor, coding, chunk)
    assert own.next_error is not None
    for start, stop in BOUNDS:
        sent = coding.decode(own.chunks[start], stop - start)
        known = anchor[start:stop] - weights[start:stop] + np.float32(0.95) * error[start:stop]
        assert np.array_equal(own.next_error[start:stop], known - sent)
