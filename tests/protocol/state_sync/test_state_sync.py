"""Late joiners: every byte of the state is verified, and a joiner reaches the state of the other peers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio

from p2ptrain.algorithms.codec import codec
from p2ptrain.errors import ConfigError, PeerLostError, WireError
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.protocol.anchor import STATE_CHUNK_BLOCKS, AnchorState, chunk_hash
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.membership.directory import bucket_of, encode_record, member_key
from p2ptrain.protocol.node.requests import MAX_SERVED_AT_ONCE
from p2ptrain.protocol.rounds.deciding import grid
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of
from p2ptrain.protocol.rounds.deciding.grid import Grid, Grids, gradient_codec
from p2ptrain.protocol.rounds.deciding.history import History, lineage_of
from p2ptrain.protocol.rounds.deciding.record import part_digest
from p2ptrain.protocol.rounds.landing.outer_step import Progress, step_chunk
from p2ptrain.protocol.rounds.moving.part_store import PARTS_AT_ONCE, PartStore
from p2ptrain.protocol.rounds.moving.pushed_means import PushedMeans
from p2ptrain.protocol.state_sync import provenance
from p2ptrain.protocol.state_sync import transfer as state_module
from p2ptrain.protocol.state_sync.joining import Joining
from p2ptrain.protocol.state_sync.provenance import OvertakenError
from p2ptrain.protocol.state_sync.transfer import (
    BUFFER_PIECE_BYTES,
    MOST_PER_DONOR,
    OWED_S,
    Download,
    ModelBuffers,
    StateServer,
    _Chunks,
    ask_buffers,
)
from p2ptrain.protocol.wire.frames import MAX_PAYLOAD_BYTES
from p2ptrain.protocol.wire.messages import (
    KIND_OF,
    Answer,
    Beat,
    Contribution,
    Contributor,
    Founding,
    Head,
    Message,
    Part,
    Record,
    Request,
    SignedHead,
    pack,
)
from tests.protocol.signing import Past, genesis_of, prover_of, signed_by, signed_head
from tests.protocol.swarm import RUN, Swarm, inline, run_virtual, swarm
from tests.protocol.wiring import Endpoint, hello_of, start_endpoint, until

MOST_BYTES = 8 * BUFFER_PIECE_BYTES
BLOCKS = 12 * STATE_CHUNK_BLOCKS - 100
CHUNKS = 24
PAST = Past(RUN.digest)


def some_state(seed: int = 0, num_blocks: int = BLOCKS) -> AnchorState:
    rng, state = np.random.default_rng(seed), AnchorState(num_blocks, 1)
    state.anchor[:] = rng.standard_normal(state.anchor.shape, np.float32)
    state.moments[0][:] = rng.standard_normal(state.moments[0].shape, np.float32)
    state.rehash()
    return state


def head_of(state: AnchorState, lineage: str = "0-L", round_: int = 7) -> Head:
    hashes = state.hashes
    return Head(PAST.genesis_id, lineage, round_, hashes.state, hashes.anchor, (("a", "a.1"),), 140, 1000, None)


ONE_BLOCK = some_state(num_blocks=1)


def sign(head: Head, by: str = "a", genesis: Founding = PAST.genesis, **changed: object) -> SignedHead:
    """A head signed by these, and what was changed in it since."""
    signed = signed_head(head, genesis, RUN.digest, by)
    return msgspec.structs.replace(signed, head=msgspec.structs.replace(head, **changed))


def parts_of(endpoint: Endpoint) -> PartStore:
    averaging = averaging_of(RUN)
    return PartStore(endpoint.links, inline, averaging, PushedMeans(endpoint.links, averaging, int))


class Donor:
    """An endpoint that serves a state, and may be told to serve it badly."""

    def __init__(self, endpoint: Endpoint, state: AnchorState, buffers: bytes = b"") -> None:
        self.endpoint = endpoint
        self.state = state
        self.head = head_of(state)
        self.busy = False
        self.gives_chunks = True
        self.asked: Counter[str] = Counter()
        self.chunks: list[int] = []
        self.instead: dict[str, bytes] = {}
        self.parts = parts_of(endpoint)
        self.packed = 0
        self.context: Any = SimpleNamespace(state=state, compute=inline)
        self.server = StateServer(self, lambda: self.pack(buffers))  # type: ignore[arg-type]
        endpoint.on_request = self.serve

    @property
    def committer(self) -> SimpleNamespace:
        return SimpleNamespace(stepping=self.busy)

    @property
    def signed_head(self) -> SignedHead:
        return signed_head(self.head, PAST.genesis, RUN.digest, "a")

    @property
    def history(self) -> History:
        return History(PAST.genesis, PAST.entries)

    def pack(self, buffers: bytes) -> bytes:
        """The model's buffers; every packing finds other values in them, as training goes on."""
        self.packed += 1
        return bytes([self.packed]) * len(buffers) if buffers == bytes(len(buffers)) else buffers

    def resolve_round(self) -> None:
        """Take an outer step, as a round does it; its means are served."""
        before, rng = self.state.hashes.state, np.random.default_rng(self.head.round)
        whole, parts = Grid.of(BLOCKS, codec("int8")), []
        contributors = (Contributor("a", "a.1", 1.0, bytes(32)),)
        for start, stop in whole.split(2):
            chunks = (rng.standard_normal((high - low, 64), np.float32) for low, high in whole.bounds(start, stop))
            mean = b"".join(map(codec("int8").encode, chunks))
            digest = part_digest(mean, contributors, (start, stop))
            self.parts.add(digest, mean)
            parts.append(Part(start, stop, digest, "nobody"))
        round_ = self.head.round + 1
        record = Record(
            PAST.genesis_id, "0-L", round_, before, contributors, tuple(parts), "nesterov", 0.7, 0.9, 160, 2000, (),
            0.0, 0.0, (("a", "a.1"),),
        )  # fmt: skip
        progress = Progress(record)
        for chunk in whole.chunks:
            step_chunk(self.state, averaging_of(RUN), progress, self.parts.get, None, chunk)
        self.state.rehash()
        head = head_of(self.state, round_=round_)
        self.head = msgspec.structs.replace(
            head, run_step=160, tokens_total=2000, commit=signed_by("a", record, RUN.digest)
        )

    async def serve(self, link: Link, request: Request) -> None:
        self.asked[request.what] += 1
        if request.what == "chunk":
            self.chunks.append(request.index)
            if not self.gives_chunks:
                await trio.sleep_forever()
        if request.what == "part":
            await self.parts.serve(link, request)
        elif request.what in self.instead:
            answer = Answer(request.request, True, request.what)
            await link.send_bulk(answer, self.instead[request.what], Traffic.STATE)
        else:
            await self.server.serve(link, request)


