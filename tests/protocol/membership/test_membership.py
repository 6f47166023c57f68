"""Membership: announcing, finding, remembering within bounds, and forgetting."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgpack
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PeerLostError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership import neighbours
from p2ptrain.protocol.membership.directory import (
    ANNOUNCE_EVERY_S,
    BUCKETS,
    RECORD_TTL_S,
    bucket_of,
    decode_record,
    encode_record,
    member_key,
)
from p2ptrain.protocol.membership.membership import (
    EVERYBODY,
    LOOKUP_EVERY_S,
    MAX_KNOWN,
    MAX_KNOWN_JOINING,
    MAX_MADDR_LENGTH,
    MAX_MADDRS,
    ROOM_FOR_NAMED,
    Membership,
    RoundPeers,
)
from p2ptrain.protocol.membership.neighbours import (
    DIALLED_AT_ONCE,
    FIRST_DIAL_S,
    MAX_DIALLED,
    MAX_RETRY_S,
    NAMED_AT_ONCE,
)
from p2ptrain.protocol.wire.messages import Beat, Leave, Message
from p2ptrain.protocol.wire.transport import Directory
from tests.protocol.swarm import run_virtual
from tests.protocol.wiring import hello_of, until


@dataclass
class Member:
    """A peer that does nothing but be there: links and membership wired as a node does it."""

    peer_id: str
    lineage: str = ""
    links: Links = field(init=False)
    membership: Membership = field(init=False)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def on_message(self, link: Link, message: Message, payload: bytes) -> None:
        if isinstance(message, Beat):
            for peer_id, maddrs in message.members:
                self.membership.hint(peer_id, maddrs, teller=link.peer_id)
        if isinstance(message, Leave):
            self.membership.forget(link.peer_id)

    def on_link(self, link: Link) -> None:
        link.make_beat(self.make_beat)
        if link.hello.role == "trainer":
            self.membership.welcome(link.peer_id, link.hello.maddrs, link.hello.role)

    def on_lost(self, link: Link) -> None: ...

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> Beat:
        return Beat(sent_s, echo_s, held_s, "", self.lineage, -1, 0, 0, "", 0.0, self.membership.sample(2), 0)

    @property
    def linked(self) -> set[str]:
        return set(self.links.live)


class Town:
    """Members on one network."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery) -> None:
        self.network = network
        self.members: dict[str, Member] = {}
        self._nursery = nursery

    async def start(
        self, peer_id: str, *, incarnation: str = "1", role: str = "trainer", remembered: Collection[str] = ()
    ) -> Member:
        member = Member(peer_id)
        transport = self.network.transport(peer_id)
        digest = "digest" if role == "trainer" else ""
        hello = hello_of(peer_id, incarnation=incarnation, role=role, digest=digest)
        member.links = Links(transport, lambda: hello, member)
        member.membership = Membership(
            member.links, self.network.directory(peer_id), "test", peer_id, lambda: transport.maddrs,
            random.Random(peer_id), remembered=remembered,
        )  # fmt: skip
        self.members[peer_id] = member

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            with member.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(member.links.run)
                    if role == "trainer":
                        nursery.start_soon(member.membership.run_forever)
                    task_status.started()

        await self._nursery.start(run)
        return member

    def kill(self, peer_id: str) -> None:
        self.network.crash(peer_id)
        self.members.pop(peer_id).scope.cancel()

    def records(self, peer_id: str) -> Mapping[str, bytes]:
        return self.network._records.get(member_key("test", bucket_of(peer_id)), {})  # type: ignore[return-value]


@asynccontextmanager
async def town(**weather: float) -> AsyncIterator[Town]:
    async with trio.open_nursery() as nursery:
        yield Town(MemoryNetwork(**weather), nursery)
        nursery.cancel_scope.cancel()


# --- records -----------------------------------------------------------------------------------------------------


def test_records_survive_the_directory() -> None:
    maddrs = [f"/ip4/1.2.3.{i}/tcp/4001" for i in range(20)]
    assert decode_record(encode_record(maddrs, "trainer")) == (tuple(maddrs[:MAX_MADDRS]), "trainer")


ANYTHING = st.recursive(st.none() | st.text() | st.integers(-9, 9), st.lists, max_leaves=10)


@settings(max_examples=100, derandomize=True)
@given(value=st.binary(max_size=80) | ANYTHING.map(msgpack.packb))
def test_strangers_records_are_right_or_nothing(value: bytes) -> None:
    record = decode_record(value)
    if record is not None:
        maddrs, role = record
        assert isinstance(role, str)
        assert all(isinstance(maddr, str) for maddr in maddrs)
        assert len(maddrs) <= MAX_MADDRS


