"""One link: priorities, flow control, and detection of dead paths. All on virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.protocol.links.flow_control import FIRST_WINDOW_BYTES, MIN_WINDOW_BYTES, WINDOW_S
from p2ptrain.protocol.links.frame_reader import FrameReader
from p2ptrain.protocol.links.limits import MessageRates
from p2ptrain.protocol.links.link import PEER_TIMEOUT_S, Link, LinkSetup
from p2ptrain.protocol.links.outbox import MAX_CONTROL_QUEUE, MAX_FRAGMENT_QUEUE, Traffic
from p2ptrain.protocol.wire.frames import PREFIX_BYTES, decode_prefix, encode_frame
from p2ptrain.protocol.wire.messages import Ack, Attempt, Beat, Contribution, Due, Fragment, Leave, Message
from tests.protocol.swarm import run_virtual
from tests.protocol.wiring import Endpoint, hello_of, linked_pair, until

KIB = 1024
CHUNK = bytes(66 * KIB)


def chunk(number: int) -> Contribution:
    return Contribution("lineage", 0, Attempt(0, "a", "a.1"), number, number + 1, b"", ())


def fragment(number: int) -> Callable[[], Fragment]:
    return lambda: Fragment("lineage", 0, "cyclic", 0, number, 1, 200, 0.0)


def numbers(messages: list[Message]) -> list[int]:
    return [m.slot if isinstance(m, Fragment) else m.start for m in messages]  # type: ignore[union-attr]


async def send_chunks(link: Link, count: int, payload: bytes = CHUNK) -> None:
    for number in range(count):
        await link.send_bulk(chunk(number), payload, Traffic.ROUND)


class Meter:
    """Watches "a" send bulk frames to "b", as a's own books see them: what is on its way when another goes out."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._sent = 0
        self._acks: list[tuple[float, int]] = []
        self.in_flight_before: list[int] = []
        network.fault = self

    def __call__(self, source: str, target: str, packet: bytes) -> PacketFault:
        prefix, now = decode_prefix(packet[:PREFIX_BYTES]), trio.current_time()
        if source == "b":
            self._acks.append((now + self._network.latency("b", "a"), prefix.acked_bytes))
        elif prefix.bulk:
            acked = max((acked for arrives, acked in self._acks if arrives <= now), default=0)
            self.in_flight_before.append(self._sent - acked)
            self._sent += len(packet)
        return PacketFault.NONE


# --- flow control ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bandwidth_bytes_s", "latency_s"),
    [(64e3, 0.05), (250e3, 0.001), (1e6, 0.001), (1e6, 0.05), (1e6, 0.15), (1e7, 0.05), (1e7, 0.15)],
)
def test_bulk_fills_the_path_and_never_more_than_the_window(bandwidth_bytes_s: float, latency_s: float) -> None:
    """At most max(64 KiB, 0.25 s × the rate) unacknowledged, and what the round trip itself holds; at first 256 KiB."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=latency_s, bandwidth_bytes_s=bandwidth_bytes_s)
        meter = Meter(network)
        async with linked_pair(network) as (_, b, link, _):
            await trio.sleep(2)
            start, count = trio.current_time(), int(6 * bandwidth_bytes_s / len(CHUNK)) + 10
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_chunks, link, count)
                await until(lambda: len(b.of(Contribution)) == count)
            took_s = trio.current_time() - start
            assert numbers(b.of(Contribution)) == list(range(count))
            assert all(payload == CHUNK for _, message, payload in b.received if isinstance(message, Contribution))
            window = max(MIN_WINDOW_BYTES, (WINDOW_S + 2 * latency_s + 0.01) * bandwidth_bytes_s)
            assert max(meter.in_flight_before) < max(window, FIRST_WINDOW_BYTES)
            assert max(meter.in_flight_before[count // 2 :]) < window
            assert took_s < 1.25 * count * len(CHUNK) / bandwidth_bytes_s + 2

    run_virtual(main)


async def sending_s(link: Link, receiver: Endpoint, count: int) -> float:
    """Seconds until so many more chunks have arrived."""
    started, wanted = trio.current_time(), len(receiver.of(Contribution)) + count
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_chunks, link, count)
        await until(lambda: len(receiver.of(Contribution)) == wanted)
    return trio.current_time() - started


def test_a_long_path_is_filled_within_few_round_trips() -> None:
    """13 MB take 1.1 s at this rate; the first flights are smaller than the path."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.1, bandwidth_bytes_s=12.5e6)) as (_, b, link, _):
            await trio.sleep(2)
            assert await sending_s(link, b, 200) < 1.1 + 5 * 0.2
            assert await sending_s(link, b, 200) < 1.1 + 2 * 0.2

    run_virtual(main)