@asynccontextmanager
async def donors_and_joiner(
    *names: str, network: MemoryNetwork | None = None, buffers: bytes = b""
) -> AsyncIterator[tuple[MemoryNetwork, dict[str, Donor], Endpoint, list[Link]]]:
    """Donors of one state, a joiner that is linked to all of them, and its links."""
    network, state = network or MemoryNetwork(latency_s=0.01), some_state()
    async with trio.open_nursery() as nursery:
        donors = {name: Donor(await start_endpoint(network, nursery, hello_of(name)), state, buffers) for name in names}
        joiner = await start_endpoint(network, nursery, hello_of("joiner"))
        yield network, donors, joiner, [await joiner.links.connect(name, []) for name in names]
        nursery.cancel_scope.cancel()


async def head_from(joiner: Endpoint, link: Link) -> Head:
    context: Any = SimpleNamespace(run=RUN, links=joiner.links, prover=prover_of("joiner", RUN.digest), compute=inline)
    return (await provenance.ask_head(context, link)).head


def download_into(state: AnchorState, joiner: Endpoint) -> Download:
    context: Any = SimpleNamespace(
        run=RUN,
        links=joiner.links,
        compute=inline,
        parts=parts_of(joiner),
        averaging=averaging_of(RUN),
        grids=Grids.of(state.num_blocks, [], gradient_codec(RUN)),
    )
    return Download(context, state)


def check_equal(mine: AnchorState, theirs: AnchorState) -> None:
    assert np.array_equal(mine.anchor, theirs.anchor)
    assert np.array_equal(mine.moments[0], theirs.moments[0])
    assert mine.hashes == theirs.hashes
    mine.rehash()
    assert mine.hashes == theirs.hashes


# --- hashes ------------------------------------------------------------------------------------------------------


def test_hashes_cover_every_value_and_the_anchor_has_its_own() -> None:
    state = some_state()
    before = state.hashes
    assert (len(before.chunks), state.num_chunks) == (CHUNKS, CHUNKS)
    state.moments[0][-1, -1] += 1
    state.rehash()
    assert state.hashes.state != before.state
    assert state.hashes.anchor == before.anchor
    state.anchor[0, 0] += 1
    state.rehash()
    assert state.hashes.anchor != before.anchor
    assert sum(new != old for new, old in zip(state.hashes.chunks, before.chunks, strict=True)) == 2
    assert state.combine(before.chunks) == before


def test_chunks_are_views_that_cover_both_vectors_once() -> None:
    state = some_state()
    for index in range(CHUNKS):
        state.chunk(index)[:] += 1
    expected = some_state()
    assert np.array_equal(state.anchor, expected.anchor + 1)
    assert np.array_equal(state.moments[0], expected.moments[0] + 1)
    for index in (-1, CHUNKS):
        with pytest.raises(IndexError):
            state.chunk(index)


# --- downloading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_download_is_the_donors_state_bit_by_bit_and_spread_over_them(names: str) -> None:
    async def main() -> None:
        async with donors_and_joiner(*names) as (_, donors, joiner, links):
            head = await head_from(joiner, links[0])
            assert head == donors["a"].head
            state = AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            await download.run(head, links)
            check_equal(state, donors["a"].state)
            assert download.progress == 1
            asked = sum((Counter(donor.chunks) for donor in donors.values()), Counter())
            assert asked == Counter(range(CHUNKS))
            assert all(donor.chunks for donor in donors.values())

    run_virtual(main)


def test_only_chunks_that_differ_are_fetched() -> None:
    async def main() -> None:
        async with donors_and_joiner("a") as (_, donors, joiner, links):
            mine = some_state()
            mine.anchor[STATE_CHUNK_BLOCKS] = 0
            mine.moments[0][-1] = 0
            mine.rehash()
            await download_into(mine, joiner).run(donors["a"].head, links)
            check_equal(mine, donors["a"].state)
            assert sorted(donors["a"].chunks) == [2, CHUNKS - 1]

    run_virtual(main)


def test_of_two_donors_one_may_die() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=500e3)
        async with donors_and_joiner("a", "b", network=network) as (_, donors, joiner, links):
            state = AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(download.run, donors["b"].head, links)
                await until(lambda: download.done_chunks >= 4)
                network.crash("a")
            check_equal(state, donors["b"].state)

    run_virtual(main)


def test_what_one_donor_owes_for_long_comes_from_another() -> None:
    async def main() -> None:
        async with donors_and_joiner("a", "b") as (_, donors, joiner, links):
            donors["b"].gives_chunks = False
            state = AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            with trio.fail_after(OWED_S + 2):
                await download.run(donors["a"].head, links)
            check_equal(state, donors["a"].state)
            assert download.done_chunks == CHUNKS

    run_virtual(main)


def test_a_download_ends_soon_after_half_of_the_donors_have_another_state() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=500e3)
        async with donors_and_joiner("a", "b", network=network) as (_, donors, joiner, links):
            donors["b"].gives_chunks = False
            state = AnchorState(BLOCKS, 1)
            download, head = download_into(state, joiner), donors["a"].head

            async def run() -> None:
                with pytest.raises(OvertakenError):
                    await download.run(head, links)

            with trio.fail_after(OWED_S + 15):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run)
                    await until(lambda: download.done_chunks >= 4)
                    donors["a"].resolve_round()

    run_virtual(main)