@pytest.mark.parametrize(
    "value",
    [
        msgpack.packb([["x"] * (MAX_MADDRS + 1), "trainer"]),
        msgpack.packb([["x" * (MAX_MADDR_LENGTH + 1)], "trainer"]),
        msgpack.packb([[b"x"], "trainer"]),
        msgpack.packb([["x"], 1]),
        msgpack.packb(["x", "trainer"]),
        msgpack.packb([["x"], "trainer", 1]),
        msgpack.packb([["x"], "\x1b[2J"]),
        msgpack.packb([["x"], "r" * 129]),
        msgpack.packb([["x\n"], "trainer"]),
        b"\x92\xdd\xff\xff\xff\xff",
    ],
)
def test_malformed_records_are_nothing(value: bytes) -> None:
    assert decode_record(value) is None


def test_peers_spread_evenly_over_the_keys() -> None:
    counts = Counter(bucket_of(f"peer {i}") for i in range(1600))
    expected = 1600 / BUCKETS
    # 15 degrees of freedom: 30.6 is exceeded once in a hundred times by chance.
    assert sum((counts[b] - expected) ** 2 / expected for b in range(BUCKETS)) < 30.6


# --- announcing --------------------------------------------------------------------------------------------------


def test_a_live_peer_stays_announced_and_a_dead_one_expires() -> None:
    async def main() -> None:
        async with town() as t:
            member = await t.start("a")
            await member.membership.announced.wait()
            look = t.network.directory("somebody").lookup
            for _ in range(20):
                await trio.sleep(RECORD_TTL_S / 7)
                records = await look(member_key("test", bucket_of("a")))
                assert decode_record(records["a"]) == (("/memory/a/p2p/a",), "trainer")
            t.kill("a")
            await trio.sleep(RECORD_TTL_S + 1)
            assert await look(member_key("test", bucket_of("a"))) == {}

    run_virtual(main)


def test_a_restarted_peer_dials_those_it_remembers_without_a_record_and_decides_nothing_before() -> None:
    async def main() -> None:
        async with town(latency_s=0.1) as t:
            await t.start("a")
            t.network.close_directory()
            b = await t.start("b", incarnation="2", remembered=["a", "gone"])
            await trio.sleep(0.05)
            assert b.membership.undecided
            await until(lambda: not b.membership.undecided)
            assert b.linked == {"a"}

    run_virtual(main)


def test_an_announcement_that_no_node_stored_is_repeated_soon() -> None:
    class Deaf:
        def __init__(self) -> None:
            self.times: list[float] = []

        async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
            self.times.append(trio.current_time())
            return len(self.times) > 3

        async def lookup(self, key: str) -> Mapping[str, bytes]:
            await trio.lowlevel.checkpoint()
            return {}

    async def main() -> None:
        async with town() as t, trio.open_nursery() as nursery:
            member, deaf = await t.start("a"), Deaf()
            membership = Membership(member.links, deaf, "test", "a", tuple, random.Random(0))
            nursery.start_soon(membership.run_forever)
            with trio.fail_after(4):
                await membership.announced.wait()
            await trio.sleep(25)
            nursery.cancel_scope.cancel()
            gaps = [b - a for a, b in zip(deaf.times, deaf.times[1:], strict=False)]
            assert gaps == pytest.approx([1, 1, 1, ANNOUNCE_EVERY_S, ANNOUNCE_EVERY_S])

    run_virtual(main)


class Broken:
    """A directory of which every second use raises."""

    def __init__(self, directory: Directory) -> None:
        self.uses: Counter[str] = Counter()
        self._directory = directory

    def _break(self, what: str) -> None:
        self.uses[what] += 1
        if self.uses[what] % 2:
            raise TypeError(f"{what} {self.uses[what]} went wrong")

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        self._break("announce")
        return await self._directory.announce(key, value, expires_in_s)

    async def lookup(self, key: str) -> Mapping[str, bytes]:
        await trio.sleep(0)
        self._break(f"lookup of {key}")
        return await self._directory.lookup(key)


def test_a_directory_that_raises_costs_that_refresh_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with town() as t, trio.open_nursery() as nursery:
            a, b = await t.start("a"), Member("b")
            transport, broken = t.network.transport("b"), Broken(t.network.directory("b"))
            b.links = Links(transport, lambda: hello_of("b"), b)
            b.membership = Membership(b.links, broken, "test", "b", lambda: transport.maddrs, random.Random(0))
            await nursery.start(b.links.run)
            nursery.start_soon(b.membership.run_forever)
            await until(lambda: b.linked == {"a"}, within_s=5)
            assert a.linked == {"b"}
            await trio.sleep(60)
            assert broken.uses["announce"] > 10
            assert b.membership.announced.is_set()
            nursery.cancel_scope.cancel()

    run_virtual(main)
    failures = [record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "ERROR"]
    assert failures.count("announcing this peer failed; it is tried again") == 1
    assert failures.count("looking up members failed; it is tried again") == 1
    assert caplog.text.count("Traceback") == 2


