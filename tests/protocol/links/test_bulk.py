"""Bulk connections beside links: what passes on them, when they are opened, and what their end costs. Virtual time."""

from __future__ import annotations

import functools
import random

import msgspec
import pytest
import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.memory_network.network import MemoryStream
from p2ptrain.protocol.links.bulk import MAX_PER_LINK, OPEN_TIMEOUT_S, RETRY_S
from p2ptrain.protocol.links.link import BULK_FROM_BYTES, CLOSE_AFTER_S, REUSE_S, Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.wire.frames import encode_frame
from p2ptrain.protocol.wire.messages import Ack, Attempt, Beat, Contribution, Leave, Message, PairWeights
from tests.protocol.swarm import RUN, run_virtual, swarm
from tests.protocol.wiring import Endpoint, bulk_pair, offering, start_endpoint, until

CHUNK = bytes(range(256)) * 264


def chunk(number: int) -> Contribution:
    return Contribution("lineage", 0, Attempt(0, "a", "a.1"), number, number + 1, b"", ())


async def send(link: Link, count: int = 1, payload: bytes = CHUNK) -> None:
    for number in range(count):
        await link.send_bulk(chunk(number), payload, Traffic.ROUND)


async def arrived(receiver: Endpoint, count: int) -> None:
    await until(lambda: len(receiver.of(Contribution)) == count)


def connections(network: MemoryNetwork) -> int:
    """Bulk connections that are open, of which both ends count."""
    return sum(stream.is_bulk for transport in network.transports.values() for stream in transport.streams)


class OnBulk:
    """Counts the kinds of frames that pass on bulk connections, and on streams."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.on_bulk: list[int] = []
        self.on_stream: list[int] = []
        send_all = MemoryStream.send_all

        async def counted(stream: MemoryStream, data: bytes) -> None:
            if stream.owner.network is network:
                (self.on_bulk if stream.is_bulk else self.on_stream).append(len(data))
            await send_all(stream, data)

        MemoryStream.send_all = counted  # type: ignore[method-assign]
        self.restore = lambda: setattr(MemoryStream, "send_all", send_all)


def test_bulk_bytes_take_a_connection_of_their_own_in_both_directions() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (a, b, link, other):
            counted = OnBulk(network)
            try:
                await send(link, 20)
                await send(other, 20)
                await arrived(a, 20)
                await arrived(b, 20)
            finally:
                counted.restore()
            for endpoint in (a, b):
                assert [m.start for m in endpoint.of(Contribution)] == list(range(20))  # type: ignore[union-attr]
                assert all(p == CHUNK for _, m, p in endpoint.received if isinstance(m, Contribution))
            assert sum(size > len(CHUNK) for size in counted.on_bulk) == 40
            assert not any(size > len(CHUNK) for size in counted.on_stream)
            assert connections(network) == 2
            assert link.flow.in_flight == 0
            assert a.links.counters.sent[Traffic.ROUND] == b.links.counters.received[Traffic.ROUND] > 20 * len(CHUNK)

    run_virtual(main)


def test_a_small_payload_opens_none() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, link, _):
            await send(link, 3, bytes(BULK_FROM_BYTES - 1))
            await arrived(b, 3)
            assert connections(network) == 0

    run_virtual(main)


@pytest.mark.parametrize("who", ["neither", "a", "b"])
def test_without_an_offer_bytes_take_the_stream(who: str) -> None:
    """Whoever switched it off, and whoever sends."""

    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network, offers=() if who == "neither" else (who,)) as (a, b, link, other):
            await send(link, 5)
            await send(other, 5)
            await arrived(a, 5)
            await arrived(b, 5)
            assert connections(network) == 0

    run_virtual(main)


def test_who_cannot_be_dialled_is_tried_again_after_ten_minutes() -> None:
    """The first chunk waits for the attempt, and no other one."""

    async def main() -> None:
        network = MemoryNetwork()
        network.can_dial_bulk = lambda source, target: False
        async with bulk_pair(network) as (_, b, link, _):
            began_s = trio.current_time()
            await send(link, 5)
            await arrived(b, 5)
            assert trio.current_time() < began_s + OPEN_TIMEOUT_S
            tries: list[float] = []

            def can_dial(source: str, target: str) -> bool:
                tries.append(trio.current_time())
                return True

            network.can_dial_bulk = can_dial
            await send(link, 5)
            await arrived(b, 10)
            assert not tries
            await trio.sleep(RETRY_S)
            await send(link, 5)
            await arrived(b, 15)
            assert len(tries) == 1
            assert connections(network) == 2

    run_virtual(main)


def test_one_side_that_can_dial_is_enough() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.can_dial_bulk = lambda source, target: source == "b"
        async with bulk_pair(network) as (a, b, link, other):
            await send(other, 1)
            await arrived(a, 1)
            counted = OnBulk(network)
            try:
                await send(link, 5)
                await arrived(b, 5)
            finally:
                counted.restore()
            assert sum(size > len(CHUNK) for size in counted.on_bulk) == 5

    run_virtual(main)


def test_a_connection_that_is_not_used_is_closed_and_the_link_stays() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, link, other):
            for count in range(1, 4):
                await send(link)
                await arrived(b, count)
                assert connections(network) == 2
                await trio.sleep(CLOSE_AFTER_S + 1)
                assert connections(network) == 0
            assert not link.lost.is_set()
            assert not other.lost.is_set()

    run_virtual(main)


def test_no_frame_is_sent_on_a_connection_that_the_other_side_may_be_closing() -> None:
    """Whatever the delay, and whenever the next frame comes."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.5)
        async with bulk_pair(network) as (a, b, link, other):
            pauses = [REUSE_S - 3, REUSE_S + 1, CLOSE_AFTER_S - 5, CLOSE_AFTER_S - 2, CLOSE_AFTER_S, CLOSE_AFTER_S + 2]
            for number, pause_s in enumerate(pauses, start=1):
                await send(link)
                await arrived(b, number)
                await trio.sleep(pause_s)
                await send(other)
                await arrived(a, number)
                await trio.sleep(pause_s)
            assert (a.lost, b.lost) == ([], [])

    run_virtual(main)