def test_an_idle_donor_takes_over_a_chunk_only_after_twice_the_time_of_its_own() -> None:
    a: Any = "a"
    b: Any = "b"
    c: Any = "c"
    chunks = _Chunks(range(3))
    assert [chunks.take(donor, 0.0) for donor in (a, b, b)] == [0, 1, 2]
    chunks.note_arrived(a, 0, 4.0)
    assert chunks.take(a, OWED_S + 1) is None
    assert chunks.take(c, OWED_S + 1) == 1
    # Another one waits for it again.
    assert chunks.take(a, 8.0) == 2
    assert chunks.take(a, 8.0) is None
    chunks.note_failed(c, 1)
    assert chunks.left == 2
    chunks.note_failed(b, 1)
    assert chunks.take(c, 8.0) == 1
    chunks.note_arrived(a, 2, 1.0)
    chunks.note_failed(b, 2)
    assert chunks.left == 1


def test_no_chunk_is_fetched_twice_from_donors_that_answer() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=1e6)
        async with donors_and_joiner("a", "b", network=network) as (_, donors, joiner, links):
            network.narrow("b", 250e3)
            state = AnchorState(BLOCKS, 1)
            await download_into(state, joiner).run(donors["a"].head, links)
            check_equal(state, donors["a"].state)
            assert Counter(donors["a"].chunks + donors["b"].chunks) == Counter(range(CHUNKS))

    run_virtual(main)


def test_what_a_lost_donor_gave_is_kept_for_the_next() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=500e3)
        async with donors_and_joiner("a", "b", network=network) as (_, donors, joiner, links):
            state = AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            async with trio.open_nursery() as nursery:

                async def fails() -> None:
                    with pytest.raises(PeerLostError, match="of 24 state chunks are missing"):
                        await download.run(donors["a"].head, links[:1])

                nursery.start_soon(fails)
                await until(lambda: download.done_chunks >= 4)
                network.crash("a")
            kept = download.done_chunks
            assert kept >= 4
            assert not state.hashes.chunks
            await download.run(donors["b"].head, links[1:])
            check_equal(state, donors["b"].state)
            assert len(donors["b"].chunks) == CHUNKS - kept

    run_virtual(main)


@pytest.mark.parametrize("kind", ["wrong", "short", "long", "empty"])
def test_a_donor_with_a_wrong_chunk_is_refused_and_another_serves(kind: str) -> None:
    async def main() -> None:
        async with donors_and_joiner("a", "b") as (_, donors, joiner, links):
            right = donors["a"].state.chunk(0).tobytes()
            payloads = {"wrong": bytes(len(right)), "short": right[:-1], "long": right + b"x", "empty": b""}
            donors["a"].instead["chunk"] = payloads[kind]
            state = AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            for _ in range(4):
                try:
                    await download.run(donors["b"].head, links)
                    break
                except PeerLostError:
                    assert not state.hashes.chunks
            check_equal(state, donors["b"].state)

    run_virtual(main)


@pytest.mark.parametrize("vector", [0, 1])
def test_a_state_that_is_not_finite_is_refused_and_another_is_taken(vector: int) -> None:
    async def main() -> None:
        async with donors_and_joiner("a", "b") as (_, donors, joiner, (a, b)):
            donors["a"].state = poisoned = some_state()
            poisoned.vectors[vector][-1, -1] = np.inf
            poisoned.rehash()
            donors["a"].head = head_of(poisoned)
            donors["a"].context.state = poisoned
            donors["a"].server = StateServer(donors["a"], bytes)  # type: ignore[arg-type]
            state = AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            with pytest.raises(WireError, match="the state of round 7 contains NaN or infinity"):
                await download.run(donors["a"].head, [a])
            assert not state.hashes.chunks
            await download.run(donors["b"].head, [b])
            check_equal(state, donors["b"].state)

    run_virtual(main)


def test_a_truncated_download_is_never_adopted() -> None:
    """A donor that goes away after every single chunk: nothing claims to be whole until all of it is."""

    async def main() -> None:
        async with donors_and_joiner("a") as (network, donors, joiner, links):
            state = AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            link, attempts = links[0], 0
            while not state.hashes.chunks:
                served = 0

                def fault(source: str, target: str, packet: bytes) -> PacketFault:
                    nonlocal served
                    served += len(packet) > 200_000
                    return PacketFault.BREAK if served > 1 else PacketFault.NONE

                network.fault = fault
                attempts += 1
                with pytest.raises(PeerLostError) if attempts < CHUNKS else trio.CancelScope():
                    await download.run(donors["a"].head, [link])
                assert download.done_chunks == attempts
                assert bool(state.hashes.chunks) == (attempts == CHUNKS)
                network.fault = lambda *_: PacketFault.NONE
                await until(lambda: joiner.links.get("a") is None or attempts == CHUNKS)
                link = await joiner.links.connect("a", [])
            check_equal(state, donors["a"].state)

    run_virtual(main)


@pytest.mark.parametrize("manifest", [b"", b"0" * 64 * CHUNKS, b"\xff" * 64 * CHUNKS, b"0" * 64 * (CHUNKS - 1)])
def test_a_manifest_that_does_not_hash_to_the_head_is_refused(manifest: bytes) -> None:
    async def main() -> None:
        async with donors_and_joiner("a", "b") as (_, donors, joiner, links):
            donors["a"].instead["manifest"] = manifest
            state = AnchorState(BLOCKS, 1)
            await download_into(state, joiner).run(donors["b"].head, links)
            check_equal(state, donors["b"].state)
            donors["b"].instead["manifest"] = manifest
            with pytest.raises(PeerLostError, match="manifest"):
                await download_into(AnchorState(BLOCKS, 1), joiner).run(donors["b"].head, links)

    run_virtual(main)


