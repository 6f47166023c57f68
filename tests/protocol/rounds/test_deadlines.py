"""Timeouts follow measured durations, within the user's limits."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from p2ptrain.errors import PeerLostError, RoundFailedError
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.protocol.exchange.types import Snapshot
from p2ptrain.protocol.links.link import MAX_BEAT_EVERY_S, MIN_PATIENCE_S, Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.rounds.deciding import consensus
from p2ptrain.protocol.rounds.deciding.averaging import averaging_of
from p2ptrain.protocol.rounds.deciding.events import (
    Average,
    Event,
    Lead,
    LeaderEnded,
    Limits,
    Received,
    Send,
    State,
    Tick,
    deadline_s,
)
from p2ptrain.protocol.rounds.deciding.grid import Grid, gradient_codec
from p2ptrain.protocol.rounds.deciding.timeouts import (
    AVERAGING_SHARE,
    MIN_ATTEMPT_S,
    REPORT_S,
    SENDING_SHARE,
    STALL_S,
    PeerBackoff,
    Timeouts,
)
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.rounds.moving import part_store
from p2ptrain.protocol.rounds.moving.collection import Collection
from p2ptrain.protocol.rounds.moving.leader import AveragingLeader
from p2ptrain.protocol.wire.messages import (
    KIND_OF,
    Abort,
    Answer,
    Attempt,
    Beat,
    Head,
    Join,
    Message,
    Reduce,
    Request,
    Roster,
    RosterPart,
)
from p2ptrain.settings.config import RunConfig
from tests.protocol.rounds.deciding.test_policy import arrived_of
from tests.protocol.rounds.deciding.test_timeouts import timeouts
from tests.protocol.swarm import RUN, common, run_virtual, start_all, swarm
from tests.protocol.wiring import Endpoint, chunk_message, hello_of, linked_pair, start_endpoint, until

# --- a silent peer --------------------------------------------------------------------------------------------------


async def pair(network: MemoryNetwork, nursery: trio.Nursery, peer_timeout_s: float) -> tuple[Endpoint, Endpoint]:
    a = await start_endpoint(network, nursery, hello_of("a"), peer_timeout_s=peer_timeout_s)
    b = await start_endpoint(network, nursery, hello_of("b"))
    await a.links.connect("b", [])
    return a, b


async def silence_until_lost(network: MemoryNetwork, a: Endpoint, other: str = "b") -> float:
    network.partition([other])
    began_s = trio.current_time()
    await until(lambda: bool(a.lost))
    return trio.current_time() - began_s


@pytest.mark.parametrize(
    ("known_s", "peer_timeout_s", "least_s"), [(30, 30.0, MIN_PATIENCE_S), (1, 30.0, MIN_PATIENCE_S), (30, 3.0, 3.0)]
)
def test_a_frozen_peer_is_noticed_within_seconds(known_s: float, peer_timeout_s: float, least_s: float) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            a, _ = await pair(network, nursery, peer_timeout_s)
            await trio.sleep(known_s)
            assert least_s - 1.5 <= await silence_until_lost(network, a) <= least_s + 2.5
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize(("peer_timeout_s", "at_least_s"), [(60.0, 13.5), (12.0, 10.5)])
def test_who_was_often_silent_is_given_longer_up_to_the_users_bound(peer_timeout_s: float, at_least_s: float) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            a, _ = await pair(network, nursery, peer_timeout_s)
            for _ in range(5):
                await trio.sleep(5)
                network.fault = lambda source, target, packet: PacketFault.DROP
                await trio.sleep(3)
                network.fault = lambda source, target, packet: PacketFault.NONE
            await trio.sleep(3)
            assert not a.lost
            assert at_least_s <= await silence_until_lost(network, a) <= peer_timeout_s + 2.5
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_peer_with_many_links_is_not_lost_between_its_rare_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.protocol.links.links.LINKS_BEATEN", 1)
    names = [f"peer-{i}" for i in range(9)]

    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            hub = await start_endpoint(network, nursery, hello_of("hub"))
            others = [await start_endpoint(network, nursery, hello_of(name), peer_timeout_s=3.0) for name in names]
            for other in others:
                await other.links.connect("hub", [])
            await until(lambda: len(hub.linked) == len(others))
            hub.links.announce()  # as a node does when a link begins
            await trio.sleep(60)
            assert hub.links.live["peer-0"].beat_gap_s == MAX_BEAT_EVERY_S
            assert not hub.lost
            assert not any(other.lost for other in others)
            assert 3.0 <= await silence_until_lost(network, others[0], "hub") <= 3 * MAX_BEAT_EVERY_S + 2.5
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_beats_on_many_links_are_bounded_and_become_rare_by_steps() -> None:
    sent_s: dict[str, list[float]] = {}

    def note(source: str, target: str, packet: bytes) -> PacketFault:
        if source == "hub" and packet[1] == KIND_OF[Beat]:
            sent_s.setdefault(target, []).append(trio.current_time())
        return PacketFault.NONE

    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            hub = await start_endpoint(network, nursery, hello_of("hub"))
            network.fault = note
            for i in range(40):
                if i == 10:
                    await trio.sleep(5)
                other = await start_endpoint(network, nursery, hello_of(f"peer-{i}"))
                await hub.links.connect(other.peer_id, [])
            await trio.sleep(30)
            nursery.cancel_scope.cancel()

    run_virtual(main)
    steady = [at_s for times in sent_s.values() for at_s in times if at_s >= 10]
    assert len(sent_s) == 40
    assert 10 <= len(steady) / (max(steady) - 10) <= 16
    for times in sent_s.values():
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert gaps[-1] >= 2.99
        assert all(after <= 2.01 * before for before, after in itertools.pairwise(gaps))


def test_who_was_held_up_himself_does_not_take_the_others_for_lost() -> None:
    """After a suspend of an hour, the beats of that hour have not been read yet."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, other):
            await trio.sleep(20)
            for one in (link, other):
                one.last_heard -= 3600
            clock = trio.lowlevel.current_clock()
            clock.jump(5)  # type: ignore[attr-defined]
            await trio.sleep(5)
            assert not a.lost
            assert not b.lost

    run_virtual(main)