def test_a_rate_is_not_forgotten_while_little_is_sent() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.05, bandwidth_bytes_s=12.5e6)) as (_, b, link, _):
            await sending_s(link, b, 200)
            for _ in range(60):
                await sending_s(link, b, 1)
            assert link.flow.rate_bytes_s == pytest.approx(12.5e6, rel=0.05)

    run_virtual(main)


def test_the_window_follows_a_path_that_becomes_slow() -> None:
    """Within ten round trips, after which the old window has to pass."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.05, bandwidth_bytes_s=12.5e6)
        async with linked_pair(network) as (_, b, link, _):
            await sending_s(link, b, 200)
            network.narrow("a", 1.25e6)
            await sending_s(link, b, 400)
            assert link.flow.rate_bytes_s == pytest.approx(1.25e6, rel=0.05)
            assert link.flow.window_bytes < 0.8e6

    run_virtual(main)


def test_acknowledgements_that_come_all_at_once_are_no_fast_path() -> None:
    """A receiver whose loop stands still now and then, and a jittery path."""

    async def main() -> None:
        network, rng = MemoryNetwork(latency_s=0.05, bandwidth_bytes_s=1e6), random.Random(0)
        network.latency = lambda a, b: rng.uniform(0.05, 0.15)  # type: ignore[method-assign]
        async with linked_pair(network) as (_, b, link, _):

            async def busy(message: Message, payload: bytes) -> None:
                if isinstance(message, Contribution) and rng.random() < 0.05:
                    await trio.sleep(0.3)

            b.on_frame = busy
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_chunks, link, 300)
                await until(lambda: len(b.of(Contribution)) == 300)
            assert link.flow.window_bytes < 1.5e6

    run_virtual(main)


def test_control_frames_pass_bulk() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.02, bandwidth_bytes_s=256 * KIB)) as (_, b, link, _):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_chunks, link, 100)
                for number in range(20):
                    await trio.sleep(0.7)
                    said = trio.current_time()
                    link.send(Due("lineage", number, 0))
                    await until(lambda number=number: len(b.of(Due)) > number)  # type: ignore[misc]
                    # Behind what is unacknowledged at most: the window, and one frame.
                    assert trio.current_time() - said < 0.02 + (MIN_WINDOW_BYTES + len(CHUNK)) / (256 * KIB) + 0.05
                assert len(b.of(Contribution)) < 100
                nursery.cancel_scope.cancel()

    run_virtual(main)


def test_round_chunks_go_before_fragments_and_the_oldest_fragments_are_shed() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.02, bandwidth_bytes_s=128 * KIB)) as (a, b, link, _):
            link.send_fragment(fragment(0), CHUNK)
            await trio.sleep(0.01)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_chunks, link, 12)
                for number in range(1, 11):
                    await trio.sleep(0.3)
                    link.send_fragment(fragment(number), bytes(1000))
            await until(lambda: len(b.of(Fragment)) == 1 + MAX_FRAGMENT_QUEUE)
            order = [type(message) for _, message, _ in b.received if not isinstance(message, Beat | Ack)]
            assert order == [Fragment, *[Contribution] * 12, *[Fragment] * MAX_FRAGMENT_QUEUE]
            assert numbers(b.of(Fragment)) == [0, 9, 10]
            assert a.links.counters.fragments_shed == 8
            assert a.links.counters.fragments_sent == 3

    run_virtual(main)


def test_a_fragment_that_would_come_too_late_is_not_sent() -> None:
    """Half a second of bytes is on the path. An idle path takes everything: it may have become faster."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.02, bandwidth_bytes_s=128 * KIB)) as (a, b, link, _):
            await send_chunks(link, 9)
            assert link.flow.rate_bytes_s
            for number, good_for_s in enumerate((0.3, 5.0)):
                link.send_fragment(fragment(number), bytes(1000), until_s=trio.current_time() + good_for_s)
            await until(lambda: len(b.of(Fragment)) == 1)
            assert numbers(b.of(Fragment)) == [1]
            assert a.links.counters.fragments_shed == 1
            await trio.sleep(5)
            link.send_fragment(fragment(2), bytes(1000), until_s=trio.current_time())
            await until(lambda: len(b.of(Fragment)) == 2)

    run_virtual(main)