@pytest.mark.parametrize("pages", [1, 2, 5, 24])
def test_a_manifest_comes_in_pages(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(state_module, "MANIFEST_PAGE_HASHES", -(-CHUNKS // pages))
        async with donors_and_joiner("a", "b") as (_, donors, joiner, links):
            state = AnchorState(BLOCKS, 1)
            await download_into(state, joiner).run(donors["a"].head, links)
            check_equal(state, donors["a"].state)
            assert donors["a"].asked["manifest"] == pages
            # Pages of two states do not mix.
            donors["a"].instead["manifest"] = b"0" * 64 * -(-CHUNKS // pages)
            state = AnchorState(BLOCKS, 1)
            await download_into(state, joiner).run(donors["b"].head, links)
            check_equal(state, donors["b"].state)
            assert donors["b"].asked["manifest"] == pages

    run_virtual(main)


def test_a_donor_serves_as_many_requests_as_a_joiner_sends() -> None:
    assert MOST_PER_DONOR + PARTS_AT_ONCE <= MAX_SERVED_AT_ONCE


def test_a_state_of_more_than_2_billion_parameters_can_be_had() -> None:
    """Its manifest is longer than the largest frame. It is all zero, and takes no memory here."""

    def zeros(num_blocks: int) -> AnchorState:
        state = AnchorState(1, 1)
        block = np.zeros((1, 64), np.float32)
        whole = np.lib.stride_tricks.as_strided(block, (num_blocks, 64), (0, block.strides[1]))
        state.anchor, state.moments = whole, [whole]
        state.hashes = state.combine([chunk_hash(bytes(STATE_CHUNK_BLOCKS * 64 * 4))] * state.num_chunks)
        return state

    async def main() -> None:
        num_blocks = 33_000 * STATE_CHUNK_BLOCKS
        assert num_blocks * 64 > 2.1e9
        async with donors_and_joiner("a") as (_, donors, joiner, links):
            donor, state = donors["a"], zeros(num_blocks)
            donor.server._state = zeros(num_blocks)
            donor.head = head_of(donor.server._state)
            assert 64 * state.num_chunks > MAX_PAYLOAD_BYTES
            missing = [1, state.num_chunks - 1]
            held = list(state.hashes.chunks)
            for index in missing:
                held[index] = ""
            state.hashes = state.combine(held)
            await download_into(state, joiner).run(donor.head, links)
            assert state.hashes == donor.server._state.hashes
            assert sorted(donor.chunks) == missing
            assert not joiner.links.strikes

    run_virtual(main)


def test_a_donor_that_moves_on_mid_way_is_asked_again_about_its_new_state() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=500e3)
        async with donors_and_joiner("a", network=network) as (_, donors, joiner, links):
            donor, state = donors["a"], AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)

            async def land() -> None:
                await until(lambda: download.done_chunks >= 3)
                donor.busy = True
                await trio.sleep(0.3)
                donor.state.anchor[:] += 1
                donor.state.rehash()
                donor.head = head_of(donor.state, round_=8)
                donor.busy = False

            async with trio.open_nursery() as nursery:
                nursery.start_soon(land)
                with pytest.raises(PeerLostError):
                    await download.run(donor.head, links)
            await trio.sleep(1)
            head = await head_from(joiner, links[0])
            assert head.round == 8
            await download.run(head, links)
            check_equal(state, donor.state)

    run_virtual(main)


# --- what a donor says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("broken", "large_blocks", "rolled"), [(False, 2**18, 4), (False, 0, 8), (True, 2**18, 0)])
def test_what_is_here_is_rolled_forward_when_a_round_comes_between(
    broken: bool, large_blocks: int, rolled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joiner steps the chunks that it holds to the new round; without the round's mean it fetches them again.

    Two chunks of the state, of anchor and moment, are one of the mean; in a large model eight.
    """
    monkeypatch.setattr(grid, "LARGE_BLOCKS", large_blocks)

    async def main() -> None:
        async with donors_and_joiner("b") as (_, donors, joiner, links):
            donor, state = donors["b"], AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            donor.instead["chunk"] = b"nothing"  # but for the first ones, which come as they are
            for index in range(rolled + 1):
                state.chunk(index)[:] = donor.state.chunk(index)
                download._held[index] = donor.state.hashes.chunks[index]
            with pytest.raises(PeerLostError):
                await download.run(donor.head, links)
            donor.instead.clear()
            donor.chunks.clear()
            donor.resolve_round()
            if broken:
                donor.parts = parts_of(donor.endpoint)
            await download.run(donor.head, links)
            check_equal(state, donor.state)
            assert sorted(donor.chunks) == list(range(rolled, CHUNKS))

    run_virtual(main)


@pytest.mark.parametrize(("when", "rolled"), [("fetched", 0), ("stepped", 4)])
def test_a_round_of_our_own_lineage_that_drops_the_mean_costs_no_donor(
    when: str, rolled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lands when the mean was fetched, or when the first chunk is stepped."""

    async def main() -> None:
        async with donors_and_joiner("b") as (_, donors, joiner, links):
            donor, state = donors["b"], AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            parts, step = download._context.parts, download._step_chunks
            fetch = parts.fetch

            async def fetch_and_land(record: Record, others: Sequence[str]) -> None:
                await fetch(record, others)
                parts._drop_all_but(())

            def land_and_step(*args: Any) -> None:
                parts._drop_all_but(())
                step(*args)

            if when == "fetched":
                monkeypatch.setattr(parts, "fetch", fetch_and_land)
            else:
                monkeypatch.setattr(download, "_step_chunks", land_and_step)
            for index in range(4):
                state.chunk(index)[:] = donor.state.chunk(index)
                download._held[index] = donor.state.hashes.chunks[index]
            download._held_of = donor.state.hashes.state
            donor.resolve_round()
            await download.run(donor.head, links)
            check_equal(state, donor.state)
            assert sorted(donor.chunks) == list(range(rolled, CHUNKS))

    run_virtual(main)


@pytest.mark.parametrize("bad", [{"outer_optimizer": "lion"}, {"outer_optimizer": "adam"}, {"contributors": ()}])
def test_a_record_that_no_peer_could_commit_rolls_nothing_forward(bad: dict[str, object]) -> None:
    """A donor may put anything into its head: the chunks then come anew, and nothing breaks."""

    async def main() -> None:
        async with donors_and_joiner("b") as (_, donors, joiner, links):
            donor, state = donors["b"], AnchorState(BLOCKS, 1)
            download = download_into(state, joiner)
            await download.run(donor.head, links)
            donor.chunks.clear()
            donor.resolve_round()
            assert donor.head.record is not None
            record = msgspec.structs.replace(donor.head.record, **bad)
            donor.head = msgspec.structs.replace(donor.head, commit=signed_by("a", record, RUN.digest))
            await download.run(donor.head, links)
            check_equal(state, donor.state)
            assert len(donor.chunks) == CHUNKS

    run_virtual(main)


def test_a_slow_joiner_comes_to_the_end_however_often_rounds_are() -> None:
    """The state takes 12 s over this link, and every 5 s there is another."""

    async def main() -> None:
        slow = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=500e3)
        async with donors_and_joiner("b", network=slow) as (_, donors, joiner, links):
            donor, state = donors["b"], AnchorState(BLOCKS, 1)

            async def resolve_rounds() -> None:
                while True:
                    await trio.sleep(5)
                    donor.resolve_round()

            download = download_into(state, joiner)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(resolve_rounds)
                with trio.fail_after(60):
                    while download.done_chunks < CHUNKS:
                        with contextlib.suppress(PeerLostError):
                            await download.run(await head_from(joiner, links[0]), links)
                        await trio.sleep(0.1)
                nursery.cancel_scope.cancel()
            check_equal(state, donor.state)
            assert donor.head.round >= 9
            assert len(donor.chunks) < 3 * CHUNKS

    run_virtual(main)


@pytest.mark.parametrize("why", ["fresh", "busy"])
def test_a_fresh_or_busy_peer_gives_nothing(why: str) -> None:
    async def main() -> None:
        async with donors_and_joiner("a", buffers=b"buffers") as (_, donors, joiner, links):
            if why == "fresh":
                donors["a"].head = Head("", "", -1, "", "", (), 0, 0, None)
            else:
                donors["a"].busy = True
            with pytest.raises(PeerLostError, match="cannot send its state now"):
                await head_from(joiner, links[0])
            for what in ("manifest", "chunk"):
                answer, payload = await joiner.links.request(links[0], what, timeout_s=1)
                assert (answer.found, payload) == (False, b"")
            if why == "fresh":
                with pytest.raises(PeerLostError, match="sends no buffers"):
                    await ask_buffers(joiner.links, links[0], MOST_BYTES)

    run_virtual(main)


def test_a_state_that_begins_to_change_while_a_chunk_is_read_is_not_sent() -> None:
    async def main() -> None:
        async with donors_and_joiner("a") as (_, donors, joiner, links):
            donor = donors["a"]

            async def slow(work, *args):
                await trio.sleep(1)
                donor.busy = True
                return work(*args)

            donor.server._compute = slow
            answer, payload = await joiner.links.request(links[0], "chunk", donor.head.state_hash, timeout_s=3)
            assert (answer.found, payload) == (False, b"")

    run_virtual(main)


@pytest.mark.parametrize(
    ("what", "index"),
    [("chunk", -1), ("chunk", CHUNKS), ("chunk", 2**62), ("buffers", -1), ("buffers", 2**62), ("weights", 0), ("", 0)],
)
def test_what_there_is_not_is_not_found(what: str, index: int) -> None:
    async def main() -> None:
        async with donors_and_joiner("a", buffers=b"x") as (_, donors, joiner, links):
            subject = donors["a"].head.state_hash
            answer, payload = await joiner.links.request(links[0], what, subject, index, timeout_s=1)
            assert (answer.found, payload) == (False, b"")

    run_virtual(main)


@pytest.mark.parametrize(
    "head",
    [
        b"", b"\x90", pack(head_of(ONE_BLOCK)), pack(sign(head_of(ONE_BLOCK)))[:-1],
        pack(sign(head_of(ONE_BLOCK, "abc-def"))), pack(sign(head_of(ONE_BLOCK), by="")),
        pack(sign(head_of(ONE_BLOCK), by="b")), pack(sign(head_of(ONE_BLOCK), genesis=genesis_of("b", RUN.digest))),
        pack(sign(head_of(ONE_BLOCK), genesis=genesis_of("a", "another run"))),
        pack(sign(head_of(ONE_BLOCK), run_step=141)), pack(sign(head_of(ONE_BLOCK), state_hash="0" * 64)),
    ],
)  # fmt: skip
def test_a_head_that_is_none_or_not_signed_is_refused(head: bytes) -> None:
    async def main() -> None:
        async with donors_and_joiner("a") as (_, donors, joiner, links):
            donors["a"].instead["head"] = head
            with pytest.raises(WireError):
                await head_from(joiner, links[0])

    run_virtual(main)


@pytest.mark.parametrize("size", [0, 1, BUFFER_PIECE_BYTES, 2 * BUFFER_PIECE_BYTES, 2 * BUFFER_PIECE_BYTES + 7])
def test_buffers_come_whole(size: int) -> None:
    async def main() -> None:
        buffers = np.random.default_rng(0).bytes(size)
        async with donors_and_joiner("a", buffers=buffers) as (_, donors, joiner, links):
            assert await ask_buffers(joiner.links, links[0], MOST_BYTES) == buffers
            donors["a"].busy = True  # with a round, which changes no buffers
            assert await ask_buffers(joiner.links, links[0], MOST_BYTES) == buffers

    run_virtual(main)


def test_buffers_are_packed_once_for_a_state_and_their_pieces_belong_together() -> None:
    """Training goes on while they are sent, and a round may come between two pieces."""

    async def main() -> None:
        slow = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=2e6)
        size = 3 * BUFFER_PIECE_BYTES + 5
        async with donors_and_joiner("a", buffers=bytes(size), network=slow) as (_, donors, joiner, links):
            donor = donors["a"]
            got: list[bytes] = []

            async def ask() -> None:
                got.append(await ask_buffers(joiner.links, links[0], MOST_BYTES))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(ask)
                await until(lambda: donor.asked["buffers"] >= 3)
                donor.resolve_round()
            assert donor.asked["buffers"] == 8
            assert got == [b"\1" * size] * 2
            assert donor.packed == 1
            old = donor.server._packed_of
            assert await ask_buffers(joiner.links, links[0], MOST_BYTES) == b"\2" * size
            assert donor.packed == 2
            answer, _ = await joiner.links.request(links[0], "buffers", old, 1, timeout_s=1)
            assert not answer.found

    run_virtual(main)


def test_a_donor_cannot_send_buffers_without_end() -> None:
    async def main() -> None:
        async with donors_and_joiner("a") as (_, donors, joiner, links):
            donors["a"].instead["buffers"] = bytes(BUFFER_PIECE_BYTES)
            with pytest.raises(WireError, match="more than 3145728 bytes of buffers"):
                await ask_buffers(joiner.links, links[0], 3 * BUFFER_PIECE_BYTES)
            assert donors["a"].asked["buffers"] == 4

    run_virtual(main)


def test_buffers_are_a_voters_not_those_of_who_gave_the_head() -> None:
    """Anybody can repeat a head that a quorum has signed, and nothing proves buffers."""

    async def main() -> None:
        async with donors_and_joiner("x", "a", "b", buffers=b"true") as (_, donors, joiner, links):
            donors["x"].instead["buffers"] = b"made up"
            loaded: list[bytes] = []
            joining = Joining.__new__(Joining)
            joining._buffers = ModelBuffers(bytes, loaded.append, lambda: MOST_BYTES)
            joining._context = SimpleNamespace(links=joiner.links)  # type: ignore[assignment]
            download, head = download_into(some_state(), joiner), donors["a"].head
            await joining._load_buffers(download, links, head)
            assert loaded == [b"true"]
            donors["a"].instead["buffers"] = bytes(2 * BUFFER_PIECE_BYTES)
            with pytest.raises(WireError):
                await joining._load_buffers(download, links[1:], head)
            # A voter that failed is not asked again.
            await joining._load_buffers(download, links[1:], head)
            assert donors["b"].asked["buffers"] == 1
            joining._buffers = ModelBuffers(bytes, loaded.append, int)
            await joining._load_buffers(download, links, head)
            assert loaded == [b"true", b"true"]

    run_virtual(main)


def test_who_sends_buffers_slower_than_the_slowest_line_is_given_up() -> None:
    async def main() -> None:
        slow = MemoryNetwork(latency_s=0.01, bandwidth_bytes_s=BUFFER_PIECE_BYTES / 20)
        noise = np.random.default_rng(0).bytes(MOST_BYTES - 1)
        async with donors_and_joiner("a", buffers=noise, network=slow) as (_, donors, joiner, links):
            with pytest.raises(PeerLostError, match="takes too long"):
                await ask_buffers(joiner.links, links[0], MOST_BYTES)
            assert donors["a"].asked["buffers"] < 8

    run_virtual(main)


# --- joining a swarm ---------------------------------------------------------------------------------------------


async def trained(s: Swarm, names: str = "abc", rounds: int = 2) -> None:
    s.start(names[0], founder=True)
    for name in names[1:]:
        s.start(name)
    await s.until(lambda: all(len(p.rounds("committed")) >= rounds for p in s.peers.values()))


def same_round(s: Swarm, after_s: float) -> bool:
    """All have committed one round together, each as a contributor."""
    lasts = [[r for r in p.rounds("committed") if r["t"] > after_s and not r["late"]] for p in s.peers.values()]
    if not all(lasts):
        return False
    first = lasts[0][-1]
    return first["group_size"] == len(s.peers) and all(
        (r[-1]["round"], r[-1]["anchor_hash"]) == (first["round"], first["anchor_hash"]) for r in lasts
    )


def adopted(s: Swarm, name: str) -> list[dict[str, object]]:
    return [e for e in s.peers[name].events if e["event"] == "adopt"]


def test_a_late_joiner_stands_with_the_others_one_round_later() -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s:
            await trained(s)
            joined = trio.current_time()
            d = s.start("d")
            await s.until(lambda: d.exchange.steps == 1)
            # Weights, place in the run and hash are a donor's; it has not trained yet.
            event = adopted(s, "d")[0]
            donor = next(r for p in s.peers.values() for r in p.rounds() if r["round"] == event["round"])
            assert event["anchor_hash"] == donor["anchor_hash"]
            assert event["state_hash"] == donor["state_hash"]
            assert event["run_step"] == pytest.approx(20 * (donor["round"] + 1), abs=2)
            assert d.exchange.run_step >= event["run_step"]
            drift = (d.flat() - torch.from_numpy(d.node.state.anchor)).square().mean().sqrt()
            assert drift < 0.02 < d.flat().square().mean().sqrt()
            await s.until(lambda: same_round(s, joined), within_s=10)
            assert d.rounds("committed")[0]["round"] <= event["round"] + 2

    run_virtual(main)


def test_partners_that_announce_the_same_round_are_all_followed_again_at_once() -> None:
    """Of rounds, a peer hears heartbeats only: one partner brings the round, so the others no longer need to."""

    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s:
            await trained(s, "abcd")
            node = s.peers["a"].node
            take, behind = node.on_message, node.driver.head.round

            async def take_beats(link: Link, message: Message, payload: bytes) -> None:
                if isinstance(message, Beat | Request):
                    await take(link, message, payload)

            node.on_message = take_beats  # type: ignore[method-assign]
            for _ in range(300):
                await trio.sleep(0.1)
                assert not node.driver._futile.backed_off(trio.current_time())
            assert node.driver.head.round >= behind + 3

    run_virtual(main)


@pytest.mark.long
def test_false_claims_to_be_ahead_are_followed_less_and_less_and_delay_no_other_partner() -> None:
    """Each claim costs 10 s, in which rounds of our own land."""

    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s:
            await trained(s)
            node, asked = s.peers["a"].node, list[tuple[str, float]]()

            async def follow(link: Link) -> bool:
                asked.append((link.peer_id, trio.current_time()))
                await trio.sleep(10)
                raise PeerLostError("no answer")

            def lie(name: str) -> None:
                liar = s.peers[name].node
                make = liar.make_beat
                liar.make_beat = lambda *times: msgspec.structs.replace(make(*times), round=10**6)  # type: ignore[method-assign]

            node.state_sync._follow_record = follow  # type: ignore[method-assign]
            lie("b")
            began = node.driver.head.round
            await trio.sleep(120)
            assert node.driver.head.round > began + 5
            times = [at_s for _, at_s in asked]
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert 3 <= len(times) <= 6
            assert gaps == sorted(gaps)
            lie("c")
            await trio.sleep(12)
            assert "c" in dict(asked)

    run_virtual(main)


@pytest.mark.parametrize("names", ["de", "defghijk"], ids=["two", "eight"])
def test_several_join_at_once_and_every_donor_helps(names: str) -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=0.01, seed=2) as s:
            await trained(s)
            donors = list(s.peers.values())
            before = [p.node.links.counters.sent[Traffic.STATE] for p in donors]
            joined = trio.current_time()
            for name in names:
                s.start(name)
            await s.until_joined(within_s=20)
            given = [p.node.links.counters.sent[Traffic.STATE] - b for p, b in zip(donors, before, strict=True)]
            state_bytes = 2 * s.peers["a"].node.state.anchor.nbytes
            assert sum(given) > 0.8 * len(names) * state_bytes
            assert min(given) > 0.1 * sum(given)
            await s.until(lambda: same_round(s, joined), within_s=20)

    run_virtual(main)


