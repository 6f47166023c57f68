"""Limits on what other peers can make a peer hold: streams, incomplete frames, queues. All on virtual time."""

from __future__ import annotations

import pytest
import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.memory_network.network import MemoryStream
from p2ptrain.protocol.links import frame_reader, limits, links, requests
from p2ptrain.protocol.links.frame_reader import GIVE_UP_AFTER_S, MAX_RECEIVE_BYTES, ReceiveBudget
from p2ptrain.protocol.links.handshake import MAX_HELLO_BYTES, OBSERVER
from p2ptrain.protocol.links.limits import MAX_GREETING, MAX_GREETING_OF_ONE, MAX_STRIKES
from p2ptrain.protocol.links.link import PEER_TIMEOUT_S, Link
from p2ptrain.protocol.links.links import MAX_STREAMS
from p2ptrain.protocol.links.outbox import MAX_BULK_QUEUE_BYTES, MAX_CONTROL_QUEUE_BYTES, Traffic
from p2ptrain.protocol.node.requests import MAX_SERVED_AT_ONCE, MAX_TURNS_OF_PEER
from p2ptrain.protocol.wire.frames import MAX_COMPRESSED_CHUNK_BYTES, MAX_PAYLOAD_BYTES, encode_frame
from p2ptrain.protocol.wire.messages import Ack, Answer, Attempt, Contribution, Due, Hello, Message, Request
from tests.protocol.swarm import RUN, run_virtual, swarm
from tests.protocol.wiring import Endpoint, endpoints, hello_of, linked_pair, start_endpoint, until

MIB = 1024 * 1024


def chunk(size_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """A frame of a large payload."""
    return encode_frame(Contribution("lineage", 0, Attempt(0, "b", "b.1"), 0, 1, b"", ()), bytes(size_bytes), bulk=True)


async def greet(network: MemoryNetwork, peer_id: str, hello: Hello) -> MemoryStream:
    """Open a stream to "a" and say Hello on it, whatever else is open."""
    stream = await network.transports[peer_id].open_stream("a", [])
    await stream.send_all(encode_frame(hello))
    return stream


async def send_all_but_the_end(stream: MemoryStream) -> None:
    try:
        await stream.send_all(chunk()[:-1])
    except PeerLostError:
        return


def held_bytes(a: Endpoint) -> int:
    """Of frames that are not complete, or not handled."""
    return sum(
        len(reader._buffer) for link in a.links.live.values() for reader in link._readers
    )  # what `a` really holds, not what it counts


# --- streams -----------------------------------------------------------------------------------------------------


def test_a_link_has_two_streams_and_no_more() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.transport("b")
        async with endpoints(network, "a") as (a,):
            streams = [await greet(network, "b", hello_of("b")) for _ in range(120)]
            await trio.sleep(1)
            link = a.links.get("b")
            assert link is not None
            assert link.streams == MAX_STREAMS
            assert len(network.transports["a"].streams) == MAX_STREAMS
            assert not a.lost
            await streams[0].send_all(encode_frame(Due("lineage", 0, 0)))
            await until(lambda: len(a.of(Due)) == 1)

    run_virtual(main)


def test_streams_that_say_no_hello_are_few_of_one_peer_and_of_all() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "c") as (a, c):
            streams = network.transports["a"].streams
            for number in range(2 * MAX_GREETING):
                mute = network.transport(f"mute {number}")
                for _ in range(2 * MAX_GREETING_OF_ONE if number == 0 else 1):
                    await mute.open_stream("a", [])
                if number == 0:
                    await trio.sleep(0.1)
                    assert len(streams) == MAX_GREETING_OF_ONE
            await trio.sleep(1)
            assert len(streams) == MAX_GREETING
            assert "mute 0" not in {stream.remote for stream in streams}  # the oldest have made room
            await trio.sleep(links.HELLO_TIMEOUT_S)
            assert not streams
            assert not a.links._greeting
            await c.links.connect("a", [])

    run_virtual(main)