# --- an answer on a slow link -----------------------------------------------------------------------------------------


async def serve_slowly(link: Link, request: Request) -> None:
    """Every answer goes to the end of the queue."""
    await link.send_bulk(Answer(request.request, True, "chunk"), bytes(256 * 1024), Traffic.STATE)


def test_an_answer_behind_many_others_is_waited_for() -> None:
    async def main() -> None:
        # A quarter of a megabyte a second: 16 answers take 16 s, three times what a silent partner is given.
        async with linked_pair(MemoryNetwork(bandwidth_bytes_s=256 * 1024)) as (a, b, link, _):
            b.on_request = serve_slowly
            answers = []

            async def ask() -> None:
                answers.append(await a.links.request(link, "chunk", timeout_s=5.0))

            async with trio.open_nursery() as nursery:
                for _ in range(16):
                    nursery.start_soon(ask)
            assert len(answers) == 16
            assert trio.current_time() > 15

    run_virtual(main)


def test_unrequested_bulk_does_not_extend_a_requests_deadline() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, _, link, other), trio.open_nursery() as nursery:

            async def drip() -> None:
                while True:
                    await other.send_bulk(Answer(10**9, True, "x"), b"x" * 10, Traffic.STATE)
                    await trio.sleep(1)

            nursery.start_soon(drip)
            began_s = trio.current_time()
            with pytest.raises(PeerLostError, match="no answer within 5 s"):
                await a.links.request(link, "head", timeout_s=5.0)
            assert trio.current_time() - began_s == pytest.approx(5.0)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_request_ends_though_others_are_answered_for_ever() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, _), trio.open_nursery() as nursery:

            async def serve(link: Link, request: Request) -> None:
                if request.what != "head":
                    await link.send_bulk(Answer(request.request, True, "chunk"), b"x", Traffic.STATE)

            async def ask_forever() -> None:
                while True:
                    await a.links.request(link, "chunk", timeout_s=5.0)
                    await trio.sleep(1)

            b.on_request = serve
            nursery.start_soon(ask_forever)
            began_s = trio.current_time()
            with pytest.raises(PeerLostError, match="no answer within 40 s"):
                await a.links.request(link, "head", timeout_s=5.0)
            assert trio.current_time() - began_s == pytest.approx(40.0)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_partner_that_sends_nothing_is_not() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, _, link, _):
            began_s = trio.current_time()
            with pytest.raises(PeerLostError, match="no answer within 5 s"):
                await a.links.request(link, "chunk", timeout_s=5.0)
            assert trio.current_time() - began_s == pytest.approx(5.0)

    run_virtual(main)