def test_a_connection_that_breaks_costs_the_link_and_is_not_tried_soon_again() -> None:
    """Frames in it may be lost, and a round must learn that."""

    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (a, b, link, other):
            await send(link)
            await arrived(b, 1)
            for stream in [s for s in network.transports["a"].streams if s.is_bulk]:
                stream.break_both()
            await until(lambda: link.lost.is_set() and other.lost.is_set())
            assert "its direct connection broke" in link.lost_reason + other.lost_reason
            again = await a.links.connect("b", [])
            await send(again, 5)
            await arrived(b, 6)
            assert connections(network) == 0

    run_virtual(main)


def test_a_path_that_carries_nothing_any_more_costs_the_link() -> None:
    async def main() -> None:
        network = MemoryNetwork(bandwidth_bytes_s=1e6)
        async with bulk_pair(network, peer_timeout_s=10.0) as (_, b, link, other):
            await send(link)
            await arrived(b, 1)
            for stream in [s for s in network.transports["b"].streams if s.is_bulk]:
                stream.receive_some = trio.sleep_forever  # type: ignore[method-assign,assignment]
            with pytest.raises(PeerLostError):
                await send(link, 1000)
            assert "its direct connection broke" in link.lost_reason + other.lost_reason

    run_virtual(main)


def test_a_peer_that_leaves_is_known_to_have_left() -> None:
    """Its bulk connection may end before its stream says so."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.1)
        async with bulk_pair(network) as (a, b, link, other):
            await send(link)
            await arrived(b, 1)
            await trio.sleep(1)
            for stream in [s for s in network.transports["b"].streams if s.is_bulk]:
                await stream.aclose()
            other.send(Leave("done"))
            await until(lambda: link.lost.is_set())
            assert link.left
            assert link.lost_reason == "it left the run"
            assert a.lost == ["b"]

    run_virtual(main)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(encode_frame(Leave("x")), id="control"),
        pytest.param(encode_frame(Beat(0, 0, 0, "", "", -1, 0, 0, "", 0.0, (), 0)), id="a heartbeat"),
        pytest.param(encode_frame(chunk(0), CHUNK, bulk=True), id="flow control"),
        pytest.param(encode_frame(chunk(0), bytes(10_000), compress=True), id="compressed"),
        pytest.param(bytes(64), id="noise"),
    ],
)
def test_other_frames_on_it_are_a_strike(frame: bytes) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, link, other):
            await send(link)
            await arrived(b, 1)
            (stream,) = [s for s in network.transports["a"].streams if s.is_bulk]
            await stream.send_all(frame)
            await until(lambda: other.lost.is_set())
            assert b.links.strikes == {"a": 1}

    run_virtual(main)


def test_connections_end_with_their_link_and_cannot_outlive_it() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, link, other):
            await send(link)
            await arrived(b, 1)
            other.close("test")
            await until(lambda: connections(network) == 0)
            stranger = await network.transports["a"].bulk.open("b", b"b", [])
            assert await stranger.receive_some() == b""

    run_virtual(main)


def test_a_link_has_few_connections_however_many_its_peer_opens() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, _, _, other):
            for _ in range(3 * MAX_PER_LINK):
                await network.transports["a"].bulk.open("b", b"b", [])
            await trio.sleep(1)
            assert other.num_bulk_connections == MAX_PER_LINK
            assert not other.lost.is_set()

    run_virtual(main)


@pytest.mark.parametrize(("bandwidth_bytes_s", "latency_s"), [(625e3, 0.02), (12.5e6, 0.05)])
def test_heartbeats_pass_a_full_path(bandwidth_bytes_s: float, latency_s: float) -> None:
    async def main() -> None:
        network = MemoryNetwork(bandwidth_bytes_s=bandwidth_bytes_s, latency_s=latency_s)
        async with bulk_pair(network) as (_, b, link, _):
            heard_s: list[float] = []

            async def on_frame(message: Message, payload: bytes) -> None:
                if isinstance(message, Beat):
                    heard_s.append(trio.current_time() - message.sent_s - latency_s)

            b.on_frame = on_frame
            count = int(20 * bandwidth_bytes_s / len(CHUNK))
            await send(link, count)
            await arrived(b, count)
            assert len(heard_s) >= 15
            assert max(heard_s) < 0.5

    run_virtual(main)


def test_a_lost_packet_does_not_stop_the_others() -> None:
    """A stand-in for a frame that never comes: the link knows nothing of it, and a round has its own time limits."""

    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, link, _):
            await send(link)
            await arrived(b, 1)
            lost = encode_frame(chunk(7), CHUNK)
            network.fault = lambda source, target, packet: (
                PacketFault.DROP if packet[20:] == lost[20:] else PacketFault.NONE
            )
            await send(link, 10)
            await arrived(b, 10)
            assert not link.lost.is_set()

    run_virtual(main)


def test_an_acknowledgement_comes_first() -> None:
    """Before it, the dialler sends nothing: the other side may not know its link yet."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.1)
        async with bulk_pair(network) as (_, b, link, _):
            counted = OnBulk(network)
            try:
                await send(link)
                await arrived(b, 1)
            finally:
                counted.restore()
            assert counted.on_bulk[0] == len(encode_frame(Ack()))

    run_virtual(main)