def test_links_are_bounded_and_the_refused_side_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "MAX_LINKS", 2)

    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "b", "c") as (a, b, c), trio.open_nursery() as nursery:
            d = await start_endpoint(network, nursery, hello_of("d"), chosen=["a"])
            for peer in (b, c):
                await peer.links.connect("a", [])
            for _ in range(2 * MAX_STRIKES):
                with pytest.raises(PeerLostError, match="a refused the link: 'it has 2 links, and accepts no more'"):
                    await d.links.connect("a", [])
            assert "a refused the link: 'it has 2 links" in caplog.text
            assert set(a.links.live) == {"b", "c"}
            assert not a.links.strikes
            assert not d.links.strikes
            b.links.close_all("enough")
            await until(lambda: "b" in a.lost)
            await d.links.connect("a", [])
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_member_takes_the_place_of_the_oldest_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LINKS", 3)

    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "b", "c", "d") as (a, b, c, d), trio.open_nursery() as nursery:
            for name in ("o1", "o2"):
                observer = await start_endpoint(network, nursery, hello_of(name, digest="", role=OBSERVER))
                await observer.links.connect("a", [])
            left: list[list[str]] = []
            for member in (b, c, d):
                await member.links.connect("a", [])
                await until(lambda name=member.peer_id: name in a.links.live)  # type: ignore[misc]
                left.append(sorted(a.links.live))
            assert left == [["b", "o1", "o2"], ["b", "c", "o2"], ["b", "c", "d"]]
            assert a.lost == ["o1", "o2"]
            assert not a.links.strikes
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("complete", [True, False])
def test_before_its_hello_a_peer_may_send_little(complete: bool) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        stranger = network.transport("b")
        async with endpoints(network, "a") as (a,):
            stream = await stranger.open_stream("a", [])
            long = Hello("test", "digest", "b.1", "trainer", tuple("/memory/b" + 480 * "x" for _ in range(40)), b"")
            frame = encode_frame(long)
            assert len(frame) > MAX_HELLO_BYTES
            await stream.send_all(frame if complete else frame[:100])
            assert await stream.receive_some() == b""
            assert a.links.strikes == {"b": 1}

    run_virtual(main)


# --- unfinished frames --------------------------------------------------------------------------------------------


def test_a_link_knows_how_long_a_frame_took_to_arrive() -> None:
    """A fragment grows old on the way."""

    async def main() -> None:
        network = MemoryNetwork()
        network.transport("b")
        async with endpoints(network, "a") as (a,):
            stream, frame = await greet(network, "b", hello_of("b")), encode_frame(Due("lineage", 0, 0))
            await stream.send_all(frame[:5])
            await trio.sleep(3)
            await stream.send_all(frame[5:])
            await until(lambda: len(a.of(Due)) == 1)
            link = a.links.get("b")
            assert link is not None
            assert link.frame_s == pytest.approx(3, abs=0.1)

    run_virtual(main)


def test_a_frame_that_stays_unfinished_costs_its_link() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.transport("b")
        async with endpoints(network, "a") as (a,):
            for sent in (encode_frame(Ack())[:5], chunk()[:-1]):
                stream, talking = [await greet(network, "b", hello_of("b")) for _ in range(2)]
                start = trio.current_time()
                await stream.send_all(sent)
                while a.links.get("b") is None or a.links.live["b"].streams < MAX_STREAMS:
                    await trio.sleep(0.01)
                link = a.links.live["b"]
                while not link.lost.is_set():  # on its other stream it shows signs of life
                    await talking.send_all(encode_frame(Ack()))
                    await trio.sleep(0.5)
                assert "was not complete after 30 s" in link.lost_reason
                assert trio.current_time() - start == pytest.approx(PEER_TIMEOUT_S, abs=1)
                await trio.sleep(1)
            assert a.links.budget.held_bytes == 0
            assert not a.links.strikes

    run_virtual(main)


