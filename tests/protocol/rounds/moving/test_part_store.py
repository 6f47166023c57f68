"""What others propose takes a bounded number of encoded models, whatever becomes of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from blake3 import blake3

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.nursery import fetch_pipelined
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of
from p2ptrain.protocol.rounds.deciding.grid import mean_codec
from p2ptrain.protocol.rounds.deciding.record import check_record
from p2ptrain.protocol.rounds.moving.part_store import PARTS_AT_ONCE, WANTED_RECORDS, PartStore, part_limit_s
from p2ptrain.protocol.rounds.moving.pushed_means import (
    PIECE_BYTES,
    PIECE_TIMEOUT_S,
    BoundedBuffer,
    MeanPush,
    PushedMeans,
)
from p2ptrain.protocol.wire.messages import Answer, Attempt, Contributor, Mean, Part, Record, Roster, RosterPart
from p2ptrain.settings.config import RunConfig
from tests.protocol.swarm import run_virtual

RUN = RunConfig(audit_rate=0.0)
BLOCKS = 1024
MODEL_BYTES = mean_codec(RUN, 1).size_bytes(BLOCKS)


def blob(number: int) -> bytes:
    return number.to_bytes(4, "big") * (MODEL_BYTES // 4) + bytes(MODEL_BYTES % 4)


def record_of(*blobs: bytes, contributors: tuple[str, ...] = ("x",)) -> Record:
    """A record that names these blobs. Whether its parts make a vector does not matter to the store."""
    parts = tuple(Part(0, BLOCKS, blake3(data).hexdigest(), "x") for data in blobs)
    named = tuple(Contributor(name, f"{name}.1", 1.0, b"") for name in contributors)
    return Record("0-g", "0-g", 1, "", named, parts, "nesterov", 0.7, 0.9, 20, 100, (), 0.0, 0.0)


class Holder:
    """Stands in for the links: "x" serves these blobs, or nothing at all."""

    def __init__(self, *blobs: bytes, silent: bool = False) -> None:
        self.blobs = {blake3(data).hexdigest(): data for data in blobs}
        self.silent = silent
        self.asked: set[str] = set()
        self.peer_id = "x"

    def get(self, peer_id: str) -> Holder | None:
        return self if peer_id == "x" else None

    async def request(self, link: Any, what: str, subject: str, index: int, *, timeout_s: float) -> Any:
        self.asked.add(subject)
        if self.silent:
            await trio.sleep(timeout_s)
            raise PeerLostError("no answer")
        piece = self.blobs[subject][index * PIECE_BYTES :][:PIECE_BYTES]
        return Answer(0, True, "part"), piece


async def inline(work: Any, *args: Any) -> Any:
    return work(*args)


def store_of(holder: Holder, spare_bytes: int = 0) -> PartStore:
    links: Any = holder
    averaging = averaging_of(RUN)
    pushed = PushedMeans(links, averaging, mean_codec(RUN, 1).size_bytes)
    return PartStore(links, inline, averaging, pushed, spare_bytes)


def test_of_proposed_records_only_the_last_and_those_accepted_or_committed_are_held() -> None:
    blobs = [blob(number) for number in range(12)]
    records = [record_of(data) for data in blobs]

    async def main() -> None:
        parts = store_of(Holder(*blobs))
        await parts.fetch(records[0], [])
        parts.keep(records[0])
        await parts.fetch(records[1], [])
        parts.accepted = records[1]
        for record in records[2:]:
            await parts.fetch(record, [])
            parts.end_attempt()
        held = [0, 1, *range(12 - WANTED_RECORDS, 12)]
        assert set(parts._parts) == {records[number].parts[0].digest for number in held}

    run_virtual(main)


def test_of_the_last_record_a_trimmed_store_keeps_what_it_holds_for_all_and_what_is_wanted() -> None:
    blobs = [blob(number) for number in range(4)]
    last, wanted = record_of(*blobs[:3]), record_of(blobs[2], blobs[3])
    own, *others = last.parts
    last = msgspec.structs.replace(last, parts=(msgspec.structs.replace(own, holder="me"), *others))

    async def main() -> None:
        parts = store_of(Holder(*blobs))
        await parts.fetch(last, ["x"])
        parts.keep(last)
        await parts.fetch(wanted, [])
        parts.trim(["me"], wanted)
        assert len(parts._parts) == 4
        parts.trim(["me"], last)
        assert set(parts._parts) == {own.digest, *(part.digest for part in wanted.parts)}
        parts.keep(wanted)
        parts.trim(["me"])
        assert not parts._parts

    run_virtual(main)


def test_what_was_reduced_in_attempts_without_an_outcome_is_bounded() -> None:
    parts, names = store_of(Holder(), 2 * MODEL_BYTES), []
    for number in range(8):
        names.append(blake3(blob(number)).hexdigest())
        parts.add(names[-1], blob(number))
        assert names[-1] in parts._parts
        parts.end_attempt()
    assert list(parts._parts) == names[-2:]


def test_parts_are_asked_for_a_few_at_a_time() -> None:
    blobs = [blob(number) for number in range(60)]
    holder = Holder(*blobs, silent=True)

    async def main() -> None:
        with trio.move_on_after(1):
            await store_of(holder).fetch(record_of(*blobs), [])
        assert len(holder.asked) == PARTS_AT_ONCE
        holder.silent = False
        parts = store_of(holder)
        await parts.fetch(record_of(*blobs), [])
        assert len(parts._parts) == 60

    run_virtual(main)


def test_a_late_peer_asks_each_partner_that_has_the_parts_for_some_of_them() -> None:
    blobs = [blob(number) for number in range(7)]
    having = {name: Holder(*blobs) for name in "abc"}
    for name, holder in having.items():
        holder.peer_id = name

    class Partners(Holder):
        """Links to those that have the parts, and to one that has none; not to their reducer."""

        def get(self, peer_id: str) -> Holder | None:
            return having.get(peer_id) or (self if peer_id == "z" else None)

        async def request(self, link: Any, *args: Any, timeout_s: float) -> Any:
            assert link is not self
            return await link.request(link, *args, timeout_s=timeout_s)

    async def main() -> None:
        parts = store_of(Partners())
        await parts.fetch(record_of(*blobs), ["z", "a", "b", "c"], ["a", "b", "c"])
        assert len(parts._parts) == 7
        assert [len(holder.asked) for holder in having.values()] == [3, 2, 2]
        # A giver that does not answer is waited for once, not for each part.
        having["a"].silent = True
        having["a"].asked.clear()
        more = [blob(number) for number in range(7, 67)]
        for holder in having.values():
            holder.blobs.update(Holder(*more).blobs)
        began = trio.current_time()
        await parts.fetch(record_of(*more), ["z", "a", "b", "c"], ["a", "b", "c"])
        assert trio.current_time() - began < 1.5 * PIECE_TIMEOUT_S
        assert len(having["a"].asked) == PARTS_AT_ONCE
        assert len(parts._parts) == 67

    run_virtual(main)


def test_a_peer_that_is_lost_while_the_fetch_is_cancelled_ends_nothing_else() -> None:
    async def main() -> None:
        async def fetch(index: int) -> None:
            if index == 0:
                scope.cancel()
                raise PeerLostError("gone")
            await trio.sleep_forever()

        with trio.CancelScope() as scope:
            await fetch_pipelined(8, fetch)
        assert scope.cancelled_caught

    run_virtual(main)


@pytest.mark.parametrize("contributors", [("x", "x"), tuple(f"p{i}" for i in range(65))])
def test_a_record_with_contributors_twice_or_too_many_is_refused(contributors: tuple[str, ...]) -> None:
    averaging = averaging_of(dataclasses.replace(RUN, averaging="gather"))
    record = record_of(*[blob(0)] * len(contributors), contributors=contributors)
    parts = tuple(
        msgspec.structs.replace(part, holder=name) for part, name in zip(record.parts, contributors, strict=True)
    )
    with pytest.raises(WireError, match=r"distinct|more than 64"):
        check_record(msgspec.structs.replace(record, parts=parts), RUN, averaging, BLOCKS)


# --- pushed means ------------------------------------------------------------------------------------------------

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
        try:
            await parts.fetch(record_of(blob(0)), [])
        except PeerLostError:
            # Refused by its hash: its holder has lied, and nobody else has it.
            assert len(pushed) == MODEL_BYTES
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
        pushed = PushedMeans(links, averaging_of(RUN), mean_codec(RUN, 1).size_bytes)
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