@pytest.mark.parametrize("chunks", [1, 20])
def test_an_acknowledgement_wakes_the_writer_only_if_frames_wait(chunks: int) -> None:
    """One chunk fits into the window, so the writer looks for a frame when it is queued, and once more. 20 do not."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (_, b, link, _):
            next_frame, looked_s = link._outbox.next_frame, []

            def look(*, has_bulk_connection: bool) -> bytes | None:
                looked_s.append(trio.current_time())
                return next_frame(has_bulk_connection=has_bulk_connection)

            link._outbox.next_frame = look  # type: ignore[method-assign]
            began_s = trio.current_time()
            await send_chunks(link, chunks)
            await until(lambda: len(b.of(Contribution)) == chunks and link.flow.in_flight == 0)
            assert trio.current_time() < began_s + 0.2  # before the next heartbeat
            assert len(looked_s) == 2 or chunks > 1

    run_virtual(main)


def test_a_fragment_is_made_when_its_turn_comes() -> None:
    """So that the age in its header includes the time in the queue."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork(bandwidth_bytes_s=128 * KIB)) as (_, b, link, _):
            born = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_chunks, link, 6)
                await trio.sleep(0.01)
                link.send_fragment(
                    lambda: Fragment("l", 0, "cyclic", 0, 0, 1, 200, trio.current_time() - born), bytes(1000)
                )
            await until(lambda: len(b.of(Fragment)) == 1)
            age_s = b.of(Fragment)[0].age_s  # type: ignore[union-attr]
            assert 1.5 < age_s < trio.current_time() - born

    run_virtual(main)


def test_mixed_traffic_both_ways_neither_stalls_nor_gets_lost() -> None:
    """Frames of all sizes, so that the last acknowledgement is mostly below what is acknowledged at once."""

    async def main() -> None:
        rng = random.Random(3)
        async with linked_pair(MemoryNetwork(latency_s=0.03, bandwidth_bytes_s=500e3)) as (a, b, there, back):
            sizes = [rng.choice([10, 1000, 20_000, 23_000, 60_000, 66 * KIB, 128 * KIB]) for _ in range(120)]

            async def send(link: Link) -> None:
                for number, size in enumerate(sizes):
                    link.send(Due("lineage", number, 0))
                    await link.send_bulk(chunk(number), bytes(size), Traffic.ROUND)
                    if rng.random() < 0.2:
                        await trio.sleep(rng.random())

            start = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, there)
                nursery.start_soon(send, back)
            await until(lambda: len(a.of(Contribution)) == len(b.of(Contribution)) == len(sizes))
            for end in (a, b):
                assert [len(payload) for _, m, payload in end.received if isinstance(m, Contribution)] == sizes
                assert [m.round for m in end.of(Due)] == list(range(len(sizes)))  # type: ignore[union-attr]
            # 24 pauses of half a second, and the bytes; a stall would cost a second each.
            assert trio.current_time() - start < 24 * 0.5 * 1.5 + sum(sizes) / 500e3 * 1.5 + 2
            await trio.sleep(2)
            last = trio.current_time()
            await there.send_bulk(chunk(999), bytes(100), Traffic.ROUND)
            await until(lambda: numbers(b.of(Contribution))[-1] == 999)
            assert trio.current_time() - last < 0.1

    run_virtual(main)