@pytest.mark.parametrize("error", [OSError("a bug"), PeerLostError("no other node of the DHT answers")])
def test_a_directory_that_never_answers_is_not_taken_for_an_empty_one(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody may found a run because looking for its members fails."""

    class Dead:
        async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
            return True

        async def lookup(self, key: str) -> Mapping[str, bytes]:
            raise error

    async def main() -> None:
        async with town() as t, trio.open_nursery() as nursery:
            member = await t.start("a")
            membership = Membership(member.links, Dead(), "test", "a", tuple, random.Random(0))
            nursery.start_soon(membership.run_forever)
            await trio.sleep(30)
            assert membership.announced.is_set()
            assert not membership.looked_up.is_set()
            nursery.cancel_scope.cancel()

    run_virtual(main)
    # That nobody answers is normal life.
    assert caplog.text.count("Traceback") == (0 if isinstance(error, PeerLostError) else 1)


def test_an_exception_while_one_member_is_dialled_costs_that_dial_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with town() as t:
            a = await t.start("a")
            connect, dials = a.links.connect, Counter[str]()

            async def broken(peer_id: str, maddrs: list[str]) -> Link:
                dials[peer_id] += 1
                if peer_id == "b" and dials[peer_id] < 3:
                    raise ZeroDivisionError("a bug")
                return await connect(peer_id, maddrs)

            a.links.connect = broken  # type: ignore[method-assign]
            a.membership.hint("b", ("/memory/b",))
            a.membership.hint("c", ("/memory/c",))
            await trio.sleep(0.5)
            for name in "bc":
                await t.start(name)
                t.members[name].membership.stop()
            await until(lambda: a.linked == {"b", "c"}, within_s=20)
            assert dials["b"] == 3

    run_virtual(main)
    failures = [record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "ERROR"]
    assert failures.count("dialling members failed; it is tried again") == 1
    assert caplog.text.count("ZeroDivisionError: a bug") == 1


TEXT = st.text(max_size=20) | st.sampled_from(
    [
        "",
        "/",
        "//",
        "/ip4",
        "/ip4/",
        "/ip4/1.2.3.4",
        "/ip4/999.1.1.1/tcp/1",
        "/ip6/::1%x",
        "/ip4/\x00/p2p-circuit",
        "a" * 600,
    ]
)


@settings(max_examples=60, derandomize=True)
@given(heard=st.lists(st.tuples(TEXT, st.lists(TEXT, max_size=20).map(tuple), TEXT), max_size=20))
def test_whatever_others_say_of_members_breaks_no_loop(heard: list[tuple[str, tuple[str, ...], str]]) -> None:
    async def main() -> None:
        async with town() as t:
            a, b = await t.start("a"), await t.start("b")
            for peer_id, maddrs, role in heard:
                a.membership.hint(peer_id, maddrs)
                a.membership.welcome(peer_id, maddrs, role)
                record = msgpack.packb([list(maddrs), role])
                await t.network.directory(peer_id or "?").announce(member_key("test", bucket_of("b")), record, 30.0)
            await until(lambda: a.linked == {"b"} and b.linked == {"a"}, within_s=60)
            await trio.sleep(5)
            assert [peer_id for peer_id, _ in a.membership.sample(2)] == ["b"]

    run_virtual(main)


# --- finding -----------------------------------------------------------------------------------------------------


def test_two_find_each_other_within_a_second_of_the_announcement() -> None:
    async def main() -> None:
        async with town(latency_s=0.02) as t:
            a = await t.start("a")
            await trio.sleep(10)
            b = await t.start("b")
            await until(lambda: a.linked == {"b"} and b.linked == {"a"}, within_s=1)

    run_virtual(main)


def test_forty_find_each_other() -> None:
    async def main() -> None:
        names = [f"p{i:02d}" for i in range(40)]
        async with town(latency_s=0.02) as t:
            for name in names:
                await t.start(name)
                await trio.sleep(0.1)
            await until(lambda: all(m.linked == set(names) - {m.peer_id} for m in t.members.values()), within_s=60)
            # A member that dies is missed by all, and one that comes finds all.
            t.kill("p07")
            await t.start("p40")
            names = sorted({*names, "p40"} - {"p07"})
            await until(lambda: all(m.linked == set(names) - {m.peer_id} for m in t.members.values()), within_s=60)

    run_virtual(main)


def test_hints_of_partners_are_enough_without_the_directory() -> None:
    async def main() -> None:
        async with town() as t:
            members = [await t.start(name) for name in "abcdef"]
            for member in members:
                member.membership.known.clear()
            t.network._records.clear()
            for one, other in itertools.pairwise(members):
                one.membership.hint(other.peer_id, ())

            async def nothing(key: str, value: bytes = b"", expires_in_s: float = 0) -> Mapping[str, bytes]:
                await trio.lowlevel.checkpoint()
                return {}

            for member in members:
                member.membership._directory.lookup = nothing  # type: ignore[method-assign, assignment]
            await until(lambda: all(len(m.linked) == 5 for m in members), within_s=20)

    run_virtual(main)


def test_an_observer_does_not_count_as_company() -> None:
    """A peer that is alone with an observers looks for members as eagerly as one that is alone."""

    async def main() -> None:
        async with town() as t:
            a = await t.start("a")
            observer = await t.start("observer", role="observer")
            await observer.links.connect("a", [])
            await trio.sleep(10)
            assert a.linked == {"observer"}
            assert a.membership.sample(5) == ()
            b = await t.start("b")
            b.membership.stop()
            await until(lambda: a.links.get("b") is not None, within_s=2)

    run_virtual(main)


def test_members_meet_again_after_a_partition() -> None:
    async def main() -> None:
        async with town() as t:
            members = [await t.start(name) for name in "abcd"]
            await until(lambda: all(len(m.linked) == 3 for m in members))
            for lasts_s in (3, 11, 40, 200):
                t.network.partition(["a", "b"], ["c", "d"])
                await trio.sleep(lasts_s)
                t.network.partition()
                # Whoever has given up dials at growing intervals; the longest one ends it.
                await until(lambda: all(len(m.linked) == 3 for m in members), within_s=1.3 * MAX_RETRY_S + 15)
                await trio.sleep(30)
                assert all(len(m.linked) == 3 for m in members)

    run_virtual(main)


@pytest.mark.parametrize("lasts_s", [200, 1800])
def test_members_meet_again_after_an_outage_that_has_emptied_the_directory(lasts_s: float) -> None:
    """No initial peer is left, and none of them is announced any more: they remember whom they were linked with."""

    async def main() -> None:
        async with town() as t:
            members = [await t.start(name) for name in "abcd"]
            await until(lambda: all(len(m.linked) == 3 for m in members))
            t.network._records = None
            t.network.partition(["a"], ["b", "c"], ["d"])
            await trio.sleep(lasts_s)
            t.network.partition()
            await until(lambda: all(len(m.linked) == 3 for m in members), within_s=1.3 * MAX_RETRY_S + 15)

    run_virtual(main)


# --- remembering and forgetting ----------------------------------------------------------------------------------


async def lone_member(t: Town) -> tuple[Member, list[tuple[float, str]]]:
    """A member that can reach no peer, and its attempts to dial."""
    member = await t.start("a")
    dialled: list[tuple[float, str]] = []

    async def fail(peer_id: str, maddrs: list[str]) -> Link:
        dialled.append((trio.current_time(), peer_id))
        await trio.lowlevel.checkpoint()
        raise PeerLostError(f"{peer_id}: cannot be reached")

    member.links.connect = fail  # type: ignore[method-assign]
    return member, dialled


def test_a_dead_address_is_dialled_less_and_less_and_then_forgotten() -> None:
    async def main() -> None:
        async with town() as t:
            member, dialled = await lone_member(t)
            member.membership.hint("gone", ("/memory/gone",))
            assert member.membership.undecided
            await trio.sleep(1)
            assert not member.membership.undecided
            await trio.sleep(2 * RECORD_TTL_S)
            assert "gone" not in member.membership.known
            times = [time for time, _ in dialled]
            gaps = [b - a for a, b in itertools.pairwise(times)]
            for gap, expected in zip(gaps, [1, 2, 4, 8, 16], strict=False):
                assert 0.7 * expected <= gap <= 1.3 * expected + 0.2
            assert 4 <= len(gaps) <= 6
            await trio.sleep(300)
            assert len(dialled) == len(times)

    run_virtual(main)


def test_the_last_lost_peers_are_remembered_for_a_day_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MAX_LOST", 2)
    monkeypatch.setattr(neighbours, "LOST_FOR_S", 600.0)

    async def main() -> None:
        async with town() as t:
            a, *_ = [await t.start(name) for name in "abcd"]
            await until(lambda: len(a.linked) == 3)
            for name in "bcd":
                t.kill(name)
                await trio.sleep(2 * RECORD_TTL_S)
            t.network._records = None
            await trio.sleep(2 * RECORD_TTL_S)
            assert sorted(a.membership.known) == ["c", "d"]
            await trio.sleep(400)
            assert "d" in a.membership.known
            # A heartbeat that names a dead peer does not extend the time.
            a.membership.hint("d", ("/memory/d",), teller="b")
            await trio.sleep(200)
            assert not a.membership.known

    run_virtual(main)


def test_peers_that_are_no_longer_announced_are_named_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large swarm, where others are named than linked ones."""
    monkeypatch.setattr(Membership, "is_large", True)

    async def main() -> None:
        async with town() as t:
            member, _ = await lone_member(t)
            member.membership.hint("lost", ("/memory/lost",))
            member.membership.known["lost"].reached = True
            await trio.sleep(3 * RECORD_TTL_S)
            member.membership.hint("new", ("/memory/new",))
            await trio.sleep(1)
            assert sorted(member.membership.known) == ["lost", "new"]
            assert member.membership.sample(2) == (("new", ("/memory/new",)),)

    run_virtual(main)


def test_who_left_is_not_dialled_though_its_record_lingers() -> None:
    async def main() -> None:
        async with town() as t:
            a, b = await t.start("a"), await t.start("b")
            await until(lambda: a.linked == {"b"})
            link = b.links.get("a")
            assert link is not None
            b.membership.stop()
            link.send(Leave("done"))
            await until(lambda: not a.linked)
            # It is still there and would answer; and its announcements go on for as long as it runs.
            await trio.sleep(RECORD_TTL_S)
            assert not a.linked
            assert "b" not in a.membership.known
            # It comes back: its own call counts more than what was heard before.
            await b.links.connect("a", [])
            await until(lambda: a.linked == {"b"})
            assert "b" in a.membership.known

    run_virtual(main)


def test_what_others_tell_is_bounded() -> None:
    async def main() -> None:
        async with town() as t:
            a, _b = await t.start("a"), await t.start("b")
            await until(lambda: a.linked == {"b"})
            membership = a.membership
            membership.settle()
            for junk in ("a", "", "x" * 129):
                membership.hint(junk, ("/memory/x",))
                assert junk not in membership.known
            long = ["/memory/" + "x" * MAX_MADDR_LENGTH] + [f"/memory/{i}" for i in range(100)]
            for _ in range(2):  # a new one, then one that is known
                membership.hint("c", tuple(long))
                assert membership.known["c"].maddrs == tuple(long[1:MAX_MADDRS])
            membership.welcome("b", tuple(long), "trainer")
            assert membership.known["b"].maddrs == tuple(long[1:MAX_MADDRS])
            assert membership.sample(2) == (("b", tuple(long[1:MAX_MADDRS])),)
            membership.hint("b", ())
            assert membership.known["b"].maddrs
            for i in range(10 * MAX_KNOWN):
                membership.hint(f"stranger {i}", ())
                assert len(membership.known) <= MAX_KNOWN
            assert "b" in membership.known

    run_virtual(main)


def test_the_least_recently_heard_of_makes_room() -> None:
    async def main() -> None:
        async with town() as t:
            member, _ = await lone_member(t)
            member.membership.settle()
            for i in range(MAX_KNOWN):
                member.membership.hint(f"p{i}", ())
                await trio.sleep(0.01)
            member.membership.hint("p0", ())
            member.membership.hint("new", ())
            known = member.membership.known
            assert "new" in known
            assert "p0" in known
            assert "p1" not in known

    run_virtual(main)


def test_a_stranger_that_names_made_up_peers_displaces_only_its_own() -> None:
    async def main() -> None:
        async with town() as t:
            member, _ = await lone_member(t)
            membership = member.membership
            membership.settle()
            found = [f"found{i}" for i in range(60)]
            named = [f"named{i}" for i in range(10)]
            for peer_id in found:
                membership.hint(peer_id, (f"/memory/{peer_id}",))
            for peer_id in named:
                membership.hint(peer_id, (), teller="honest")
            for i in range(1000):
                membership.hint(f"made up {i}", (), teller="stranger")
                membership.hint(found[i % 60], ("/memory/elsewhere",), teller="stranger")
                await trio.sleep(0.05)
                assert len(membership.known) <= MAX_KNOWN
            assert {*found, *named} <= set(membership.known)
            assert all(membership.known[peer_id].maddrs == (f"/memory/{peer_id}",) for peer_id in found)
            assert "made up 999" in membership.known
            # What we find ourselves comes before what others name, and with nothing of that left, before the oldest.
            for i in range(2 * MAX_KNOWN):
                membership.hint(f"late{i}", ())
            assert set(membership.known) == {f"late{i}" for i in range(MAX_KNOWN, 2 * MAX_KNOWN)}
            membership.hint("made up", (), teller="stranger")
            assert "made up" not in membership.known

    run_virtual(main)


def test_who_was_named_and_then_found_is_no_longer_displaced_by_names() -> None:
    async def main() -> None:
        async with town() as t:
            member, _ = await lone_member(t)
            membership = member.membership
            membership.settle()
            membership.hint("p", ("/memory/wrong",), teller="stranger")
            membership.hint("p", ("/memory/p",))
            for i in range(2 * MAX_KNOWN):
                membership.hint(f"made up {i}", (), teller="stranger")
            assert membership.known["p"].maddrs == ("/memory/p",)

    run_virtual(main)


def test_a_joiner_forgets_names_for_records_but_nothing_for_names() -> None:
    async def main() -> None:
        async with town() as t:
            member, _ = await lone_member(t)
            membership = member.membership
            for i in range(MAX_KNOWN_JOINING + 5):
                membership.hint(f"made up {i}", (), teller="stranger")
            assert f"made up {MAX_KNOWN_JOINING}" not in membership.known
            assert membership.undecided
            for i in range(10):
                membership.hint(f"p{i}", ())
            assert {f"p{i}" for i in range(10)} <= set(membership.known)
            assert len(membership.known) == MAX_KNOWN_JOINING

    run_virtual(main)


def nobody(peer_id: str) -> bool:
    return False


FEWEST, MOST = 6, 9


@pytest.fixture
def large_from_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swarm of more than 12 peers is large; its members have FEWEST to MOST neighbours."""
    for name, value in {"MAX_DIALLED": 12, "NEIGHBOURS": FEWEST, "MAX_NEIGHBOURS": MOST}.items():
        monkeypatch.setattr(f"p2ptrain.protocol.membership.neighbours.{name}", value)


@pytest.mark.long
@pytest.mark.usefixtures("large_from_12")
def test_in_a_large_swarm_few_links_are_sought() -> None:
    async def main() -> None:
        async with town() as t:
            others = [await t.start(f"p{i:02d}") for i in range(24)]
            for other in others:
                other.membership.stop()
            a = await t.start("a")
            a.membership.rounds = RoundPeers(nobody, nobody)
            await trio.sleep(5)
            assert len(a.linked) == 24
            a.membership.rounds = RoundPeers(nobody, nobody, in_round=lambda: True)
            a.membership.settle()
            await trio.sleep(5)
            assert len(a.linked) == 24, "links ended during a round"
            a.membership.rounds = RoundPeers(nobody, nobody)
            await trio.sleep(5)
            assert len(a.linked) == 24, "links to joiners ended"
            joiner, *trainers = others
            for other in trainers:
                other.lineage = "0-g"
            await trio.sleep(5)
            assert len(a.linked) == MOST + 1
            assert joiner.peer_id in a.linked
            for peer_id in sorted(a.linked - {joiner.peer_id})[:5]:
                t.network.crash(peer_id)
            await trio.sleep(60)
            assert len(a.linked) == FEWEST
            # Those beyond may still come to us.
            late = next(o for o in others if o.peer_id not in a.linked and o.peer_id in t.network.transports)
            await late.links.connect("a", [])
            await trio.sleep(1)
            assert len(a.linked) == FEWEST + 1

    run_virtual(main)


@pytest.mark.usefixtures("large_from_12")
def test_no_link_in_use_is_ended_as_one_too_many() -> None:
    async def main() -> None:
        async with town() as t:
            others = [await t.start(f"p{i:02d}") for i in range(24)]
            a = await t.start("a")
            await trio.sleep(5)
            for other in others:
                other.lineage = "0-g"
                other.membership.stop()
            a.membership.rounds = RoundPeers(nobody, nobody)
            used = [peer_id for peer_id in sorted(a.linked) if peer_id > "p12"]
            async with trio.open_nursery() as nursery:
                for peer_id in used:
                    # It is never answered.
                    nursery.start_soon(functools.partial(a.links.request, a.links.live[peer_id], "x", timeout_s=60))
                await trio.sleep(1)
                a.membership.settle()
                await trio.sleep(20)
                assert a.linked == set(used)
                nursery.cancel_scope.cancel()
            await trio.sleep(3)
            assert a.linked == set(used), "ended between two requests"
            await trio.sleep(5)
            assert len(a.linked) == MOST

    run_virtual(main)


@pytest.mark.usefixtures("large_from_12")
def test_in_a_large_swarm_the_peers_of_a_round_link_to_each_other() -> None:
    async def main() -> None:
        async with town() as t:
            names = [f"p{i:02d}" for i in range(30)]
            of_round = set(names[:12])
            peers = [await t.start(name) for name in names]
            await trio.sleep(5)
            for peer in peers:
                peer.lineage = "0-g"
                peer.membership.rounds = RoundPeers(of_round.__contains__, of_round.__contains__)
                peer.membership.settle()
            await trio.sleep(60)
            for peer in peers:
                if peer.peer_id in of_round:
                    assert of_round - {peer.peer_id} <= peer.linked
                    assert FEWEST <= len(peer.linked - of_round) <= MOST
                else:
                    assert FEWEST <= len(peer.linked) <= MOST
                    # They tell others who takes part.
                    assert {named for named, _ in peer.membership.sample(2)} <= of_round

    run_virtual(main)


@pytest.mark.usefixtures("large_from_12")
@pytest.mark.parametrize(
    "lineage",
    [
        pytest.param("", id="they name no lineage"),
        pytest.param("0-g", id="they name one", marks=pytest.mark.long),
    ],
)
def test_who_links_to_a_peer_does_not_displace_the_neighbours_that_it_chose(lineage: str) -> None:
    async def main() -> None:
        async with town() as t:
            chosen = [await t.start(f"p{i:02d}") for i in range(14)]
            for other in chosen:
                other.lineage = "0-g"
                other.membership.stop()
            a = await t.start("a")
            await trio.sleep(5)
            a.membership.rounds = RoundPeers(nobody, nobody)
            a.membership.settle()
            strangers = [await t.start(f"x{i:02d}") for i in range(12)]
            for stranger in strangers:
                stranger.lineage = lineage
                stranger.membership.stop()
                await stranger.links.connect("a", [])
            await trio.sleep(20)
            assert sum(peer_id.startswith("p") for peer_id in a.linked) >= FEWEST
            for peer_id in sorted(a.linked):
                if peer_id.startswith("p"):
                    a.links.live[peer_id].close("broken")
            for stranger in strangers:
                await stranger.links.connect("a", [])
            await trio.sleep(50)
            assert sum(peer_id.startswith("p") for peer_id in a.linked) >= (FEWEST // 2 if lineage else FEWEST)

    run_virtual(main)


def test_named_peers_of_a_round_do_not_keep_a_peer_from_dialling_those_that_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "is_large", True)

    async def main() -> None:
        async with town() as t:
            member, dialled = await lone_member(t)
            fail = member.links.connect

            async def hang(peer_id: str, maddrs: list[str]) -> Link:
                with pytest.raises(PeerLostError):
                    await fail(peer_id, maddrs)
                return await trio.sleep_forever()

            member.links.connect = hang  # type: ignore[method-assign]
            membership = member.membership
            membership.settle()
            for i in range(40):
                membership.hint(f"named-{i}", ("/memory/x",), teller="liar")
            await trio.sleep(1.5)
            assert len(dialled) == NAMED_AT_ONCE
            for i in range(5):
                membership.hint(f"found-{i}", ("/memory/x",))
            await trio.sleep(1.1)
            found = {peer_id for _, peer_id in dialled if peer_id.startswith("found")}
            assert found == {f"found-{i}" for i in range(5)}

    run_virtual(main)


@pytest.mark.usefixtures("large_from_12")
def test_no_link_ends_that_may_be_needed_for_a_round_by_the_estimate_of_its_other_end() -> None:
    """Else that end would open it again, over and over."""

    async def main() -> None:
        async with town() as t:
            peers = [await t.start(f"p{i:02d}") for i in range(20)]
            await trio.sleep(5)
            first = peers[0]
            for peer in peers:
                peer.lineage = "0-g"
                peer.membership.rounds = RoundPeers(
                    lambda peer_id: peer_id != first.peer_id, EVERYBODY.may_be_candidate
                )
                peer.membership.settle()
            linked = dict(first.links.live)
            await trio.sleep(30)
            assert first.links.live == linked
            for peer in peers:
                peer.membership.rounds = RoundPeers(nobody, nobody)
            await trio.sleep(10)
            assert len(first.links.live) <= MOST

    run_virtual(main)


async def announce_made_up(t: Town, count: int, record: bytes = b"") -> None:
    """Announce so many peers that do not exist, with this record or with addresses of their own."""
    for i in range(count):
        own_record = encode_record([f"/memory/made-up-{i}/p2p/made-up-{i}"], "trainer")
        key = member_key("test", bucket_of(f"made-up-{i}"))
        await t.network.directory(f"made-up-{i}").announce(key, record or own_record, 1000.0)


@pytest.mark.usefixtures("large_from_12")
def test_made_up_records_make_no_swarm_large() -> None:
    async def main() -> None:
        async with town() as t:
            await announce_made_up(t, 100)
            peers = [await t.start(name) for name in "abcd"]
            await trio.sleep(30)
            for peer in peers:
                peer.membership.settle()
                assert len(peer.linked) == 3
                assert not peer.membership.is_large

    run_virtual(main)


@pytest.mark.parametrize(
    "record", [b"\x00", encode_record(["/ip4/10.9.9.9/tcp/1"], "trainer")], ids=["unreadable", "private"]
)
def test_made_up_records_that_are_never_dialled_count_nothing(record: bytes) -> None:
    async def main() -> None:
        async with town() as t:
            peers = [await t.start(name) for name in "abcd"]
            await trio.sleep(30)
            await announce_made_up(t, 100, record)
            # Until all keys were looked up again.
            await trio.sleep(120)
            assert [peer.membership.size.estimate for peer in peers] == [4.0] * 4

    run_virtual(main)


def test_made_up_records_whose_dials_are_cut_short_count_nothing() -> None:
    async def main() -> None:
        async with town() as t:
            await announce_made_up(t, 100)
            member = await t.start("a")
            connect = member.links.connect

            async def connect_or_hang(peer_id: str, maddrs: list[str]) -> Link:
                return await connect(peer_id, maddrs) if peer_id == "b" else await trio.sleep_forever()

            member.links.connect = connect_or_hang  # type: ignore[method-assign]
            await t.start("b")
            await trio.sleep(FIRST_DIAL_S + 1)
            assert "b" in member.linked
            assert member.membership.size.estimate < 10

    run_virtual(main)


def test_a_peer_whose_first_dial_was_cut_short_counts_once() -> None:
    async def main() -> None:
        async with town() as t:
            member, dialled = await lone_member(t)
            fail, noted = member.links.connect, []

            async def fail_late(peer_id: str, maddrs: list[str]) -> Link:
                await trio.sleep(2 * FIRST_DIAL_S)
                return await fail(peer_id, maddrs)

            member.links.connect = fail_late  # type: ignore[method-assign]
            member.membership.size.note_dial = lambda *, reached: noted.append(reached)  # type: ignore[method-assign]
            for i in range(2 * DIALLED_AT_ONCE):
                member.membership.hint(f"made-up-{i}", ("/memory/x",))
            await trio.sleep(40)
            # Those that were cut short, too.
            assert {peer_id for _, peer_id in dialled} == member.membership.known.keys()
            assert noted == [False] * 2 * DIALLED_AT_ONCE

    run_virtual(main)


@pytest.mark.long
def test_peers_that_are_dialled_in_vain_again_and_again_or_were_only_named_lower_no_size() -> None:
    async def main() -> None:
        async with town() as t:
            for i in range(12):
                await t.start(f"p{i:02d}")
            await announce_made_up(t, 12)
            a = await t.start("a")
            for i in range(40):
                a.membership.hint(f"named-{i}", ("/memory/x",), teller="liar")
            # Until all keys were looked up again.
            await trio.sleep(120)
            assert len(a.linked) == 12
            assert 12 < a.membership.size.estimate < 18

    run_virtual(main)


def test_in_a_large_swarm_looked_up_peers_leave_room_for_those_of_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "is_large", True)

    async def main() -> None:
        async with town() as t:
            for i in range(600):
                record = encode_record([f"/memory/p{i}/p2p/p{i}"], "trainer")
                await t.network.directory(f"p{i}").announce(member_key("test", bucket_of(f"p{i}")), record, 1000.0)
            a = await t.start("a")
            a.membership.settle()
            await trio.sleep(5)
            assert len(a.membership.known) == MAX_KNOWN - ROOM_FOR_NAMED
            named = {f"named-{i}" for i in range(ROOM_FOR_NAMED)}
            for peer_id in named:
                a.membership.hint(peer_id, (), teller="b")
            await trio.sleep(2 * LOOKUP_EVERY_S)
            assert named <= a.membership.known.keys()
            assert len(a.membership.known) == MAX_KNOWN

    run_virtual(main)


def test_who_joins_seeks_all_that_it_knows() -> None:
    """Else it might miss those who hold the run's state, and found the run a second time."""

    async def main() -> None:
        async with town() as t:
            others = [await t.start(f"p{i:02d}") for i in range(MAX_DIALLED + 10)]
            a = await t.start("a")
            for other in others:
                other.membership.stop()
                a.membership.hint(other.peer_id, ())
            await trio.sleep(5)
            assert len(a.linked) == MAX_DIALLED + 10
            assert not a.membership.undecided

    run_virtual(main)


def test_a_peer_that_leaves_stops_dialling() -> None:
    async def main() -> None:
        async with town() as t:
            member, dialled = await lone_member(t)
            member.membership.hint("p", ())
            await trio.sleep(1)
            assert dialled
            member.membership.stop()
            await trio.sleep(0.2)
            count = len(dialled)
            await trio.sleep(30)
            assert len(dialled) == count

    run_virtual(main)