# --- a slow sender ----------------------------------------------------------------------------------------------------


def collection_of(senders: list[str], measured: Timeouts) -> Collection:
    part, codec = RosterPart(0, 2048, "b", ()), gradient_codec(RunConfig())
    return Collection(part, senders, Grid(0, 2048), codec, measured, 0.0, num_stepped=2048, audited=False)


def test_a_reducer_does_not_give_up_its_own_outer_gradient() -> None:
    collection = collection_of(["a", "b"], timeouts())
    assert collection.give_up_stalled(STALL_S + 1.0, {})
    assert collection.failed == {"a"}


def test_who_was_left_out_as_too_slow_is_given_longer_in_the_next_attempt() -> None:
    codec = gradient_codec(RunConfig())
    measured = timeouts()
    chunk = bytes(codec.size_bytes(1024))

    def attempt() -> Collection:
        """Two chunks, the second of which takes six seconds."""
        collection = collection_of(["a"], measured)
        collection.add("a", chunk_message(0, 1024), chunk, 0.5)
        for now in (2.0, 4.0, 6.0):
            collection.give_up_stalled(now, {})
        collection.add("a", chunk_message(1024, 2048), chunk, 6.5)
        return collection

    assert attempt().failed == {"a"}
    assert attempt().complete == {"a"}


def test_a_link_on_which_a_chunk_takes_longer_than_any_first_limit_makes_rounds_longer_not_failing() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=600)) as s:
            for i, name in enumerate("abc"):
                s.start(name, founder=i == 0)
            await s.until_joined()
            size = s.peers["a"].node.driver.context.codec.size_bytes(s.peers["a"].node.state.num_blocks)
            # Two of the three parts of an outer gradient go out at once: the second is there after seven seconds.
            s.network.bandwidth_bytes_s = 2 / 3 * size / 7
            await s.until(lambda: all(p.rounds("committed") for p in s.peers.values()), within_s=600)
            assert any(r["group_size"] == 3 for p in s.peers.values() for r in p.rounds("committed"))
            assert not any(p.rounds("skipped") for p in s.peers.values())

    run_virtual(main)


@pytest.mark.parametrize("slow", ["abc", "e"])
def test_rounds_go_on_where_lines_become_far_slower_than_in_the_rounds_before(slow: str) -> None:
    """After fast rounds an attempt has 60 s, of which half are for sending: here that takes 45 s.

    An audit would send as much again.
    """

    async def main() -> None:
        run = dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=120, round_codec="none", audit_rate=0.0)
        async with swarm(run, shapes=[("weight", (12 * 1024, 64))]) as s:
            start_all(s, "abc" if slow == "abc" else "abcde", step_s=1.0)
            await s.until(lambda: all(len(p.rounds("committed")) >= 2 for p in s.peers.values()), within_s=600)
            driver = s.peers["a"].node.driver
            before, size = driver.head.round, driver.context.codec.size_bytes(driver.context.state.num_blocks)
            for name in slow:
                s.network.narrow(name, 2 / 3 * size / 45)
            # "e" alone may fall behind.
            peers = [s.peers[name] for name in ("abc" if slow == "abc" else "abcd")]
            await s.until(lambda: all(p.node.driver.head.round >= before + 3 for p in peers), within_s=900)
            assert all(len(p.rounds("skipped")) <= 1 for p in peers)

    run_virtual(main)