def test_senders_of_bulk_wait_and_learn_that_the_link_is_lost() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(bandwidth_bytes_s=1000)) as (_, _, link, _):
            failed = []

            async def send() -> None:
                try:
                    await send_chunks(link, 100)
                except PeerLostError as error:
                    failed.append(str(error))

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(send)
                await trio.sleep(1)
                assert not failed
                link.close("test")
            assert failed == ["b: test"] * 3
            link.send(Due("lineage", 0, 0))
            link.send_fragment(fragment(0), b"")
            with pytest.raises(PeerLostError, match="b: test"):
                await link.send_bulk(chunk(0), b"", Traffic.ROUND)

    run_virtual(main)


# --- life and death ----------------------------------------------------------------------------------------------


def test_the_round_trip_is_measured() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.08)) as (_, _, link, other):
            await trio.sleep(4)
            assert link.flow.rtt_s == pytest.approx(0.16, abs=0.001)
            assert other.flow.rtt_s == pytest.approx(0.16, abs=0.001)

    run_virtual(main)


def test_the_rate_is_measured() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.05, bandwidth_bytes_s=2e6)) as (_, b, link, other):
            await send_chunks(link, 100)
            await until(lambda: len(b.of(Contribution)) == 100)
            assert link.flow.rate_bytes_s == pytest.approx(2e6, rel=0.05)
            assert other.flow.rate_bytes_s == 0

    run_virtual(main)


def test_a_partition_is_noticed_after_ten_silent_seconds() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, b, link, other):
            await trio.sleep(3)
            network.partition(["a"], ["b"])
            start = trio.current_time()
            await until(lambda: bool(a.lost and b.lost))
            assert 9 < trio.current_time() - start < 12
            assert link.lost.is_set()
            assert other.lost.is_set()
            assert "nothing heard for 10 s" in link.lost_reason
            assert not a.links.live
            assert not b.links.live

    run_virtual(main)