def test_frames_keep_their_order_when_their_way_changes() -> None:
    """Chunks go out on the stream, as only the other side can dial; it does, while they are on their way."""

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        network = MemoryNetwork(bandwidth_bytes_s=2e6)
        network.latency = lambda source, target: rng.uniform(0.01, 0.15)  # type: ignore[method-assign]
        network.can_dial_bulk = lambda source, target: source == "b"
        async with bulk_pair(network) as (_, b, link, other):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, link, 40)
                await trio.sleep(rng.uniform(0.7, 1.2))
                nursery.start_soon(send, other, 1)
            await arrived(b, 40)
            assert connections(network) == 2
            assert [m.start for m in b.of(Contribution)] == list(range(40))  # type: ignore[union-attr]

    for seed in range(6):
        run_virtual(functools.partial(main, seed), seed)


def test_weights_of_a_pair_keep_to_the_stream() -> None:
    """They follow the answer to an offer, which is a control frame."""

    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, link, _):
            await send(link)
            await arrived(b, 1)
            counted = OnBulk(network)
            try:
                await link.send_bulk(PairWeights(1, 0), CHUNK, Traffic.ROUND)
                await send(link)
                await arrived(b, 2)
                await until(lambda: len(b.of(PairWeights)) == 1)
            finally:
                counted.restore()
            assert max(counted.on_stream) > len(CHUNK)
            assert max(counted.on_bulk) > len(CHUNK)

    run_virtual(main)