@pytest.mark.parametrize("slow", ["abc", "e"])
def test_who_could_not_send_to_most_reducers_in_time_gives_the_next_attempt_more_time(slow: str) -> None:
    """Also where another leads it. One reducer that takes nothing from us says nothing about our line."""

    async def main() -> None:
        run = dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=120, round_codec="none")
        async with swarm(run, shapes=[("weight", (32 * 1024, 64))]) as s:
            start_all(s, "abc" if slow == "abc" else "abcde", step_s=1.0)
            await s.until(lambda: all(len(p.rounds("committed")) >= 2 for p in s.peers.values()), within_s=600)
            contexts = {name: peer.node.driver.context for name, peer in s.peers.items()}
            size = contexts["a"].codec.size_bytes(contexts["a"].state.num_blocks)
            for name in slow:
                s.network.narrow(name, 2 / 3 * size / 90)

            def with_more() -> set[str]:
                return {name for name, of in contexts.items() if of.timeouts.attempt_s() > MIN_ATTEMPT_S}

            await s.until(lambda: bool(with_more()))
            await trio.sleep(5)  # the Abort waits on the line
            leader = with_more() - set(slow)
            assert set(slow) <= with_more()
            assert len(leader) <= 1

    run_virtual(main)


def test_who_is_not_drawn_waits_as_long_as_those_who_average() -> None:
    async def main() -> None:
        run = dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=800, max_contributors=2)
        async with swarm(run, shapes=[("weight", (12 * 1024, 64))]) as s:
            for i, name in enumerate("abcd"):
                s.start(name, founder=i == 0)
            await s.until_joined()
            size = s.peers["a"].node.driver.context.codec.size_bytes(s.peers["a"].node.state.num_blocks)
            # Half of an outer gradient takes longer than a member waits for a silent leader.
            s.network.bandwidth_bytes_s = size / 2 / 20
            await s.until(lambda: all(p.rounds("committed") for p in s.peers.values()), within_s=400)
            assert all(r["group_size"] == 2 for p in s.peers.values() for r in p.rounds("committed"))
            assert not any(p.rounds("skipped") for p in s.peers.values())

    run_virtual(main)


