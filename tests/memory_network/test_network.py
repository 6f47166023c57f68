"""The in-memory network: streams keep order and bytes, and the configured conditions take effect."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from p2ptrain.errors import PeerLostError
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.memory_network.network import BUFFER_BYTES, SEGMENT_BYTES, MemoryStream


def run_virtual(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


async def pair(network: MemoryNetwork, a: str = "a", b: str = "b") -> tuple[MemoryStream, MemoryStream]:
    """Open a stream from a to b and return both ends."""
    for name in (a, b):
        if name not in network.transports:
            network.transport(name)
    stream = await network.transports[a].open_stream(b, [])
    return stream, await network.transports[b].accept()


async def receive(stream: MemoryStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await stream.receive_some()
        assert piece, "the stream ended"
        data += piece
    return data


async def check_dead(stream: MemoryStream) -> None:
    """Check that a stream is broken: data in flight may still arrive, but sending fails."""
    with trio.fail_after(5):
        while await stream.receive_some():
            pass
        with pytest.raises(PeerLostError):
            while True:
                await stream.send_all(b"x")


# --- streams -----------------------------------------------------------------------------------------------------


def test_bytes_arrive_in_order_both_ways_and_both_know_the_other() -> None:
    async def main() -> None:
        rng = random.Random(0)
        network = MemoryNetwork()
        network.latency = lambda a, b: rng.random()  # type: ignore[method-assign]
        ours, theirs = await pair(network)
        assert (ours.remote, theirs.remote) == ("b", "a")
        packets = [rng.randbytes(rng.choice([1, 100, 200_000])) for _ in range(40)]

        async def send(stream: MemoryStream) -> None:
            for packet in packets:
                await stream.send_all(packet)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, ours)
            nursery.start_soon(send, theirs)
            for stream in (ours, theirs):
                assert await receive(stream, sum(map(len, packets))) == b"".join(packets)

    run_virtual(main)


def test_every_packet_takes_the_latency() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.25)
        ours, theirs = await pair(network)
        for _ in range(3):
            sent = trio.current_time()
            await ours.send_all(b"ping")
            assert await theirs.receive_some() == b"ping"
            assert trio.current_time() - sent == pytest.approx(0.25)

    run_virtual(main)


def test_the_uplink_is_shared_in_order_and_long_packets_come_bit_by_bit() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.5, bandwidth_bytes_s=SEGMENT_BYTES)
        to_b, at_b = await pair(network)
        to_c, at_c = await pair(network, "a", "c")
        start = trio.current_time()
        await to_b.send_all(bytes(3 * SEGMENT_BYTES))
        await to_c.send_all(b"behind")
        arrivals = []
        for _ in range(3):
            await at_b.receive_some()
            arrivals.append(trio.current_time() - start)
        assert arrivals == pytest.approx([1.5, 2.5, 3.5])
        assert await at_c.receive_some() == b"behind"
        assert trio.current_time() - start == pytest.approx(3.5, abs=0.01)
        # Each peer has its own uplink.
        start = trio.current_time()
        await at_c.send_all(b"free")
        await to_c.receive_some()
        assert trio.current_time() - start == pytest.approx(0.5, abs=0.01)

    run_virtual(main)


def test_a_narrow_link_is_narrow_both_ways_and_others_are_not() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.5)
        to_b, at_b = await pair(network)
        to_c, at_c = await pair(network, "a", "c")

        async def takes(sender, receiver, size_bytes: int = 2 * SEGMENT_BYTES) -> float:  # type: ignore[no-untyped-def]
            start = trio.current_time()
            await sender.send_all(bytes(size_bytes))
            while size_bytes:
                size_bytes -= len(await receiver.receive_some())
            return trio.current_time() - start

        network.narrow("b", SEGMENT_BYTES / 2)
        assert await takes(to_b, at_b) == pytest.approx(4.5)
        assert await takes(at_b, to_b) == pytest.approx(4.5)
        assert await takes(to_c, at_c) == pytest.approx(0.5)
        network.narrow("b", None)
        assert await takes(to_b, at_b) == pytest.approx(0.5)

    run_virtual(main)


def test_senders_wait_when_the_buffer_is_full() -> None:
    async def main() -> None:
        network = MemoryNetwork(bandwidth_bytes_s=1e6)
        ours, theirs = await pair(network)

        async def drain() -> None:
            while True:
                await theirs.receive_some()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            start = trio.current_time()
            await ours.send_all(bytes(BUFFER_BYTES))
            assert trio.current_time() - start < 0.1
            await ours.send_all(bytes(2_000_000))
            assert trio.current_time() - start == pytest.approx(2.0, abs=0.1)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_receiver_that_takes_nothing_holds_its_sender_up() -> None:
    async def main() -> None:
        ours, theirs = await pair(MemoryNetwork())
        with trio.move_on_after(1) as scope:
            for _ in range(10_000):
                await ours.send_all(b"x")
        assert scope.cancelled_caught
        await theirs.aclose()
        await check_dead(ours)

    run_virtual(main)


@pytest.mark.parametrize("closer", [0, 1])
def test_closing_ends_both_directions(closer: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        ends = await pair(network)
        await ends[closer].send_all(b"last words")
        await ends[closer].aclose()
        await ends[closer].aclose()
        other = ends[1 - closer]
        assert await other.receive_some() == b"last words"
        assert await other.receive_some() == b""
        for end in ends:
            await check_dead(end)
        assert not network.transports["a"].streams
        assert not network.transports["b"].streams

    run_virtual(main)


def test_a_sender_that_waits_learns_of_the_break() -> None:
    async def main() -> None:
        ours, theirs = await pair(MemoryNetwork())

        async def send_for_ever() -> None:
            with pytest.raises(PeerLostError):
                while True:
                    await ours.send_all(b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_for_ever)
            await trio.sleep(1)
            await theirs.aclose()

    run_virtual(main)


# --- network conditions ------------------------------------------------------------------------------------------


def test_faults_strike_the_packets_that_the_rule_names() -> None:
    async def main() -> None:
        network, seen = MemoryNetwork(), []
        fates = {b"drop": PacketFault.DROP, b"twice": PacketFault.DUPLICATE}

        def rule(source: str, target: str, packet: bytes) -> PacketFault:
            seen.append((source, target, packet))
            return fates.get(packet, PacketFault.NONE)

        network.fault = rule
        ours, theirs = await pair(network)
        packets = [b"one", b"drop", b"twice", b"two"]
        for packet in packets:
            await ours.send_all(packet)
        assert await receive(theirs, 16) == b"onetwicetwicetwo"
        assert seen == [("a", "b", packet) for packet in packets]
        network.fault = lambda source, target, packet: PacketFault.BREAK
        with pytest.raises(PeerLostError):
            await theirs.send_all(b"x")
        await check_dead(ours)

    run_virtual(main)


def test_a_rule_sees_a_long_packet_whole_and_once() -> None:
    async def main() -> None:
        network, sizes = MemoryNetwork(), []

        def rule(source: str, target: str, packet: bytes) -> PacketFault:
            sizes.append(len(packet))
            return PacketFault.DUPLICATE

        network.fault = rule
        ours, theirs = await pair(network)
        packet = random.Random(0).randbytes(3 * SEGMENT_BYTES + 5)
        await ours.send_all(packet)
        assert await receive(theirs, 2 * len(packet)) == packet + packet
        assert sizes == [len(packet)]

    run_virtual(main)


def test_a_partition_swallows_what_is_sent_and_healing_is_for_new_streams() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        ours, theirs = await pair(network)
        inside, _ = await pair(network, "a", "c")
        network.partition(["a", "c"], ["b"])
        await ours.send_all(b"lost")
        await theirs.send_all(b"lost")
        for end in (ours, theirs):
            with trio.move_on_after(100) as scope:
                await end.receive_some()
            assert scope.cancelled_caught
        with pytest.raises(PeerLostError):
            await pair(network)
        with pytest.raises(PeerLostError):
            await pair(network, "c", "b")
        await inside.send_all(b"within a group all is well")
        network.partition()
        await ours.send_all(b"still lost")
        again, at_b = await pair(network)
        await again.send_all(b"healed")
        assert await at_b.receive_some() == b"healed"

    run_virtual(main)


def test_no_peer_learns_across_a_partition_that_the_other_gave_up() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        ours, theirs = await pair(network)
        network.partition(["a"], ["b"])
        await ours.aclose()
        with trio.move_on_after(100) as scope:
            await theirs.receive_some()
        assert scope.cancelled_caught
        await theirs.aclose()
        await check_dead(theirs)
        assert not network.transports["b"].streams

    run_virtual(main)


def test_peers_that_no_group_names_are_together() -> None:
    network = MemoryNetwork()
    network.partition(["a", "b"], ["c"])
    assert network.connected("a", "b")
    assert network.connected("x", "y")
    assert not network.connected("a", "x")
    assert not network.connected("a", "c")
    network.partition()
    assert network.connected("a", "c")


def test_a_crashed_peer_breaks_its_streams_and_may_come_back() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        ours, _ = await pair(network)
        dead = network.transports["b"]
        network.crash("b")
        assert await ours.receive_some() == b""
        await check_dead(ours)
        with pytest.raises(PeerLostError):
            await network.transports["a"].open_stream("b", [])
        with pytest.raises(PeerLostError):
            await dead.open_stream("a", [])
        again, theirs = await pair(network)
        await again.send_all(b"back")
        assert await theirs.receive_some() == b"back"

    run_virtual(main)


def test_a_peer_that_crashes_while_it_is_dialled_is_not_reached() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=1)
        network.transport("a")
        network.transport("b")
        async with trio.open_nursery() as nursery:

            async def dial() -> None:
                with pytest.raises(PeerLostError):
                    await network.transports["a"].open_stream("b", [])

            nursery.start_soon(dial)
            await trio.sleep(0.5)
            network.crash("b")
            network.transport("b")

    run_virtual(main)


# --- the directory -----------------------------------------------------------------------------------------------


def test_records_are_kept_by_signer_until_they_expire() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.1)
        a, b = network.directory("a"), network.directory("b")
        assert await b.lookup("key") == {}
        assert await a.announce("key", b"first", 10)
        assert await b.announce("key", b"other", 30)
        assert await a.announce("another key", b"elsewhere", 30)
        assert await b.lookup("key") == {"a": b"first", "b": b"other"}
        assert await a.announce("key", b"second", 20)
        assert await b.lookup("key") == {"a": b"second", "b": b"other"}
        await trio.sleep(20)
        assert await b.lookup("key") == {"b": b"other"}
        await trio.sleep(10)
        assert await b.lookup("key") == {}

    run_virtual(main)