def test_a_long_frame_on_a_slow_path_is_a_sign_of_life() -> None:
    """4 MiB at 2 Mbit/s take 17 s, and no heartbeat can pass within a frame: the bytes themselves must count."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork(bandwidth_bytes_s=250e3)) as (a, b, link, _):
            await link.send_bulk(chunk(0), bytes(4 * 1024 * KIB), Traffic.ROUND)
            await until(lambda: len(b.of(Contribution)) == 1)
            assert not a.lost
            assert not b.lost

    run_virtual(main)


def test_a_path_that_swallows_bulk_alone_is_given_up() -> None:
    """Heartbeats pass, so only the missing acknowledgements tell."""

    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, _, link, _):
            network.fault = lambda source, target, packet: (
                PacketFault.DROP if source == "a" and decode_prefix(packet[:PREFIX_BYTES]).bulk else PacketFault.NONE
            )
            start = trio.current_time()
            await send_chunks(link, 3)
            await until(lambda: bool(a.lost))
            assert PEER_TIMEOUT_S <= trio.current_time() - start < PEER_TIMEOUT_S + 2
            assert "acknowledged nothing" in link.lost_reason

    run_virtual(main)


def test_a_broken_stream_is_noticed_at_once() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        async with linked_pair(network) as (a, _, link, _):
            start = trio.current_time()
            network.crash("b")
            await until(lambda: bool(a.lost))
            assert trio.current_time() - start < 0.5
            assert link.lost_reason == "it closed the connection"

    run_virtual(main)


def test_leaving_is_told_and_ends_the_link() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, other):
            link.send(Leave("done"))
            await until(lambda: bool(a.lost and b.lost))
            assert other.left
            assert other.lost_reason == "it left the run"
            assert not link.left

    run_virtual(main)


def test_what_is_queued_last_still_goes_out() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(latency_s=0.01)) as (_, b, link, other):
            for number in range(50):
                link.send(Due("lineage", number, 0))
            link.send(Leave("done"))
            link.close("we leave")
            await other.lost.wait()
            assert len(b.of(Due)) == 50
            assert other.left

    run_virtual(main)


def test_a_partner_that_takes_no_frames_is_given_up() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (_, _, link, _):
            for number in range(MAX_CONTROL_QUEUE + 1):
                link.send(Due("lineage", number, 0))
            assert link.lost.is_set()
            assert "takes no frames" in link.lost_reason

    run_virtual(main)


@pytest.mark.parametrize("acked_bytes", [1, 2**64 - 1])
def test_acknowledging_what_was_never_sent_breaks_the_protocol(acked_bytes: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, b, _, _):
            stream = next(s for s in network.transports["b"].streams if s.remote == "a")
            await stream.send_all(encode_frame(Ack(), acked_bytes=acked_bytes))
            await until(lambda: bool(a.lost))
            assert a.links.strikes == {"b": 1}
            assert not b.links.strikes

    run_virtual(main)


def test_bytes_are_counted_by_purpose_on_both_sides() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, _):
            await link.send_bulk(chunk(0), bytes(5000), Traffic.ROUND)
            await link.send_bulk(chunk(1), bytes(50_000), Traffic.ROUND, compress=True)
            link.send_fragment(fragment(0), bytes(700))
            await until(lambda: len(b.of(Fragment)) == 1)
            sent, received = a.links.counters.sent, b.links.counters.received
            assert sent[Traffic.ROUND] == received[Traffic.ROUND]
            assert 5000 < sent[Traffic.ROUND] < 5300
            assert 700 < sent[Traffic.FRAGMENT] == received[Traffic.FRAGMENT] < 800
            assert received[Traffic.STATE] == 0
            await trio.sleep(1.5)
            assert sent[Traffic.CONTROL] > 0

    run_virtual(main)


# --- cutting bytes into frames ------------------------------------------------------------------------------------


class Script:
    """A stream that delivers given pieces and then ends."""

    remote = "b"

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def receive_some(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._pieces.pop(0) if self._pieces else b""

    async def send_all(self, data: bytes) -> None:
        raise PeerLostError("b: a script does not listen")

    async def aclose(self) -> None: ...


FRAMES = [(Due("lineage", 1, 0), b""), (chunk(5), bytes(300)), (Ack(), b""), (chunk(6), bytes(range(256)))]
STREAM = b"".join(encode_frame(message, payload, compress=True) for message, payload in FRAMES)


@settings(max_examples=40, derandomize=True)
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12), ahead=st.integers(0, 60))
def test_frames_are_found_however_the_bytes_arrive(cuts: list[int], ahead: int) -> None:
    async def main() -> None:
        edges = sorted({ahead, len(STREAM), *(cut for cut in cuts if cut > ahead)})
        pieces = [STREAM[start:stop] for start, stop in itertools.pairwise(edges)]
        reader = FrameReader(Script(pieces), STREAM[:ahead])
        assert [(await reader.frame())[1:] for _ in FRAMES] == FRAMES
        assert reader.read_ahead == b""
        with pytest.raises(PeerLostError):
            await reader.frame()

    trio.run(main)


def test_a_truncated_stream_is_a_lost_peer_not_a_frame() -> None:
    async def main() -> None:
        for length in range(len(STREAM)):
            reader = FrameReader(Script([STREAM[:length]]))
            with pytest.raises(PeerLostError, match="closed the connection"):
                for _ in FRAMES:
                    await reader.frame()

    trio.run(main)


@settings(max_examples=60, derandomize=True)
@given(noise=st.binary(min_size=1, max_size=200), behind=st.sampled_from([b"", STREAM]))
def test_noise_ends_a_link_and_nothing_else(noise: bytes, behind: bytes) -> None:
    """Whatever arrives, the link ends by saying which: the stream closed, or the protocol was broken."""
    taken: list[Message] = []

    async def handler(link: Link, message: Message, payload: bytes) -> None:
        taken.append(message)

    async def main() -> None:
        link = Link("b", hello_of("b"), LinkSetup(handler), MessageRates(PEER_TIMEOUT_S, 0.0))
        try:
            await link.run_stream(Script([behind + noise]), b"")
        except* WireError:
            assert "broke the protocol" in link.lost_reason
        assert link.lost.is_set()
        assert len(taken) >= (len(FRAMES) if behind else 0)

    trio.run(main)