def test_an_error_while_one_is_opened_costs_that_connection() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (a, b, link, _):

            async def fail(*_: object) -> MemoryStream:
                raise OSError("too many open files")

            network.transports["a"].bulk.open = fail  # type: ignore[method-assign,assignment]
            await send(link, 3)
            await arrived(b, 3)
            assert (a.lost, b.lost, connections(network)) == ([], [], 0)

    run_virtual(main)


def test_one_that_ends_at_once_costs_nothing() -> None:
    """Before it is served, or its Ack has gone out."""

    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, _, other):
            for _ in range(20):
                await (await network.transports["a"].bulk.open("b", b"b", [])).aclose()
            await trio.sleep(5)
            assert other.num_bulk_connections == b.links.bulk.count == 0
            assert connections(network) == 0

    run_virtual(main)


def test_attempts_count_as_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.protocol.links.bulk.MAX_CONNECTIONS", 3)

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.1)
        async with trio.open_nursery() as nursery:
            hub = await start_endpoint(network, nursery, offering("a"), bulk=True)
            others = [await start_endpoint(network, nursery, offering(name), bulk=True) for name in "bcdef"]
            links = [await hub.links.connect(other.peer_id, []) for other in others]
            await trio.sleep(1)
            hub.links.bulk.open_soon(links)
            await trio.sleep(5)
            assert sum(link.has_bulk_connection for link in links) == 3
            for link, other in zip(links, others, strict=True):  # the others take the stream
                await send(link)
                await arrived(other, 1)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_of_two_members_one_opens_it_before_a_round() -> None:
    async def main() -> None:
        async with swarm(RUN) as s:
            for name in "abc":
                s.start(name, founder=name == "a")
            await s.until(lambda: all(len(s.peers[name].rounds("committed")) >= 3 for name in "abc"))
            bulk = {(a, b.remote) for a in "abc" for b in s.network.transports[a].streams if b.is_bulk}
            assert len(bulk) == 6
            # From each to each one at most, but for those over which the state came.
            assert connections(s.network) <= 8

    run_virtual(main)


def test_an_observer_gets_none() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            member = await start_endpoint(network, nursery, offering("a"), bulk=True)
            hello = msgspec.structs.replace(offering("b"), digest="", role="observer")
            watch = await start_endpoint(network, nursery, hello, bulk=True)
            await watch.links.connect("a", [])
            stream = await network.transports["b"].bulk.open("a", b"a", [])
            assert await stream.receive_some() == b""
            assert member.lost == []
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_what_a_peer_can_send_is_known_from_either_way() -> None:
    async def main() -> None:
        network = MemoryNetwork(bandwidth_bytes_s=5e6)
        async with bulk_pair(network) as (_, b, link, _):
            await send(link, 100)
            await arrived(b, 100)
            assert link.flow.rate_bytes_s == 0
            assert 4e6 < link.rate_bytes_s < 6e6
            await trio.sleep(CLOSE_AFTER_S + 1)
            assert 4e6 < link.rate_bytes_s < 6e6

    run_virtual(main)


def test_many_small_frames_leave_others_their_turn() -> None:
    """However many are here at once, and they are counted."""

    async def main() -> None:
        network = MemoryNetwork()
        async with bulk_pair(network) as (_, b, link, other):
            await send(link)
            await arrived(b, 1)
            (stream,) = [s for s in network.transports["a"].streams if s.is_bulk]
            first, handled, handled_by_then = trio.Event(), 0, 0

            async def on_frame(message: Message, payload: bytes) -> None:
                nonlocal handled
                handled += payload == b"small"
                if handled:
                    first.set()

            async def take_turns() -> None:
                nonlocal handled_by_then
                await first.wait()
                for _ in range(100):
                    await trio.lowlevel.checkpoint()
                handled_by_then = handled

            b.on_frame = on_frame
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take_turns)
                await stream.send_all(encode_frame(chunk(0), b"small") * 20_000)
                await until(lambda: other.lost.is_set())
            assert 90 < handled_by_then < 110
            assert handled < 7_000
            assert b.links.strikes == {"a": 1}

    run_virtual(main)