def test_who_is_linked_with_one_that_was_not_drawn_follows_rounds_over_its_slow_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ "c" gets the mean from "a" and "b", and gives it to "d", "e" and "f", which takes 60 s in all."""
    monkeypatch.setattr(part_store, "SLOWEST_BYTES_S", 16 * 1024)

    async def main() -> None:
        run = dataclasses.replace(RUN, fragment_fraction=0.0, sync_every=200, max_contributors=2)
        async with swarm(run, shapes=[("weight", (20 * 1024, 64))]) as s:
            monkeypatch.setattr(s.network, "connected", lambda a, b: {a, b} <= set("abc") or "c" in (a, b))
            start_all(s, "abcdef", step_s=1.0)
            for name in "abcdef":
                driver = s.peers[name].node.driver

                def lead(*args: Any, lead: Callable[..., Lead] = driver._schedule.lead) -> Lead:
                    return dataclasses.replace(lead(*args), called=("a", "b"))

                monkeypatch.setattr(driver._schedule, "lead", lead)
                if name not in "ab":
                    monkeypatch.setattr(driver._schedule, "is_ours_to_lead", lambda *args: False)
                    monkeypatch.setattr(driver._lineage_watch, "is_our_turn", lambda *args, **how: False)
            await s.until_joined()
            size = s.peers["a"].node.driver.context.codec.size_bytes(s.peers["a"].node.state.num_blocks)
            s.network.narrow("c", size / 20)
            await s.until(lambda: s.peers["a"].node.driver.head.round >= 1, within_s=500)
            await trio.sleep(120)
            for name in "def":
                assert [r["round"] for r in s.peers[name].rounds("committed")] == [0, 1]

    run_virtual(main)


# --- a round --------------------------------------------------------------------------------------------------------


class Host:
    """A leader's peer "a": the consensus of one round, and its averaging; `told` is what others are sent, and when."""

    def __init__(self, nursery: trio.Nursery) -> None:
        voters = tuple((name, f"{name}.1") for name in "abc")
        self.head = Head("0-g", "0-g", 0, "state", "anchor", voters, 0, 0, None)
        self.told: list[tuple[float, str, Message]] = []
        self.ended: list[LeaderEnded] = []
        self.leader: AveragingLeader | None = None
        self.attempt = Attempt(1, "a", "a.1")
        self.failed_s = 0.0
        self._nursery = nursery
        self._state = State("a", "a.1", self.head, Limits(10.0, 10.0, 1000.0))
        self._context: Any = SimpleNamespace(
            run=RunConfig(), averaging=averaging_of(RunConfig()), timeouts=timeouts(),
            state=SimpleNamespace(num_blocks=64 * 1024), grid=Grid(0, 64 * 1024), links=SimpleNamespace(strikes={}),
            peer_id="a",
            liveness=SimpleNamespace(own=("a", "a.1"), round_trip_s=lambda: 0.0), audited=True, avoided=PeerBackoff(),
        )  # fmt: skip

    def tell(self, peer_id: str, message: Message) -> None:
        self.told.append((trio.current_time(), peer_id, message))

    def apply(self, event: Event) -> None:
        self._state, effects = consensus.step(self._state, event, trio.current_time())
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.tell(to, message)
                case Average(attempt, joins):
                    self.leader = AveragingLeader(self._context, attempt, self.head, 100.0, self)
                    self._nursery.start_soon(self._lead, self.leader, dict(joins))
                case LeaderEnded():
                    self.ended.append(effect)
                    self._nursery.cancel_scope.cancel()

    async def _lead(self, leader: AveragingLeader, joins: dict[str, Join]) -> None:
        with pytest.raises(RoundFailedError, match="a reducer did not average its part in time"):
            await leader.run(joins)
        self.failed_s = trio.current_time()

    async def keep_time(self) -> None:
        while True:
            await trio.sleep_until(deadline_s(self._state))
            self.apply(Tick())

    def of(self, kind: type[Message]) -> list[tuple[float, str, Message]]:
        return [told for told in self.told if isinstance(told[2], kind)]


def join_of(peer_id: str, attempt: Attempt) -> Join:
    return Join(
        "0-g", 1, attempt, f"{peer_id}.1", "state", True, 100, 0, 10, 1.0, 1e6,
        tuple(other for other in "abc" if other != peer_id), False, None, None, None,
    )  # fmt: skip