@pytest.mark.parametrize("delay_s", [0.0, 0.4, 0.8, 1.2, 1.6])
def test_joining_works_at_any_moment_of_a_round(delay_s: float) -> None:
    """A round takes most of an interval here, so that most of these are in its midst."""

    async def main() -> None:
        run = dataclasses.replace(RUN, round_codec="none")
        async with swarm(run, latency_s=0.02, bandwidth_bytes_s=2e6) as s:
            await trained(s)
            await trio.sleep(delay_s)
            joined = trio.current_time()
            d = s.start("d")
            await s.until(lambda: same_round(s, joined), within_s=30)
            assert d.error is None

    run_virtual(main)


def test_joining_in_the_midst_of_a_contribution() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, round_codec="none")
        async with swarm(run, latency_s=0.02, bandwidth_bytes_s=4e6) as s:
            await trained(s)
            started = False

            def fault(source: str, target: str, packet: bytes) -> PacketFault:
                nonlocal started
                if packet[1] == KIND_OF[Contribution] and not started:
                    started = True
                    s.start("d")
                return PacketFault.NONE

            s.network.fault = fault
            await s.until(lambda: started)
            joined = trio.current_time()
            await s.until(lambda: same_round(s, joined), within_s=30)

    run_virtual(main)


def test_the_status_of_a_download_changes_twenty_times() -> None:
    downloads = [SimpleNamespace(_download=SimpleNamespace(progress=done / 1000)) for done in range(1001)]
    shown = dict.fromkeys(Joining.status.fget(joining) for joining in downloads)  # type: ignore[attr-defined]
    assert list(shown) == [f"downloading state {percent} %" for percent in range(0, 101, 5)]


