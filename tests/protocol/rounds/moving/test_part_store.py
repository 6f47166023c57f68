"""What others propose takes a bounded number of encoded models, whatever becomes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import trio
from blake3 import blake3

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.nursery import fetch_pipelined
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of
from p2ptrain.protocol.rounds.deciding.grid import Grid, mean_codec
from p2ptrain.protocol.rounds.deciding.record import check_record
from p2ptrain.protocol.rounds.moving.part_store import PARTS_AT_ONCE, WANTED_RECORDS, PartStore
from p2ptrain.protocol.rounds.moving.pushed_means import (
    PIECE_BYTES,
    PIECE_TIMEOUT_S,
    PushedMeans,
)
from p2ptrain.protocol.wire.messages import Answer, Contributor, Part, Record
from p2ptrain.settings.config import RunConfig
from tests.protocol.swarm import run_virtual

RUN = RunConfig(audit_rate=0.0)
BLOCKS = 1024
MODEL_BYTES = mean_codec(RUN).size_bytes(BLOCKS)


def blob(number: int) -> bytes:
    return number.to_bytes(4, "big") * (MODEL_BYTES // 4) + bytes(MODEL_BYTES % 4)


def record_of(*blobs: bytes, contributors: tuple[str, ...] = ("x",)) -> Record:
    """A record that names these blobs. Whether its parts make a vector does not matter to the store."""
    parts = tuple(Part(0, BLOCKS, blake3(data).hexdigest(), "x") for data in blobs)
    named = tuple(Contributor(name, f"{name}.1", 1.0, b"") for name in contributors)
    return Record("0-g", "0-g", 1, "", named, parts, "nesterov", 0.7, 0.9, 20, 100, (), 0.0, 0.0, ())


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
    pushed = PushedMeans(links, averaging, mean_codec(RUN).size_bytes)
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
        assert parts.is_last(last)
        assert not parts.is_last(wanted)
        parts.trim(["me"])
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
        check_record(msgspec.structs.replace(record, parts=parts), RUN, averaging, Grid(0, BLOCKS))
