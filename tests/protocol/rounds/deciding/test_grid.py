"""The grid of chunks: that of small models, and of large ones, of which a swarm makes rounds with the same bits."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from p2ptrain.algorithms.codec import codec
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding import grid
from p2ptrain.protocol.rounds.deciding.grid import LARGE_BLOCKS, MOST_CHUNK_BYTES, Grid, Grids
from p2ptrain.protocol.wire.messages import Head, Part, Record
from tests.protocol.swarm import RUN, run_virtual, swarm
from tests.protocol.wire.test_messages import example_of


@pytest.mark.parametrize(
    ("name", "chunk_blocks"), [("int8", 4096), ("int4", 4096), ("topk", 4096), ("fp16", 2048), ("none", 1024)]
)
def test_large_models_have_larger_chunks_but_no_larger_bytes(name: str, chunk_blocks: int) -> None:
    assert Grid.of(LARGE_BLOCKS - 1, codec(name)).chunk_blocks == 1024
    assert Grid.of(LARGE_BLOCKS, codec(name)).chunk_blocks == chunk_blocks
    assert codec(name).size_bytes(chunk_blocks) <= MOST_CHUNK_BYTES


@pytest.mark.parametrize("num_blocks", [1, 1024, 3 * 1024 + 5, LARGE_BLOCKS, LARGE_BLOCKS + 4097])
@pytest.mark.parametrize("reducers", [1, 3, 64])
@pytest.mark.parametrize("first", [0, 777])
def test_parts_are_runs_of_whole_chunks_that_cover_all_blocks(num_blocks: int, reducers: int, first: int) -> None:
    whole = Grid.of(num_blocks, codec("int8"))
    chunks = Grid(first, first + num_blocks, whole.chunk_blocks)
    parts = chunks.split(reducers)
    chunks.check_parts(parts)
    assert len(parts) == min(reducers, chunks.num_chunks)
    bounds = [bounds for part in parts for bounds in chunks.bounds(*part)]
    assert bounds == chunks.chunks
    assert [(start - first, stop - first) for start, stop in bounds] == whole.chunks
    assert len(bounds) == chunks.num_chunks
    assert [number for part in parts for number in range(*chunks.numbers(*part))] == list(range(chunks.num_chunks))
    for start, stop in bounds:
        chunks.check_chunk(start, stop)


def test_a_large_model_has_no_small_chunks() -> None:
    large = Grid.of(LARGE_BLOCKS, codec("int8"))
    with pytest.raises(WireError, match="is no chunk"):
        large.check_chunk(0, 1024)
    with pytest.raises(WireError, match="does not continue"):
        large.check_parts([(0, 1024), (1024, LARGE_BLOCKS)])


def test_a_section_refuses_the_chunks_and_parts_of_others() -> None:
    section = Grid(1000, 4000, section=1)
    for chunk in ((0, 1000), (4000, 5024), (1024, 2048), (2024, 4000)):
        with pytest.raises(WireError, match="is no chunk"):
            section.check_chunk(*chunk)
    for parts in ([(0, 4000)], [(1000, 2024)], [(1000, 2000), (2000, 4000)], [(1000, 5024)]):
        with pytest.raises(WireError, match=r"does not continue|parts end"):
            section.check_parts(parts)


def test_rounds_average_one_section_after_the_other_and_the_last_one_all() -> None:
    run = dataclasses.replace(RUN, round_sections=3, total_steps=200)
    grids = Grids.of(3000, [(0, 1100), (1100, 1900), (1900, 3000)], codec("int8"))
    head = msgspec.structs.replace(example_of(Head), round=6, run_step=179)
    assert grids.of_round(run, head) == Grid(1100, 1900, section=1)
    assert grids.of_round(run, msgspec.structs.replace(head, round=7)) == grids.sections[2]
    assert grids.of_round(run, msgspec.structs.replace(head, run_step=180)) == Grid(0, 3000)
    assert grids.of_round(dataclasses.replace(run, total_steps=0), head) == grids.sections[1]


def test_the_grid_of_a_record_is_that_of_its_round_or_of_all() -> None:
    grids = Grids.of(3000, [(0, 1100), (1100, 3000)], codec("int8"))
    record = msgspec.structs.replace(example_of(Record), round=5)
    for parts, expected in (
        ([(1100, 2000), (2000, 3000)], grids.sections[1]),
        ([(0, 2000), (2000, 3000)], grids.whole),
        ([(0, 1100)], grids.sections[1]),  # refused by `check_parts`
        ([], grids.sections[1]),
    ):
        named = tuple(Part(start, stop, "", "a") for start, stop in parts)
        assert grids.of_record(msgspec.structs.replace(record, parts=named)) is expected


@pytest.mark.parametrize("averaging", ["parts", "gather"])
def test_peers_make_rounds_of_large_chunks(
    averaging: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `parts`, audits included, which fetch the chunks of a part."""
    monkeypatch.setattr(grid, "LARGE_BLOCKS", 4096)
    run = dataclasses.replace(RUN, averaging=averaging, audit_rate=1.0)

    async def main() -> None:
        async with swarm(run, shapes=[("w", (3 * 4096 + 100, 64)), ("b", (65,))]) as s:
            peers = [s.start(name, founder=name == "a") for name in "abc"]
            await s.until(lambda: all(len(peer.rounds("committed")) >= 4 for peer in peers))
            rounds = [{event["round"]: event for event in peer.rounds("committed")} for peer in peers]
            shared = sorted(set.intersection(*map(set, rounds)))
            assert len(shared) >= 3
            for number in shared:
                assert len({of[number]["anchor_hash"] for of in rounds}) == 1
            assert rounds[0][shared[-1]]["group_size"] == len(peers)
        assert ("it fits" in caplog.text) == (averaging == "parts")

    run_virtual(main)