def test_a_donor_that_dies_while_it_gives_does_not_stop_the_joiner() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=50)
        async with swarm(run, latency_s=0.02, bandwidth_bytes_s=300e3) as s:
            await trained(s, "abc", rounds=1)
            joined = trio.current_time()
            e = s.start("d")
            await s.until(lambda: "downloading" in e.node.status and " 0 %" not in e.node.status)
            donor = max(s.peers.values(), key=lambda p: p.node.links.counters.sent[Traffic.STATE])
            s.kill(donor.peer_id)
            await s.until(e.node.ready.is_set, within_s=30)
            await s.until(lambda: same_round(s, joined), within_s=60)

    run_virtual(main)


def test_a_donor_whose_memory_is_damaged_is_refused_and_another_serves() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=50)
        async with swarm(run, latency_s=0.01) as s:
            await trained(s, "abc", rounds=1)
            bad = s.peers["b"].node.state
            bad.anchor[17] += 1  # after it was hashed
            joined = trio.current_time()
            d = s.start("d")
            await s.until(d.node.ready.is_set, within_s=30)
            assert trio.current_time() - joined < 4
            assert np.array_equal(d.node.state.anchor, s.peers["a"].node.state.anchor)
            assert d.node.driver.head.anchor_hash == s.peers["a"].node.driver.head.anchor_hash

    run_virtual(main)


