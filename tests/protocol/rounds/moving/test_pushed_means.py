"""Means that reducers push before any record names them: what is taken of them, and what is requested instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from blake3 import blake3

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of
from p2ptrain.protocol.rounds.deciding.grid import mean_codec
from p2ptrain.protocol.rounds.moving.part_store import PartStore, part_limit_s
from p2ptrain.protocol.rounds.moving.pushed_means import PIECE_BYTES, BoundedBuffer, MeanPush, PushedMeans
from p2ptrain.protocol.wire.messages import Attempt, Mean, Part, Roster, RosterPart
from tests.protocol.rounds.moving.test_part_store import (
    BLOCKS,
    MODEL_BYTES,
    RUN,
    Holder,
    blob,
    inline,
    record_of,
    store_of,
)
from tests.protocol.swarm import run_virtual

ATTEMPT = Attempt(1, "x", "x.1")
ROSTER = Roster("0-g", 1, ATTEMPT, ("x", "y"), (RosterPart(0, BLOCKS, "x", ()),), ())


def push(parts: PartStore, data: bytes, start: int = 0, *, sender: str = "x", attempt: Attempt = ATTEMPT) -> None:
    parts._pushed.receive(sender, Mean("0-g", 1, attempt, blake3(blob(0)).hexdigest(), start), data)


def awaiting(holder: Holder) -> PartStore:
    parts = store_of(holder)
    parts._pushed.begin_attempt(ROSTER)
    return parts


@pytest.mark.parametrize("at_once", [False, True])
def test_a_mean_that_is_pushed_is_not_requested(at_once: bool) -> None:
    """Also if most of it comes after the record that names it."""
    data, holder = blob(0), Holder(blob(0))

    async def main() -> None:
        parts = awaiting(holder)

        async def go_on() -> None:
            for start in range(0 if not at_once else len(data), len(data), 10_000):
                await trio.sleep(5)
                push(parts, data[start : start + 10_000], start)

        if at_once:
            push(parts, data)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            await parts.fetch(record_of(data), [])
        assert not holder.asked
        assert parts.get(blake3(data).hexdigest()) == data
        assert parts.giver(blake3(data).hexdigest()) == "x"

    run_virtual(main)


@pytest.mark.parametrize(
    "pushed",
    [b"", blob(0)[:100], blob(1), blob(0)[:-1] + b"!"],
    ids=["nothing", "its beginning only", "another one", "a false last byte"],
)
def test_a_mean_that_is_not_pushed_whole_is_requested(pushed: bytes) -> None:
    holder = Holder(blob(0))

    async def main() -> None:
        parts = awaiting(holder)
        if pushed:
            push(parts, pushed)
        await parts.fetch(record_of(blob(0)), [])
        assert holder.asked
        assert parts.get(blake3(blob(0)).hexdigest()) == blob(0)

    run_virtual(main)


@pytest.mark.parametrize("is_pushed", [True, False])
def test_a_part_that_comes_forever_is_given_up_in_time_and_asked_of_another(is_pushed: bool) -> None:
    """A byte now and then, or a piece: each comes before its time-out."""
    data = blob(0) * 64

    class Dribbling(Holder):
        """Links to "x", which gives a piece in 19 s, and to "y", which gives it at once."""

        def get(self, peer_id: str) -> Holder | None:
            return {"x": self, "y": other}.get(peer_id)

        async def request(self, link: Any, *args: Any, timeout_s: float) -> Any:
            if link is self:
                await trio.sleep(19)
            return await Holder.request(link, link, *args, timeout_s=timeout_s)

    holder, other = Dribbling(data), Holder(data)
    links: Any = holder

    async def main() -> None:
        averaging = averaging_of(RUN)
        pushed = PushedMeans(links, averaging, mean_bytes=lambda num_blocks: len(data))
        parts = PartStore(links, inline, averaging, pushed)
        pushed.begin_attempt(ROSTER)

        async def dribble() -> None:
            for start in range(1000):
                push(parts, data[start : start + 1], start)
                await trio.sleep(15)

        record = record_of(data)
        record = msgspec.structs.replace(record, parts=(Part(0, 64 * BLOCKS, record.parts[0].digest, "x"),))
        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            if is_pushed:
                nursery.start_soon(dribble)
            await parts.fetch(record, ["y"])
            nursery.cancel_scope.cancel()
        assert parts.giver(record.parts[0].digest) == "y"
        assert trio.current_time() - started_s <= part_limit_s(len(data)) + 1

    run_virtual(main)


def test_a_giver_that_all_ask_may_take_longer() -> None:
    data = blob(0) * 64

    class Slow(Holder):
        """Gives a piece in 19 s, as all others ask it too."""

        def get(self, peer_id: str) -> Holder | None:
            return self if peer_id == "x" else None

        async def request(self, link: Any, *args: Any, timeout_s: float) -> Any:
            await trio.sleep(19)
            return await Holder.request(link, link, *args, timeout_s=timeout_s)

    links: Any = Slow(data)

    async def main() -> None:
        averaging = averaging_of(RUN)
        parts = PartStore(links, inline, averaging, PushedMeans(links, averaging, mean_bytes=lambda blocks: len(data)))
        record = record_of(data)
        record = msgspec.structs.replace(record, parts=(Part(0, 64 * BLOCKS, record.parts[0].digest, "x"),))
        await parts.fetch(record, [f"y{number}" for number in range(10)])
        assert part_limit_s(len(data)) < trio.current_time() < part_limit_s(10 * len(data))

    run_virtual(main)


def push_expected(parts: PartStore, data: bytes, start: int = 0) -> None:
    parts._pushed.receive("x", Mean("0-g", 1, ATTEMPT, "", start), data)


def test_the_expected_mean_is_taken_if_the_record_names_it() -> None:
    data, holder = blob(0), Holder()

    async def main() -> None:
        parts = awaiting(holder)
        push_expected(parts, data[:100])
        push_expected(parts, data[100:], 100)
        await parts.fetch(record_of(data), [])
        assert parts.get(blake3(data).hexdigest()) == data
        assert not holder.asked

    run_virtual(main)


@pytest.mark.parametrize("expected", [blob(1), blob(1)[:100], blob(1)[:-1]], ids=["whole", "its beginning", "shorter"])
def test_the_mean_that_is_pushed_after_the_expected_one_is_taken(expected: bytes) -> None:
    """Where others contribute than were expected. It may come before the record, while it is awaited, or both."""
    data = blob(0)

    async def main() -> None:
        for before in (0, 100, len(data)):
            parts, holder = awaiting(Holder()), Holder()
            push_expected(parts, expected)
            if before:
                push(parts, data[:before])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(parts.fetch, record_of(data), [])
                await trio.sleep(5)
                if before < len(data):
                    push(parts, data[before:], before)
            assert parts.get(blake3(data).hexdigest()) == data
            assert not holder.asked
            # What was still on its way of the expected one.
            push_expected(parts, b"more", len(expected))

    run_virtual(main)


class Recorder:
    """Stands in for a link: keeps what is sent, one frame a second."""

    def __init__(self) -> None:
        self.sent: list[tuple[Mean, bytes]] = []

    async def send_bulk(self, message: Any, payload: bytes, traffic: Any, *, compress: bool) -> None:
        await trio.sleep(1)
        self.sent.append((message, payload))


def test_a_mean_is_pushed_while_it_grows_until_it_is_given_up() -> None:
    data = bytes(3 * PIECE_BYTES + 7)

    async def main() -> None:
        link = Recorder()
        links: Any = SimpleNamespace(get=lambda peer_id: link if peer_id == "y" else None)
        pushed = PushedMeans(links, averaging_of(RUN), mean_codec(RUN).size_bytes)
        pushed.begin_attempt(ROSTER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pushed.push_forever)
            mean = MeanPush(ROSTER, BoundedBuffer(len(data)))
            pushed.push(mean)
            mean.extend(data[: PIECE_BYTES + 1])
            await trio.sleep(10)
            assert [(m.digest, m.start, len(piece)) for m, piece in link.sent] == [("", 0, PIECE_BYTES)]
            mean.extend(data[PIECE_BYTES + 1 :])
            mean.end()
            await trio.sleep(10)
            assert b"".join(piece for _, piece in link.sent) == data

            link.sent.clear()
            mean = MeanPush(ROSTER, BoundedBuffer(len(data)))
            pushed.push(mean)
            mean.extend(data)
            await trio.sleep(1.5)
            mean.give_up()
            pushed.push(MeanPush(ROSTER, BoundedBuffer.of(b"other"), "0" * 64))
            await trio.sleep(10)
            assert [(m.digest, m.start) for m, _ in link.sent] == [("", 0), ("", PIECE_BYTES), ("0" * 64, 0)]
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_what_comes_behind_a_pushed_mean_does_not_change_it() -> None:
    async def main() -> None:
        parts = awaiting(Holder())
        push(parts, blob(0))
        await parts.fetch(record_of(blob(0)), [])
        push(parts, b"more", MODEL_BYTES)
        assert parts.get(blake3(blob(0)).hexdigest()) == blob(0)

    run_virtual(main)


def test_a_mean_with_a_gap_is_requested() -> None:
    """Its beginning may have come before the roster: nobody has broken the protocol."""

    async def main() -> None:
        for start, awaited in ((4, False), (0, True), (8, True)):
            holder = Holder(blob(0))
            parts = awaiting(holder)
            async with trio.open_nursery() as nursery:
                if awaited:
                    push(parts, blob(0)[:4])
                    nursery.start_soon(parts.fetch, record_of(blob(0)), [])
                    await trio.sleep(1)
                push(parts, blob(0)[start : start + 4], start)
                if not awaited:
                    nursery.start_soon(parts.fetch, record_of(blob(0)), [])
                await trio.sleep(1)  # not only when nothing has come for a while
                assert parts.get(blake3(blob(0)).hexdigest()) == blob(0)
            assert holder.asked

    run_virtual(main)


def test_more_of_a_mean_than_a_part_has_breaks_the_protocol() -> None:
    parts = awaiting(Holder())
    push(parts, b"0123")
    with pytest.raises(WireError, match=f"more than {MODEL_BYTES} bytes"):
        push(parts, bytes(MODEL_BYTES), 4)


def test_pieces_of_other_attempts_and_of_members_that_reduce_nothing_are_ignored() -> None:
    parts = awaiting(Holder())
    push(parts, blob(0), sender="y")
    push(parts, blob(0), attempt=Attempt(2, "x", "x.1"))
    assert not parts._pushed._pushed["x"].mean.data
    assert set(parts._pushed._pushed) == {"x"}


def test_bytes_beyond_the_bound_are_refused_and_those_before_stay() -> None:
    buffer = BoundedBuffer(5)
    buffer.extend(b"abc")
    with pytest.raises(WireError, match="more than 5 bytes"):
        buffer.extend(b"def")
    buffer.extend(b"de")
    assert (bytes(buffer.data), buffer.size_bytes) == (b"abcde", 5)


def test_bytes_that_were_read_do_not_change() -> None:
    buffer = BoundedBuffer(5)
    buffer.extend(b"abc")
    read = buffer.data
    buffer.extend(b"de")
    assert bytes(read) == b"abc"


@pytest.mark.parametrize("full", [BoundedBuffer.of(b"abc"), BoundedBuffer(3)])
def test_an_emptied_buffer_keeps_the_bound(full: BoundedBuffer) -> None:
    emptied = full.emptied()
    assert bytes(emptied.data) == b""
    emptied.extend(b"abc")
    with pytest.raises(WireError, match="more than 3 bytes"):
        emptied.extend(b"d")
