"""Watching a swarm from outside: all peers are followed, none is disturbed, invalid data costs only its sender."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.event_log.events import Event
from p2ptrain.protocol.event_log.observer import MOST_MEMBERS, Observer, Own, Sighting
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.membership.directory import RECORD_TTL_S, bucket_of, encode_record, member_key
from p2ptrain.protocol.membership.status import UNREACHABLE
from p2ptrain.protocol.wire.messages import Answer, Beat, Fragment, Message, Request
from tests.protocol.swarm import RUN, Swarm, inline, run_virtual, swarm
from tests.protocol.wiring import Endpoint, hello_of, start_endpoint


@dataclass
class Watch:
    """An observer, and everything that it has seen so far."""

    observer: Observer
    members: dict[str, Sighting] = field(default_factory=dict)
    events: dict[tuple[str, str], list[Event]] = field(default_factory=lambda: defaultdict(list))

    def look(self) -> Watch:
        view = self.observer.take()
        self.members = {member.peer_id: member for member in view.members}
        for batch in view.batches:
            self.events[batch.peer_id, batch.incarnation] += batch.events
        return self

    @property
    def relayed(self) -> dict[str, Mapping[str, str]]:
        return {peer_id: member.relayed for peer_id, member in self.members.items()}

    def of(self, peer_id: str, kind: str) -> list[Event]:
        return [e for (who, _), events in self.events.items() for e in events if who == peer_id and e["event"] == kind]


@asynccontextmanager
async def watching(s: Swarm, name: str = "observer") -> AsyncIterator[Watch]:
    observer = Observer("test", inline, trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(observer.watch_as_observer, s.network.transport(name), s.network.directory(name))
        yield Watch(observer)
        nursery.cancel_scope.cancel()


def test_an_observer_sees_all_events_and_is_no_member() -> None:
    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s, watching(s) as watch:
            s.start("a", founder=True)
            s.start("b")
            s.start("c")
            await s.until(lambda: all(len(p.rounds("committed")) >= 3 for p in s.peers.values()))
            s.kill("b")
            s.start("d")
            await s.until(lambda: all(len(p.rounds("committed")) >= 3 for p in s.peers.values()))
            await trio.sleep(3)
            watch.look()
            assert {name for name, member in watch.members.items() if member.linked} == {"a", "c", "d"}
            for name, peer in s.peers.items():
                told = [(e["round"], e["state_hash"]) for e in watch.of(name, "round")]
                # What happened in the last second is still on its way.
                assert (
                    told == [(e["round"], e["state_hash"]) for e in peer.events if e["event"] == "round"][: len(told)]
                )
                assert len(told) >= 3
                assert watch.members[name].step == pytest.approx(peer.exchange.run_step, abs=15)
                assert watch.members[name].status
                assert "observer" not in peer.node.alive
                to = {receiver for e in watch.of(name, "fragments") for receiver in e["to"]}
                assert to
                assert to <= set("abcd") - {name}
            assert len(watch.of("b", "round")) >= 2

    run_virtual(main)


def test_what_was_before_is_told_and_nothing_twice() -> None:
    async def main() -> None:
        async with swarm(dataclasses.replace(RUN, fragment_fraction=0.0), shapes=[("head", (64, 64))]) as s:
            s.start("a", founder=True)
            s.start("b")
            await s.until(lambda: all(len(p.rounds("committed")) >= 4 for p in s.peers.values()))
            async with watching(s) as watch:
                await trio.sleep(15)
                # Cut off for a while, in which its event log is not read.
                s.network.partition(["observer"], ["a", "b"])
                await trio.sleep(60)
                assert not any(member.linked for member in watch.look().members.values())
                s.network.partition()
                await trio.sleep(120)
                watch.look()
                assert all(member.linked for member in watch.members.values())
                rounds = [event["round"] for event in watch.of("a", "round") if event["status"] == "committed"]
                assert rounds == sorted(set(rounds))
                assert rounds[0] == 0
                assert len(rounds) >= len(s.peers["a"].rounds("committed")) - 2

    run_virtual(main)


def test_a_restarted_peer_begins_a_new_event_log() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch:
            s.start("a", founder=True)
            s.start("b")
            await s.until(lambda: len(s.peers["a"].rounds("committed")) >= 2)
            s.kill("b")
            await trio.sleep(2)
            s.start("b")
            await s.until(lambda: len(s.peers["b"].rounds("committed")) >= 2)
            await trio.sleep(12)
            watch.look()
            adopted = {
                incarnation: [e["event"] for e in events].count("adopt")
                for (who, incarnation), events in watch.events.items()
                if who == "b"
            }
            assert adopted == {"b.2": 1, "b.3": 1}

    run_virtual(main)


def endpoint_with(event_log: EventLog | None, answer: bytes = b"") -> Callable[[Endpoint], None]:
    async def on_request(link: Link, request: Request) -> None:
        payload = event_log.page(request.index) if event_log is not None else answer
        await link.send_bulk(Answer(request.request, True, "events"), payload, Traffic.STATE)

    def equip(endpoint: Endpoint) -> None:
        endpoint.on_request = on_request

    return equip


def test_an_observer_sees_which_links_are_relayed_and_when_one_is_no_longer() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch:
            s.network.relays[frozenset("ab")] = "r"
            s.network.can_dial_bulk = lambda source, target: {source, target} != {"b", "c"}
            for name in "abc":
                s.start(name, founder=name == "a")
            await s.until(lambda: watch.look().relayed == {"a": {"b": "r"}, "b": {"a": "r", "c": ""}, "c": {"b": ""}})
            del s.network.relays[frozenset("ab")]
            await s.until(lambda: watch.look().relayed == {"a": {}, "b": {"c": ""}, "c": {"b": ""}})

    run_virtual(main)


async def announced(s: Swarm, nursery: trio.Nursery, name: str, equip: Callable[[Endpoint], None]) -> Endpoint:
    endpoint = await start_endpoint(s.network, nursery, hello_of(name, digest=RUN.digest))
    equip(endpoint)
    await announce(s, name)
    return endpoint


async def announce(s: Swarm, name: str) -> None:
    record = encode_record([f"/memory/{name}"], "trainer")
    await s.network.directory(name).announce(member_key("test", bucket_of(name)), record, RECORD_TTL_S)


def page_of(last: int, *events: Event, more: bool = False) -> bytes:
    return json.dumps({"last": last, "more": more, "events": events}).encode()


AGAIN = {"event": "stop", "t": 0.0, "reason": "again and again"}
ANOTHERS = {"event": "start", "t": 0.0, "peer_id": "a", "run_id": "test", "maddrs": [], "run": {"total_steps": 5}}


@pytest.mark.parametrize("answer", [b"\xff", page_of(3, more=True), page_of(0, AGAIN, more=True), page_of(1, ANOTHERS)])
def test_nonsense_costs_only_its_sender(answer: bytes) -> None:
    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch, trio.open_nursery() as nursery:
            await announced(s, nursery, "liar", endpoint_with(None, answer))
            good = EventLog(trio.current_time)
            await announced(s, nursery, "good", endpoint_with(good))
            await trio.sleep(6)
            good.write("peers", alive=["x"])
            await trio.sleep(6)
            watch.look()
            assert watch.of("good", "peers")
            assert watch.members["good"].trouble == ""
            assert "are malformed" in watch.members["liar"].trouble
            assert not watch.of("liar", "start")
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_silent_and_unreachable_peers_delay_no_other() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch, trio.open_nursery() as nursery:
            await announced(s, nursery, "mute", lambda endpoint: None)
            await announce(s, "nowhere")
            good = EventLog(trio.current_time)
            await announced(s, nursery, "good", endpoint_with(good))
            await trio.sleep(20)
            good.write("peers", alive=["x"])
            await trio.sleep(3)
            watch.look()
            assert watch.of("good", "peers")
            assert "no answer" in watch.members["mute"].trouble
            assert (watch.members["nowhere"].linked, watch.members["nowhere"].status) == (False, UNREACHABLE)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_thirty_peers_of_which_one_dies_and_one_joins() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch, trio.open_nursery() as nursery:
            event_logs = {f"p{n}": EventLog(trio.current_time) for n in range(31)}

            async def live(name: str) -> None:
                await announced(s, nursery, name, endpoint_with(event_logs[name]))
                while True:
                    await announce(s, name)
                    for _ in range(100):
                        event_logs[name].write("step", step=1, loss=2.0, tokens=8, step_s=0.1, exchange_s=0.0)
                        await trio.sleep(0.1)

            scopes: dict[str, trio.CancelScope] = {}

            async def start(name: str) -> None:
                with trio.CancelScope() as scopes[name]:
                    await live(name)

            for n in range(30):
                nursery.start_soon(start, f"p{n}")
            await trio.sleep(15)
            assert sum(member.linked for member in watch.look().members.values()) == 30
            s.network.crash("p7")
            scopes["p7"].cancel()
            nursery.start_soon(start, "p30")
            await trio.sleep(45)
            watch.look()
            assert {n for n, member in watch.members.items() if member.linked} == set(event_logs) - {"p7"}
            assert all(sum(e["steps"] for e in watch.of(name, "step")) > 300 for name in set(event_logs) - {"p7"})
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_crowd_of_made_up_members_is_bounded() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch:
            for n in range(3 * MOST_MEMBERS):
                await announce(s, f"nobody{n}")
            await trio.sleep(10)
            assert len(watch.look().members) == MOST_MEMBERS

    run_virtual(main)


def test_an_observer_whose_directory_raises_goes_on_with_those_that_it_knows(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            s.start("a", founder=True)
            await trio.sleep(3)
            directory, failed = s.network.directory("observer"), 0
            lookup = directory.lookup

            async def broken(key: str) -> Mapping[str, bytes]:
                nonlocal failed
                if trio.current_time() % 14 < 7:
                    failed += 1
                    raise RuntimeError("the DHT is gone")
                return await lookup(key)

            directory.lookup = broken  # type: ignore[method-assign]
            watch = Watch(Observer("test", inline, trio.current_time))
            nursery.start_soon(watch.observer.watch_as_observer, s.network.transport("observer"), directory)
            for name in "bc":
                await trio.sleep(20)
                s.start(name)
            await trio.sleep(20)
            assert {name for name, member in watch.look().members.items() if member.linked} == set("abc")
            assert watch.of("c", "round")
            assert failed > 5
            nursery.cancel_scope.cancel()

    run_virtual(main)
    (logged,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert "looking for members failed; it is tried again" in logged
    assert "the DHT is gone" in logged


def test_no_peer_is_asked_while_the_reader_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.protocol.event_log.observer.MOST_WAITING", 50)

    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch, trio.open_nursery() as nursery:
            event_log = EventLog(trio.current_time)
            await announced(s, nursery, "a", endpoint_with(event_log))
            for n in range(100):
                event_log.write("peers", alive=[f"p{n}"])
                await trio.sleep(1)
            assert len(watch.look().of("a", "peers")) < 60
            await trio.sleep(3)
            assert len(watch.look().of("a", "peers")) == 100
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_member_watches_over_the_links_that_it_has() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            s.start("a", founder=True)
            s.start("b")
            observer = Observer("test", inline, trio.current_time)
            nursery.start_soon(observer.watch, s.peers["a"].node.links)
            await s.until(lambda: len(s.peers["b"].rounds("committed")) >= 2)
            await trio.sleep(2)
            watch = Watch(observer).look()
            assert list(watch.members) == ["b"]
            assert len(watch.of("b", "round")) >= 2
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_what_a_peer_wrote_itself_is_read_though_its_clock_was_set_back() -> None:
    event_log = EventLog(lambda: 10_000.0)
    event_log.write("stop", reason="done")
    event_log.write("sample", step=1, every=1, values=["x"])
    own = Own("a.1", event_log, lambda: Sighting("a", True, ""))
    (batch,) = Observer("test", inline, lambda: 1_000.0, own).take().batches
    assert [event["event"] for event in batch.events] == ["stop"]


# --- the side that is asked ------------------------------------------------------------------------------------------


def test_a_greedy_observer_gets_what_is_its_share() -> None:
    """It asks without end, and training and the other observer go on."""

    async def main() -> None:
        async with swarm(RUN, latency_s=0.01) as s, watching(s) as watch, trio.open_nursery() as nursery:
            s.start("a", founder=True)
            s.start("b")
            await s.until(lambda: len(s.peers["a"].rounds("committed")) >= 2)
            greedy = await start_endpoint(s.network, nursery, hello_of("greedy", digest="", role="observer"))
            link = await greedy.links.connect("a", [])
            for number in range(2000):
                link.send(Request(number, "events", "", 0))
            answers: list[bool] = []

            async def on_frame(message: object, payload: bytes) -> None:
                if isinstance(message, Answer):
                    answers.append(message.found)

            greedy.on_frame = on_frame
            before = len(s.peers["a"].rounds("committed"))
            await s.until(lambda: len(s.peers["a"].rounds("committed")) >= before + 2, within_s=30)
            watch.look()
            assert len(watch.of("a", "round")) > before - 1
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_observers_get_events_and_nothing_else() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            s.start("a", founder=True)
            await s.until(lambda: bool(s.peers["a"].rounds()))
            observer = await start_endpoint(s.network, nursery, hello_of("observer", digest="", role="observer"))
            link = await observer.links.connect("a", [])
            found: dict[str, bool] = {}
            for what in ("settings", "events", "part", "record", "chunk", "hashes"):
                answer, _ = await observer.links.request(link, what, timeout_s=5)
                found[what] = answer.found
            assert [what for what, given in found.items() if given] == ["settings", "events"]
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize(
    ("role", "message", "payload"),
    [
        ("observer", Fragment("", 0, "cyclic", 0, 0, 1, 200, 0.0), bytes(66)),
        ("trainer", Beat(0, 0, 0, "", "", -1, 0, 0, "", 0.0, (("x", ()),) * 5, 0), b""),
    ],
)
def test_what_its_sender_may_not_say_is_a_strike(role: str, message: Message, payload: bytes) -> None:
    async def main() -> None:
        async with swarm(RUN) as s, trio.open_nursery() as nursery:
            s.start("a", founder=True)
            node = s.peers["a"].node
            await s.until(node.ready.is_set)
            digest = node.run.digest if role == "trainer" else ""
            sender = await start_endpoint(s.network, nursery, hello_of("b", digest=digest, role=role))
            link = await sender.links.connect("a", [])
            await link.send_bulk(message, payload, Traffic.FRAGMENT)
            await link.lost.wait()
            assert node.links.strikes == {"b": 1}
            assert not node.membership.known.keys() & set("xyz")
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_node_that_is_built_anew_goes_on_with_its_event_log() -> None:
    async def main() -> None:
        async with swarm(RUN) as s, watching(s) as watch:
            s.start("a", founder=True)
            peer = s.start("b", restarts=True)
            await s.until(lambda: all(len(p.rounds("committed")) >= 3 for p in s.peers.values()))
            await trio.sleep(3)
            failed_s, node = trio.current_time(), peer.current
            node._fail(ZeroDivisionError("a bug"))
            await s.until(lambda: peer.current is not node and peer.current.ready.is_set())
            await s.until(lambda: any(r["t"] > failed_s + 10 for r in peer.rounds("committed")))
            await trio.sleep(5)
            assert watch.look().members["b"].linked
            rounds = [(event["lineage"], event["round"]) for event in watch.of("b", "round")]
            assert len(rounds) == len(set(rounds))
            assert {incarnation for who, incarnation in watch.events if who == "b"} == {node.incarnation}

    run_virtual(main)
