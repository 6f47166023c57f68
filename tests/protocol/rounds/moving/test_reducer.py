"""The mean of the expected contributors, made chunk by chunk, has the bytes of the mean that is made at once."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from p2ptrain.algorithms.codec import CHUNK_BLOCKS
from p2ptrain.protocol.rounds.deciding.averaging import MERGES, Chunks, averaging_of
from p2ptrain.protocol.rounds.deciding.grid import Grid, gradient_codec
from p2ptrain.protocol.rounds.deciding.policy import without_roots
from p2ptrain.protocol.rounds.moving.reducer import CHUNKS_AVERAGED, ExpectedMean
from p2ptrain.protocol.wire.messages import Contributor, RosterPart
from p2ptrain.settings.config import RunConfig

# Some whole chunks and a shorter one, not from the beginning of the vector.
PART = RosterPart(CHUNK_BLOCKS, 11 * CHUNK_BLOCKS + 5, "a", ())
BOUNDS = Grid(0, 11 * CHUNK_BLOCKS + 5).bounds(PART.start, PART.stop)
CONTRIBUTORS = [Contributor(name, f"{name}.1", weight, b"") for name, weight in (("a", 2.0), ("b", 1.0), ("c", 0.5))]


def chunks_of(run: RunConfig) -> Chunks:
    codec, rng = gradient_codec(run), np.random.default_rng(0)
    return {
        c.peer_id: {
            start: codec.encode(rng.standard_normal((stop - start, 64)).astype(np.float32)) for start, stop in BOUNDS
        }
        for c in CONTRIBUTORS
    }


@pytest.mark.parametrize(
    ("mean", "codec"),
    [*itertools.product(MERGES, ["int8", "int4", "int2", "fp16"]), ("weighted", "topk"), ("disjoint", "topk")],
)
def test_it_has_the_bytes_of_the_mean_that_is_made_at_once(mean: str, codec: str) -> None:
    run = dataclasses.replace(RunConfig(), round_mean=mean, round_codec=codec)
    chunks, averaging = chunks_of(run), averaging_of(run)
    expected, data = ExpectedMean(BOUNDS, CONTRIBUTORS, averaging), b""
    while not expected.is_complete:
        data += b"".join(map(expected.average, expected.take(chunks, 1)))
    (blob,) = averaging.reduce(BOUNDS, chunks, CONTRIBUTORS)
    assert data == blob


def test_chunks_are_taken_in_their_order_once_all_contributors_have_sent_them() -> None:
    everything = chunks_of(RunConfig())
    starts = [start for start, _ in BOUNDS]
    arrived: Chunks = {name: {} for name in "abc"}
    expected = ExpectedMean(BOUNDS, CONTRIBUTORS, averaging_of(RunConfig()))
    assert expected.take(arrived, 1) == expected.take({}, 1) == []
    for name in "abc":
        arrived[name][starts[1]] = everything[name][starts[1]]
    assert expected.take(arrived, 1) == []  # the first is missing
    for name in "ab":
        arrived[name][starts[0]] = everything[name][starts[0]]
    assert expected.take(arrived, 1) == []  # of the third contributor, too
    arrived["c"][starts[0]] = everything["c"][starts[0]]
    assert [encoded for encoded, _ in expected.take(arrived, 1)] == [
        [(everything[c.peer_id][start], c.weight) for c in CONTRIBUTORS] for start in starts[:2]
    ]
    assert not expected.is_complete
    assert len(expected.take(everything, 1)) == CHUNKS_AVERAGED
    assert [num_blocks for _, num_blocks in expected.take(everything, 1)] == [5]
    assert expected.is_complete


def test_contributors_without_their_roots() -> None:
    with_roots = [Contributor(c.peer_id, c.incarnation, c.weight, bytes(32)) for c in CONTRIBUTORS]
    assert without_roots(with_roots) == tuple(CONTRIBUTORS)