@pytest.mark.parametrize("done_at", ["", "ac"])
def test_after_half_of_its_time_a_round_goes_on_without_those_who_trickle_and_ends_with_its_time(done_at: str) -> None:
    """At no reducer, or at all but one, which is not to blame."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            host = Host(nursery)
            host.apply(Lead(("a", "b", "c"), 1.0, 0.5, 100.0))
            nursery.start_soon(host.keep_time)
            await trio.sleep(0.1)
            for name in "abc":
                host.apply(Received(name, join_of(name, host.attempt)))
            assert host.leader is not None
            while True:
                await trio.sleep(REPORT_S)
                for part, reducer in enumerate("abc"):
                    # "c" goes on sending, chunk after chunk, and is never done.
                    complete = ("a", "b", "c") if reducer in done_at else ("a", "b")
                    host.leader.deliver(reducer, arrived_of(host.attempt, part, complete))
        (told_s, _, order), *_ = host.of(Reduce)
        assert told_s == pytest.approx(0.1 + SENDING_SHARE * 100.0)
        assert [c.peer_id for c in order.contributors] == ["a", "b"]  # type: ignore[union-attr]
        # No reducer ever answered.
        assert host.failed_s == pytest.approx(told_s + AVERAGING_SHARE * 100.0)
        assert [at_s for at_s, _, _ in host.of(Abort)] == pytest.approx([100.1] * 3)
        (ended,) = host.ended
        assert ended.timed_out
        assert "within 100 s" in ended.reason

    run_virtual(main)


def test_a_reducer_that_says_nothing_is_given_up_and_not_asked_again() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            context: Any = SimpleNamespace(
                run=RunConfig(), averaging=averaging_of(RunConfig()), timeouts=timeouts(),
                state=SimpleNamespace(num_blocks=64 * 1024), grid=Grid(0, 64 * 1024), links=SimpleNamespace(strikes={}),
            peer_id="a",
                liveness=SimpleNamespace(own=("a", "a.1"), round_trip_s=lambda: 0.0), audited=True,
                avoided=PeerBackoff(),
            )  # fmt: skip
            plans: list[list[str]] = []

            def tell(peer_id: str, message: Message) -> None:
                if isinstance(message, Roster) and peer_id == "a":
                    plans.append([part.reducer for part in message.parts])

            joins = {name: join_of(name, Attempt(1, "a", "a.1")) for name in "abc"}
            joins["c"] = msgspec.structs.replace(joins["c"], rate=1e300)
            for counter in (1, 2):
                attempt = Attempt(counter, "a", "a.1")
                head = Host(nursery).head
                events: Any = SimpleNamespace(tell=tell)
                leader = AveragingLeader(context, attempt, head, 1000.0, events)

                async def report(leader: AveragingLeader = leader) -> None:
                    while True:
                        await trio.sleep(REPORT_S)
                        for part, reducer in enumerate(plans[-1]):
                            if reducer != "c":
                                arrived = arrived_of(leader.attempt, part, ("a", "b"))
                                leader.deliver(reducer, arrived)

                began_s = trio.current_time()
                nursery.start_soon(report)
                with trio.move_on_after(100):
                    if counter == 1:
                        with pytest.raises(RoundFailedError, match="reducer c: it sent nothing for 15 s"):
                            await leader.run(joins)
                        assert trio.current_time() - began_s == pytest.approx(3 * REPORT_S)
                    else:
                        await leader.run(joins)
            assert sorted(plans[0]) == ["a", "b", "c"]
            assert sorted(plans[1]) == ["a", "b"]
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("touching_s", [4.0, 30.0])
def test_after_a_window_that_was_too_short_for_snapshots_the_next_one_is_longer(touching_s: float) -> None:
    """As on a machine that is too busy: memory for a snapshot takes longer to get than two windows last, or a round.

    It is got once for each snapshot, not for each attempt, also if the round is skipped. Nobody joins late for it.
    """

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0)) as s:
            touched, late_s, without = list[tuple[str, int, int]](), list[float](), list[str]()
            snapshots = Counter[str]()
            for name in "abc":
                driver = s.start(name).node.driver

                async def compute(
                    work: Callable[..., Any], *args: Any, name: str = name, driver: RoundDriver = driver,
                    compute: Any = driver.context.compute,
                ) -> Any:  # fmt: skip
                    if work != driver.context.exchange.new_buffer:
                        return await compute(work, *args)
                    touched.append((name, driver.head.round, snapshots[name]))
                    # A worker thread ends its work although the attempt was cancelled.
                    with trio.CancelScope(shield=True):
                        await trio.sleep(touching_s)
                    return work(*args)

                async def take(window_s: float, name: str = name, take: Any = driver._taker.take) -> Any:
                    called_s = trio.current_time()
                    own = await take(window_s)
                    late_s.append(trio.current_time() - called_s - window_s)
                    if own is None:
                        without.append(name)
                    return own

                def arrive(snapshot: Snapshot, name: str = name, arrive: Any = driver._taker.arrive) -> None:
                    snapshots[name] += 1
                    arrive(snapshot)

                compute.threads = 1  # type: ignore[attr-defined]
                driver.context.compute = compute  # type: ignore[assignment]
                driver._taker.take, driver._taker.arrive = take, arrive  # type: ignore[method-assign]
            await s.until(lambda: common(s, 4, 3), within_s=400)
            skips = any(peer.rounds("skipped") for peer in s.peers.values())
            assert skips == (touching_s > 4.0)
            assert len(touched) == len(set(touched))
            assert max(late_s) < 0.01
            assert set(without) == set("abc")

    run_virtual(main)


# --- what others claim ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("echoes_early", [False, True])
def test_a_member_with_a_false_round_trip_stretches_no_wait(
    echoes_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers no Call, so that each leader waits for it for a while."""
    send, of_liar = Link.send, set[Link]()

    def lie(link: Link, message: Message) -> None:
        if link in of_liar and isinstance(message, Join):
            return
        if link in of_liar and isinstance(message, Beat) and echoes_early and message.echo_s > 0:
            message = msgspec.structs.replace(message, echo_s=max(0.001, message.echo_s - 58.0))
        send(link, message)

    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0)) as s:
            start_all(s, "abcd")
            await s.until(lambda: common(s, 1, 4))
            await trio.sleep(60)
            monkeypatch.setattr(Link, "send", lie)
            of_liar.update(s.peers["d"].node.links.live.values())
            await trio.sleep(20)
            before = s.peers["a"].node.driver.head.round
            await trio.sleep(60)
            assert s.peers["a"].node.driver.head.round - before >= 8

    run_virtual(main)