def test_fresh_peers_do_not_donate_to_each_other() -> None:
    """Four start at once without initial peers: one founds, and the others adopt its state."""

    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s:
            for name in "cbda":
                s.start(name)
            await s.until_joined(within_s=20)
            reasons = {name: [e["reason"] for e in adopted(s, name)] for name in "abcd"}
            assert reasons == {
                "a": ["founded the run"],
                **{name: ["adopted the swarm's state"] for name in "bcd"},
            }
            lineages = {p.node.driver.head.lineage for p in s.peers.values()}
            assert len(lineages) == 1
            await s.until(lambda: same_round(s, 0), within_s=20)

    run_virtual(main)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_a_run_is_not_founded_with_weights_that_are_not_finite(value: float) -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            a = s.start("a", founder=True, restarts=True)
            a.tensors[1][3] = value
            assert a.runner is not None
            await s.until(lambda: a.runner.failure is not None)
            assert isinstance(a.runner.failure, ConfigError)
            assert "bias: 1 of its values are NaN, infinite or beyond 1e+12" in str(a.runner.failure)
            b = s.start("b")
            await s.until(b.node.ready.is_set)
            assert [e["reason"] for e in adopted(s, "b")] == ["founded the run"]

    run_virtual(main)


def test_an_observer_cannot_download() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            await trained(s, "ab")
            async with trio.open_nursery() as nursery:
                observer = await start_endpoint(
                    s.network,
                    nursery,
                    msgspec.structs.replace(hello_of("g", digest="", role="observer"), run_id=RUN.run_id),
                )
                link = await observer.links.connect("a", [])
                for what in ("head", "manifest", "chunk", "buffers", "part", "record"):
                    answer, payload = await observer.links.request(link, what, timeout_s=2)
                    assert (answer.found, payload) == (False, b"")
                nursery.cancel_scope.cancel()

    run_virtual(main)