def test_unfinished_frames_of_many_links_hold_no_more_than_the_budget() -> None:
    """60 partners, two streams each, each an unfinished frame of 4 MiB: 480 MiB as they would have it."""

    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "honest") as (a, honest), trio.open_nursery() as nursery:
            link = await honest.links.connect("a", [])
            names = [f"p{number}" for number in range(60)]
            for name in names:
                network.transport(name)
                for _ in range(MAX_STREAMS):
                    stream = await greet(network, name, hello_of(name))
                    nursery.start_soon(send_all_but_the_end, stream)
            most = 0
            start = trio.current_time()
            # An honest partner's frame waits for its turn, and comes.
            await link.send_bulk(
                Contribution("lineage", 0, Attempt(0, "h", "h.1"), 0, 1, b"", ()), bytes(MIB), Traffic.ROUND
            )
            while not a.of(Contribution):
                most = max(most, held_bytes(a))
                assert trio.current_time() - start < PEER_TIMEOUT_S
                await trio.sleep(0.2)
            assert most > MAX_RECEIVE_BYTES / 2
            # What a stream has received behind its prefix, before it waits, is one segment.
            assert most <= MAX_RECEIVE_BYTES + 120 * 64 * 1024
            assert a.links.get("honest") is not None
            assert "honest" not in a.lost
            assert all(link.streams <= MAX_STREAMS for link in a.links.live.values())
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_small_frames_that_expand_are_counted_as_what_they_expand_to() -> None:
    """60 partners, each a frame of 80 bytes on the wire and 320 KiB in memory, none of them handled soon."""
    message = Contribution("lineage", 0, Attempt(0, "b", "b.1"), 0, 1, b"", ())
    bomb = encode_frame(message, bytes(MAX_COMPRESSED_CHUNK_BYTES), bulk=True, compress=True)
    assert len(bomb) < 1024

    async def main() -> None:
        async with endpoints(MemoryNetwork(), "a", *(f"p{number}" for number in range(60))) as (a, *others):
            handled, most, handle = 0, 0, trio.Event()

            async def on_frame(message: Message, payload: bytes) -> None:
                nonlocal handled, most
                if isinstance(message, Contribution):
                    handled += 1
                    most = max(most, handled)
                    await handle.wait()
                    handled -= 1

            a.on_frame = on_frame
            a.links.budget._limit_bytes = 16 * MAX_COMPRESSED_CHUNK_BYTES
            for other in others:
                link = await other.links.connect("a", [])
                await link.send_bulk(message, bytes(MAX_COMPRESSED_CHUNK_BYTES), Traffic.ROUND, compress=True)
            await trio.sleep(GIVE_UP_AFTER_S)
            assert handled == most == 16 - 1  # each takes its wire bytes as well
            handle.set()
            await until(lambda: len(a.of(Contribution)) == 60)

    run_virtual(main)