@pytest.mark.parametrize("evaluates_s", [1.0, 70.0])
def test_the_time_without_a_quorum_counts_from_its_loss_also_after_a_round_landed_late(evaluates_s: float) -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0)) as s:
            start_all(s, "abc")
            await s.until(lambda: common(s, 1, 3))
            peer = s.peers["c"]
            lineage = peer.node.driver.head.lineage
            await s.until(lambda: peer.exchange.landing_pending)
            peer.paused = True
            await trio.sleep(evaluates_s)
            s.network.partition(["a", "b"], ["c"])
            await s.until(lambda: not peer.node.links.live)
            peer.paused = False
            await trio.sleep(20)
            assert peer.node.driver.head.lineage == lineage
            peer.paused = True

    run_virtual(main)


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_leaders_without_whom_no_quorum_is_left_are_not_ignored(names: str) -> None:
    """After an hour in which links broke again and again, each ignores the others, for up to an hour."""

    async def main() -> None:
        async with swarm() as s:
            start_all(s, names)
            await s.until(lambda: common(s, 1, len(names)))
            now = trio.current_time()
            for peer in s.peers.values():
                for other in s.peers.keys() - {peer.peer_id}:
                    peer.node.driver._rotation._backoff.note(other, now, 3600.0)
            before = {peer.peer_id: len(peer.rounds("committed")) for peer in s.peers.values()}
            await s.until(
                lambda: all(
                    any(r["group_size"] == len(names) for r in p.rounds("committed")[before[p.peer_id] :])
                    for p in s.peers.values()
                ),
                within_s=30,
            )

    run_virtual(main)


def test_the_only_voter_of_a_round_waits_for_those_who_land_the_one_before_later() -> None:
    """It has the mean at once. Where a round takes longer than an interval, the others missed each next one."""

    async def main() -> None:
        run = dataclasses.replace(RUN, sync_every=5, fragment_fraction=0.0)
        async with swarm(run, latency_s=0.05) as s:
            start_all(s, "abcd", step_s=2.0)
            await s.until_joined()
            s.worker.work_s = 3.0
            await s.until(lambda: common(s, 1, 4), within_s=600)

    run_virtual(main)