def test_three_join_at_once_through_one_slow_uplink_while_its_peer_goes_on_from_round_to_round() -> None:
    """The three downloads take 33 s together, and every 10 s the state is another: what was under way still counts."""

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=100)) as s:
            s.start("a", founder=True)
            await s.until(lambda: bool(s.peers["a"].rounds()))
            s.network.bandwidth_bytes_s = 100e3
            for name in "bcd":
                s.start(name)
            await s.until_joined(within_s=200)

    run_virtual(main)


@pytest.mark.parametrize(
    "says",
    [
        pytest.param("nothing", marks=pytest.mark.long),
        pytest.param("nonsense", marks=pytest.mark.long),
        "a head and no more",
    ],
)
def test_peers_that_only_claim_to_have_a_state_keep_no_peer_from_joining(says: str) -> None:
    """Their beats say that they are far ahead of all others."""

    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            s.start("a", founder=True)
            await trio.sleep(3)
            for name in ("x", "y"):
                liar = await start_endpoint(s.network, nursery, hello_of(name, digest=RUN.digest))
                far = (f"0-{name}", f"9-{name}", 2**61, 2**62, 2**62, "training", 1e6, (), 3)
                liar.make_beat = lambda *times, far=far: Beat(*times, *far)  # type: ignore[method-assign]
                genesis = genesis_of(name, RUN.digest)
                voters = ((name, f"{name}.1"),)
                head = Head(lineage_of(genesis), *far[1:3], "0" * 64, "0" * 64, voters, 7, 2**61, None)
                signed = pack(signed_head(head, genesis, RUN.digest, name))

                async def answer(link: Link, request: Request, signed: bytes = signed) -> None:
                    if says == "nothing" or (says == "a head and no more" and request.what != "head"):
                        return
                    payload = signed if says != "nonsense" else b"nonsense"
                    await link.send_bulk(Answer(request.request, True, request.what), payload, Traffic.STATE)

                liar.on_request = answer
                record = encode_record([f"/memory/{name}"], "trainer")
                await s.network.directory(name).announce(member_key("test", bucket_of(name)), record, 3600.0)
            s.network.partition(["a"], ["c", "x", "y"])
            s.start("c")
            await s.until(lambda: {"x", "y"} <= set(s.peers["c"].node.links.live))
            await trio.sleep(1)
            s.network.partition()
            await s.until(lambda: s.peers["c"].node.ready.is_set(), within_s=400)
            assert s.peers["c"].node.driver.head.genesis == s.peers["a"].node.driver.head.genesis
            await trio.sleep(30)
            assert [peer.error for peer in s.peers.values()] == [None, None]
            assert s.peers["c"].rounds("committed")
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("latency_s", [0.8, 1.2, 1.6, 2.0])
def test_a_joiner_founds_no_run_while_a_linked_peer_has_told_nothing(latency_s: float) -> None:
    """Its first heartbeat may be late."""

    async def main() -> None:
        async with swarm() as s:
            s.start("b", founder=True)
            await s.until(lambda: len(s.peers["b"].rounds("solo")) > 2)
            s.network.latency = lambda source, target: latency_s
            joiner = s.start("a")
            await s.until(joiner.node.ready.is_set, within_s=60)
            assert not joiner.node.state_sync.joining.founded

    run_virtual(main)


@pytest.mark.parametrize("restored", [None, object()])
def test_nobody_begins_a_history_before_the_first_heartbeat_of_a_linked_peer(restored: Any) -> None:
    async def main() -> None:
        link = SimpleNamespace(peer_id="b", beat=None)
        joining: Any = Joining.__new__(Joining)
        joining._membership = SimpleNamespace(looked_up_again=trio.Event(), undecided=False)
        joining._membership.looked_up_again.set()
        joining._context = SimpleNamespace(peer_id="a", links=SimpleNamespace(trainers=lambda: [link]))
        joining._restored, joining._checkpoint, joining._unheard_s = restored, None, 0.0
        now = trio.current_time()
        assert not joining._should_found(now - 10.0)
        link.beat = SimpleNamespace(genesis="", lineage="")
        assert not joining._should_found(now - 1.0)
        # Peers with checkpoints take turns, which begin when all have been heard.
        assert joining._should_found(now - 10.1) == (restored is None)
        assert joining._should_found(now - 12.1)
        link.beat = None
        assert not joining._should_found(now - 119.9)
        assert joining._should_found(now - 122.1)  # it may be a liar

    run_virtual(main)