def test_a_partner_is_not_silent_while_we_do_not_listen() -> None:
    """Its frame waits for the budget longer than a peer may be silent."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, other):
            share = await b.links.budget.take(MAX_RECEIVE_BYTES)
            share.receiving = None  # a frame that is being handled
            await link.send_bulk(
                Contribution("lineage", 0, Attempt(0, "a", "a.1"), 0, 1, b"", ()), bytes(MIB), Traffic.ROUND
            )
            await trio.sleep(25)
            assert not other.lost.is_set()
            b.links.budget.release(share)
            await until(lambda: bool(b.of(Contribution)))
            await trio.sleep(5)
            assert not a.lost
            assert not b.lost

    run_virtual(main)


def test_shares_are_granted_in_turn_and_the_oldest_unfinished_frame_gives_way() -> None:
    async def main() -> None:
        budget = ReceiveBudget(100)
        granted: list[str] = []

        async def take(name: str, size: int) -> None:
            budget_share = await budget.take(size)
            granted.append(name)
            assert budget_share.receiving is not None
            with budget_share.receiving:
                await trio.sleep_forever()
            budget.release(budget_share)

        async with trio.open_nursery() as nursery:
            for name, size in (("a", 60), ("b", 40), ("large", 90), ("small", 1)):
                nursery.start_soon(take, name, size)
                await trio.sleep(0.1)
            assert granted == ["a", "b"]
            await trio.sleep(0.9 * GIVE_UP_AFTER_S)
            assert granted == ["a", "b"]
            await trio.sleep(0.8 * GIVE_UP_AFTER_S)
            assert granted == ["a", "b", "large", "small"]
            assert budget.held_bytes == 91
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_one_frame_always_fits() -> None:
    async def main() -> None:
        budget = ReceiveBudget(100)
        share = await budget.take(1000)
        budget.release(share)
        assert budget.held_bytes == 0

    trio.run(main)


# --- queues -------------------------------------------------------------------------------------------------------


def test_control_frames_are_bounded_in_bytes() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (_, _, link, _):
            long = Due(200_000 * "x", 0, 0)
            for number in range(MAX_CONTROL_QUEUE_BYTES // 200_000):
                link.send(long)
                assert not link.lost.is_set(), number
            link.send(long)
            assert "takes no frames" in link.lost_reason

    run_virtual(main)


def test_bulk_frames_are_bounded_in_bytes_and_one_always_fits() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork(bandwidth_bytes_s=1000)) as (_, _, link, _):
            message = Contribution("lineage", 0, Attempt(0, "a", "a.1"), 0, 1, b"", ())
            queued = 0

            async def send() -> None:
                nonlocal queued
                for _ in range(4):
                    await link.send_bulk(message, bytes(int(0.6 * MIB)), Traffic.ROUND)
                    queued += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await trio.sleep(1)
                # One is on the path already.
                assert queued == 2
                assert link._outbox._bulk_bytes <= MAX_BULK_QUEUE_BYTES
                nursery.cancel_scope.cancel()

    run_virtual(main)


def test_answers_that_are_not_read_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_ANSWER_BYTES", 5000)

    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, _):

            async def answer(link: Link, request: Request) -> None:
                await link.send_bulk(Answer(request.request, True, "x"), bytes(3000), Traffic.STATE)

            b.on_request = answer
            for _ in range(4):
                await a.links.request(link, "x", timeout_s=5)
            assert a.links._requests._answer_bytes == 0
            # Two that have come and are not taken.
            for number in (1001, 1002):
                a.links._requests._waiting[number] = requests._Asked("b")
                await b.links.live["a"].send_bulk(Answer(number, True, "x"), bytes(3000), Traffic.STATE)
            await link.lost.wait()
            assert "more answers arrived than were taken" in link.lost_reason

    run_virtual(main)


@pytest.mark.parametrize(
    ("what", "limiter"),
    [("chunk", "_state_answers"), ("record", "_pieces"), ("part", "_pieces"), ("events", "_pages")],
)
def test_answers_are_bounded_over_all_partners(what: str, limiter: str) -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=[("head", (64, 64))]) as s:
            for name in "abcd":
                s.start(name, founder=name == "a")
            await s.until_joined()
            donor = s.peers["a"].node
            getattr(donor._server, limiter).total_tokens = 3
            serving = most = answered = 0

            async def answer(link: Link, request: Request) -> None:
                nonlocal serving, most
                serving += 1
                most = max(most, serving)
                await trio.sleep(0.1)
                link.send(Answer(request.request, True, what))
                serving -= 1

            async def ask(name: str) -> None:
                nonlocal answered
                found, _ = await s.peers[name].node.links.request(
                    s.peers[name].node.links.live["a"], what, timeout_s=30
                )
                answered += found.found

            donor._server._answer = answer  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                for name in "bcd":
                    for _ in range(5):
                        nursery.start_soon(ask, name)
            assert (most, answered) == (3, 15)

    run_virtual(main)


def test_answers_to_one_partner_that_reads_slowly_keep_no_others_waiting() -> None:
    async def main() -> None:
        async with swarm(RUN, shapes=[("head", (64, 64))]) as s:
            for name in "abc":
                s.start(name, founder=name == "a")
            await s.until_joined()
            server = s.peers["a"].node._server
            server._state_answers.total_tokens = MAX_TURNS_OF_PEER + 1

            async def answer(link: Link, request: Request) -> None:
                if link.peer_id == "b":
                    await trio.sleep_forever()
                link.send(Answer(request.request, True, "head"))

            async def ask(name: str) -> bool:
                links = s.peers[name].node.links
                found, _ = await links.request(links.live["a"], "head", timeout_s=30)
                return found.found

            server._answer = answer  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                for _ in range(MAX_SERVED_AT_ONCE):
                    nursery.start_soon(ask, "b")
                await trio.sleep(1)
                assert await ask("c")
                nursery.cancel_scope.cancel()

    run_virtual(main)


def test_strikes_are_remembered_of_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STRUCK", 3)

    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a") as (a,):
            for number in range(5):
                stream = await network.transport(f"hostile {number}").open_stream("a", [])
                await stream.send_all(encode_frame(Ack()))
                assert await stream.receive_some() == b""
            assert a.links.strikes == {f"hostile {number}": 1 for number in (2, 3, 4)}

    run_virtual(main)


# --- our own errors -----------------------------------------------------------------------------------------------


def test_an_error_of_our_own_costs_that_link_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "b", "c") as (a, b, c):

            async def fail(message: Message, payload: bytes) -> None:
                if isinstance(message, Due):
                    raise ZeroDivisionError("a bug")

            a.on_frame = fail
            other = await c.links.connect("a", [])
            for _ in range(3):
                link = await b.links.connect("a", [])
                link.send(Due("lineage", 0, 0))
                await link.lost.wait()
                await until(lambda: a.links.get("b") is b.links.get("a") is None)
            assert a.lost == ["b"] * 3
            assert not a.links.strikes
            assert not other.lost.is_set()
            errors = [record for record in caplog.records if record.levelname == "ERROR"]
            assert len(errors) == 1
            assert "while Due of b was handled" in caplog.text
            assert errors[0].exc_info

    run_virtual(main)


def test_an_error_while_a_frame_is_made_costs_that_link(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, _, link, _):
            link.send_fragment(lambda: 1 // 0, b"")  # type: ignore[arg-type, return-value]
            await link.lost.wait()
            assert "internal error while making a frame" in link.lost_reason
            await until(lambda: not a.links.live)
            assert caplog.text.count("Traceback") == 1

    run_virtual(main)


@pytest.mark.parametrize("callback", ["on_link", "on_lost", "make_beat"])
def test_a_callback_of_the_owner_that_fails_ends_nothing_else(callback: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "b", "c") as (a, b, c):
            await c.links.connect("a", [])
            fails = True
            plain = getattr(a, callback)

            def fail(*arguments: object) -> object:
                if fails:
                    raise ZeroDivisionError("a bug")
                return plain(*arguments)

            setattr(a, callback, fail)
            await b.links.connect("a", [])
            await trio.sleep(2)
            network.crash("b")
            await trio.sleep(2)
            fails = False
            assert a.links.get("c") is not None
            assert caplog.text.count("Traceback") == 1
            network.transport("b")
            b = await start_endpoint(network, b.nursery, hello_of("b", incarnation="2"))
            await b.links.connect("a", [])
            await trio.sleep(2)
            assert sorted(a.links.live) == ["b", "c"]

    run_virtual(main)


def test_a_transport_that_fails_is_a_peer_that_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a") as (a,):

            async def fail(peer_id: str, maddrs: list[str]) -> MemoryStream:
                raise ZeroDivisionError("a bug")

            network.transports["a"].open_stream = fail  # type: ignore[method-assign]
            for _ in range(2):
                with pytest.raises(PeerLostError, match="b: internal error"):
                    await a.links.connect("b", [])
            assert caplog.text.count("Traceback") == 1

    run_virtual(main)


def test_the_budget_is_what_the_documentation_says() -> None:
    assert frame_reader.MAX_RECEIVE_BYTES == 64 * MIB
