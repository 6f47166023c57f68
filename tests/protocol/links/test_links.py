"""All links of a peer: which connections are accepted or refused and why, and that requests always end."""

from __future__ import annotations

import contextlib
import random

import pytest
import trio

from p2ptrain.errors import PeerLostError, RunMismatchError, WireError
from p2ptrain.memory_network import MemoryNetwork, PacketFault
from p2ptrain.protocol.links.limits import MAX_STRIKES, STRIKE_S
from p2ptrain.protocol.links.link import PEER_TIMEOUT_S, Link
from p2ptrain.protocol.links.links import HELLO_TIMEOUT_S
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.wire.frames import encode_frame
from p2ptrain.protocol.wire.messages import Ack, Answer, Beat, Due, Hello, Leave, Message, Request
from tests.protocol.swarm import run_virtual
from tests.protocol.wiring import Endpoint, endpoints, hello_of, linked_pair, start_endpoint, until


async def answer_all(link: Link, request: Request) -> None:
    await link.send_bulk(Answer(request.request, True, "x"), request.subject.encode(), Traffic.STATE)


async def check_works(a: Endpoint, b: Endpoint) -> None:
    """Each can ask the other, over the one link that both have."""
    for one, other in ((a, b), (b, a)):
        other.on_request = answer_all
        link = one.links.get(other.peer_id)
        assert link is not None
        _, payload = await one.links.request(link, "x", "hello", timeout_s=5)
        assert payload == b"hello"


# --- dialling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency_s", [0.0, 0.001, 0.1, 0.4])
@pytest.mark.parametrize("head_start_s", [0.0, 0.0005, 0.05, 0.3])
def test_two_that_dial_each_other_at_once_end_with_one_link_each(latency_s: float, head_start_s: float) -> None:
    async def main() -> None:
        async with endpoints(MemoryNetwork(latency_s=latency_s), "a", "b") as (a, b):

            async def dial(one: Endpoint, other: str, after_s: float) -> None:
                await trio.sleep(after_s)
                await one.links.connect(other, [])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(dial, a, "b", 0.0)
                nursery.start_soon(dial, b, "a", head_start_s)
            await trio.sleep(1)
            assert a.linked == ["b"]
            assert b.linked == ["a"]
            await check_works(a, b)
            await trio.sleep(PEER_TIMEOUT_S)
            assert not a.lost
            assert not b.lost
            await check_works(a, b)

    run_virtual(main)


def test_many_calls_for_one_peer_share_one_dial() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "b") as (a, b):
            got = []

            async def dial() -> None:
                got.append(await a.links.connect("b", []))

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(dial)
            assert len({id(link) for link in got}) == 1
            assert len(network.transports["a"].streams) == 1
            assert b.linked == ["a"]

    run_virtual(main)


def test_a_peer_that_cannot_be_reached_is_lost_for_all_who_wait() -> None:
    async def main() -> None:
        async with endpoints(MemoryNetwork(), "a") as (a,):
            failures = []

            async def dial() -> None:
                with pytest.raises(PeerLostError) as caught:
                    await a.links.connect("nobody", [])
                failures.append(caught)

            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(dial)
            assert len(failures) == 5
            assert not a.links.live

    run_virtual(main)


def test_a_peer_that_says_no_hello_is_given_up() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.transport("mute")
        async with endpoints(network, "a") as (a,):
            start = trio.current_time()
            with pytest.raises(PeerLostError, match="no Hello within 8 s"):
                await a.links.connect("mute", [])
            assert trio.current_time() - start == pytest.approx(HELLO_TIMEOUT_S, abs=0.1)
            assert not network.transports["a"].streams

    run_virtual(main)


def test_a_caller_that_says_no_hello_is_given_up() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        mute = network.transport("mute")
        async with endpoints(network, "a") as (a,):
            stream = await mute.open_stream("a", [])
            with trio.fail_after(HELLO_TIMEOUT_S + 1):
                assert await stream.receive_some() == b""
            assert not a.linked
            assert not network.transports["a"].streams

    run_virtual(main)


def test_a_restarted_peer_replaces_its_link() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, _, old, _), trio.open_nursery() as nursery:
            # Its process died so suddenly that nothing was closed, and is back before anybody noticed.
            new = await start_endpoint(network, nursery, hello_of("b", incarnation="2"))
            await new.links.connect("a", [])
            await until(lambda: a.links.get("b") is not old)
            assert old.lost_reason == "it was restarted"
            assert a.linked == ["b", "b"]
            assert a.lost == ["b"]
            await check_works(a, new)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_of_two_processes_with_one_key_the_later_one_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Each would displace the other without end."""

    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, first, _, _), trio.open_nursery() as nursery:
            second = await start_endpoint(network, nursery, hello_of("b", incarnation="2"))
            await second.links.connect("a", [])
            await until(lambda: a.linked == ["b", "b"])
            for _ in range(5):
                with pytest.raises(PeerLostError, match="another process uses this identity"):
                    await first.links.connect("a", [])
                await trio.sleep(1)
            assert a.linked == ["b", "b"]
            await check_works(a, second)
            assert first.linked == ["a"]
            nursery.cancel_scope.cancel()

    run_virtual(main)
    assert caplog.text.count("several processes use the identity of b") == 1
    assert caplog.text.count("a refused the link: 'another process uses this identity") == 1


def test_the_process_that_is_left_links_again_and_again() -> None:
    """Its copy has ended: it is the peer now, also when it dials anew."""

    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, first, _, _), trio.open_nursery() as nursery:
            second = await start_endpoint(network, nursery, hello_of("b", incarnation="2"))
            await second.links.connect("a", [])
            await until(lambda: len(a.linked) == 2)
            for link in list(second.links.live.values()):
                link.close("stopped")
            await until(lambda: a.links.get("b") is None)
            for _ in range(2):
                await first.links.connect("a", [])
                await check_works(a, first)
                await trio.sleep(HELLO_TIMEOUT_S + 1)
                network.partition(["a"], ["b"])
                first.links.live["a"].close("b noticed, and a does not")
                await until(lambda: first.links.get("a") is None)
                network.partition()
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_an_observer_takes_no_place_of_the_trainer_with_its_identity() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, b, link, _), trio.open_nursery() as nursery:
            hello = hello_of("b", incarnation="2", role="observer", digest="")
            observer = await start_endpoint(network, nursery, hello)
            with pytest.raises(PeerLostError, match="another process uses this identity"):
                await observer.links.connect("a", [])
            assert a.links.get("b") is link
            await check_works(a, b)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_an_observer_replaces_a_trainer_that_lost_its_power_before_anybody_noticed() -> None:
    """It is that peer after a restart, which asks for the settings of the run first."""

    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, _, link, _), trio.open_nursery() as nursery:
            network.partition(["a"], ["b"])  # its streams carry nothing from now on
            await trio.sleep(link.patience_s / 2)
            network.partition()
            hello = hello_of("b", incarnation="2", role="observer", digest="")
            observer = await start_endpoint(network, nursery, hello)
            await observer.links.connect("a", [])
            await until(lambda: a.links.get("b") is not link)
            assert link.lost_reason == "it was restarted"
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_who_changes_its_incarnation_again_and_again_makes_no_more_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, _, _, _), trio.open_nursery() as nursery:
            for number in range(12):
                other = await start_endpoint(network, nursery, hello_of("b", incarnation=str(number % 3)))
                with contextlib.suppress(PeerLostError):
                    await other.links.connect("a", [])
                await trio.sleep(HELLO_TIMEOUT_S)
            assert a.links.get("b")
            nursery.cancel_scope.cancel()

    run_virtual(main)
    assert caplog.text.count("several processes use the identity of b") <= 1


def test_a_peer_that_lost_its_end_of_a_link_gets_a_new_one_at_once() -> None:
    """After a partition one side gives up before the other does, and dials again."""

    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, b, link, other):
            await trio.sleep(HELLO_TIMEOUT_S)
            network.partition(["a"], ["b"])
            await trio.sleep(1)
            network.partition()
            other.close("b noticed")
            await until(lambda: b.links.get("a") is None)
            assert a.links.get("b") is link
            start = trio.current_time()
            await b.links.connect("a", [])
            await trio.sleep(0.1)
            await check_works(a, b)
            assert trio.current_time() - start < 1
            assert link.lost_reason == "it dialled again"

    run_virtual(main)


def test_beats_come_every_second_and_forty_links_stay_alive() -> None:
    async def main() -> None:
        names = [f"p{i:02d}" for i in range(40)]
        async with endpoints(MemoryNetwork(latency_s=0.05), *names) as all_of_them:
            first = all_of_them[0]
            for name in names[1:]:
                await first.links.connect(name, [])
            first.received.clear()
            await trio.sleep(20)
            beats = [peer for peer, message, _ in first.received if isinstance(message, Beat)]
            assert all(beats.count(name) == 20 for name in names[1:])
            assert not first.lost

    run_virtual(main)


# --- refusing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialler", [0, 1])
def test_other_settings_are_refused_with_a_message_for_both_users(dialler: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            ends = [
                await start_endpoint(network, nursery, hello_of("a", digest="1" * 64), chosen="bc"),
                await start_endpoint(network, nursery, hello_of("b", digest="2" * 64), chosen="ac"),
            ]
            with pytest.raises(RunMismatchError):
                await ends[dialler].links.connect(ends[1 - dialler].peer_id, [])
            await trio.sleep(2)
            for end, other, ours, theirs in ((ends[0], "b", "1", "2"), (ends[1], "a", "2", "1")):
                assert not end.linked
                assert not end.links.strikes
                assert end.links.mismatch is not None
                message = str(end.links.mismatch)
                for part in (f"peer {other}", "run 'test'", theirs * 12, ours * 12, "leave settings out"):
                    assert part in message
            assert not network.transports["a"].streams
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize("dialler", [0, 1])
def test_other_settings_of_a_stranger_say_nothing_about_ours(dialler: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            ends = [
                await start_endpoint(network, nursery, hello_of("a", digest="1" * 64), chosen="c"),
                await start_endpoint(network, nursery, hello_of("b", digest="2" * 64)),
            ]
            with pytest.raises(RunMismatchError, match="with other settings"):
                await ends[dialler].links.connect(ends[1 - dialler].peer_id, [])
            await trio.sleep(2)
            # What the chosen one says stays said.
            await start_endpoint(network, nursery, hello_of("c", digest="3" * 64))
            for end, mismatch in ((ends[0], None), (ends[1], None)):
                assert not end.linked
                assert end.links.mismatch is mismatch
            with pytest.raises(RunMismatchError):
                await ends[0].links.connect("c", [])
            with pytest.raises(RunMismatchError):
                await ends[0].links.connect("b", [])
            assert ends[0].links.mismatch is not None
            assert "peer c" in str(ends[0].links.mismatch)
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_another_run_is_refused() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with trio.open_nursery() as nursery:
            a = await start_endpoint(network, nursery, hello_of("a", run_id="one"))
            b = await start_endpoint(network, nursery, hello_of("b", run_id="two"))
            with pytest.raises(RunMismatchError, match="b belongs to run 'two', not 'one'"):
                await a.links.connect("b", [])
            await trio.sleep(2)
            # Nothing is wrong with our own settings.
            assert a.links.mismatch is None
            assert b.links.mismatch is None
            assert not a.linked
            assert not b.linked
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_an_observer_is_welcome_without_a_digest() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a") as (a,), trio.open_nursery() as nursery:
            observer = await start_endpoint(network, nursery, hello_of("g", digest="", role="observer"))
            await observer.links.connect("a", [])
            await check_works(a, observer)
            nursery.cancel_scope.cancel()

    run_virtual(main)


@pytest.mark.parametrize(("digest", "role"), [("", "trainer"), ("digest", "observer")])
def test_no_peer_trains_without_a_digest(digest: str, role: str) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a") as (a,), trio.open_nursery() as nursery:
            liar = await start_endpoint(network, nursery, hello_of("b", digest=digest, role=role))
            with pytest.raises(PeerLostError):
                await liar.links.connect("a", [])
            assert a.links.strikes == {"b": 1}
            assert not a.linked
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_role_with_control_characters_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a"), trio.open_nursery() as nursery:
            liar = await start_endpoint(network, nursery, hello_of("b", digest="", role="\x1b[2J"))
            with pytest.raises(PeerLostError):
                await liar.links.connect("a", [])
            nursery.cancel_scope.cancel()

    run_virtual(main)
    assert "stream from b refused: bad Hello" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "message", [Request(1, "head", "", 0), Leave("tired"), Ack(), Beat(0, 0, 0, "", "", -1, 0, 0, "", 0.0, (), 0)]
)
def test_only_bulk_has_a_payload(message: Message) -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (_, b, link, _):
            await link.send_bulk(message, b"more", Traffic.STATE)
            await until(lambda: bool(b.lost))
            assert b.links.strikes == {"a": 1}
            assert not [payload for _, _, payload in b.received if payload]

    run_virtual(main)


NOISE = random.Random(0).randbytes(200)
FIRST_FRAMES = [
    pytest.param(NOISE, id="noise"),
    pytest.param(encode_frame(Ack()), id="not a Hello"),
    pytest.param(b"\x01" + encode_frame(hello_of("b"))[1:], id="another wire version"),
    pytest.param(encode_frame(hello_of("b"))[:-1] + b"\xc1", id="a broken Hello"),
]


@pytest.mark.parametrize("first_frame", FIRST_FRAMES)
def test_after_three_strikes_a_peer_is_refused(first_frame: bytes) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        hostile = network.transport("b")
        async with endpoints(network, "a") as (a,):
            for strike in range(1, MAX_STRIKES + 1):
                stream = await hostile.open_stream("a", [])
                await stream.send_all(first_frame)
                assert await stream.receive_some() == b""
                assert a.links.strikes == {"b": strike}
            # Now not even a right one is heard, nor would it be dialled.
            stream = await hostile.open_stream("a", [])
            await stream.send_all(encode_frame(hello_of("b")))
            assert await stream.receive_some() == b""
            assert a.links.strikes == {"b": MAX_STRIKES}
            with pytest.raises(PeerLostError, match="refused after 3 strikes"):
                await a.links.connect("b", [])
            assert not a.linked
            # Until they expire.
            await trio.sleep(STRIKE_S)
            assert a.links.strikes == {}
            stream = await hostile.open_stream("a", [])
            await stream.send_all(encode_frame(hello_of("b")))
            assert await stream.receive_some()
            assert a.linked == ["b"]

    run_virtual(main)


@pytest.mark.parametrize("first_frame", FIRST_FRAMES)
def test_strikes_count_for_peers_that_we_dialled_as_well(first_frame: bytes) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        hostile = network.transport("b")

        async def serve() -> None:
            while True:
                stream = await hostile.accept()
                await stream.send_all(first_frame)

        async with endpoints(network, "a") as (a,), trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            for _ in range(MAX_STRIKES):
                with pytest.raises(WireError):
                    await a.links.connect("b", [])
            with pytest.raises(PeerLostError, match="refused after 3"):
                await a.links.connect("b", [])
            assert not network.transports["a"].streams
            nursery.cancel_scope.cancel()

    run_virtual(main)


def test_a_handler_that_finds_a_message_wrong_strikes_its_sender_alone() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "a", "b", "c") as (a, b, c):

            async def refuse(message: object, payload: bytes) -> None:
                if isinstance(message, Due):
                    raise WireError("no such round")

            a.on_frame = refuse
            bad = await b.links.connect("a", [])
            await c.links.connect("a", [])
            bad.send(Due("lineage", 0, 0))
            await until(lambda: bool(b.lost))
            assert a.links.strikes == {"b": 1}
            assert a.lost == ["b"]
            await check_works(a, c)

    run_virtual(main)


# --- requests ----------------------------------------------------------------------------------------------------


def test_answers_find_their_requests_in_any_order() -> None:
    async def main() -> None:
        rng = random.Random(5)
        async with linked_pair(MemoryNetwork(latency_s=0.02)) as (a, b, link, _):
            got = {}

            async def later(link: Link, request: Request) -> None:
                await trio.sleep(rng.random())
                await answer_all(link, request)

            async def ask(number: int) -> None:
                answer, payload = await a.links.request(link, "x", f"subject {number}", timeout_s=5)
                assert answer.found
                got[number] = payload

            b.on_request = later
            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(ask, number)
            assert got == {number: f"subject {number}".encode() for number in range(30)}
            assert not a.links._requests._waiting

    run_virtual(main)


def test_a_request_times_out_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, b, link, other):
            start = trio.current_time()
            with pytest.raises(PeerLostError, match="no answer within 3 s"):
                await a.links.request(link, "x", timeout_s=3)
            assert trio.current_time() - start == pytest.approx(3, abs=0.01)
            assert not a.links._requests._waiting
            # The answer that comes too late, and one that nobody asked for, are ignored.
            other.send(Answer(b.of(Request)[0].request, True, "late"))  # type: ignore[union-attr]
            other.send(Answer(12345, True, "unasked"))
            await trio.sleep(1)
            await check_works(a, b)

    run_virtual(main)


def test_a_request_ends_with_its_link() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, b, link, _):
            failures: list[str] = []

            async def ask() -> None:
                try:
                    await a.links.request(link, "x", timeout_s=1000)
                except PeerLostError as error:
                    failures.append(str(error))

            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask)
                await until(lambda: len(b.of(Request)) == 5)
                start = trio.current_time()
                network.crash("b")
            assert trio.current_time() - start < 1
            assert failures == ["b: it closed the connection"] * 5
            assert not a.links._requests._waiting
            with pytest.raises(PeerLostError):
                await a.links.request(link, "x", timeout_s=1000)

    run_virtual(main)


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, _, link, _):
            with trio.move_on_after(1) as scope:
                await a.links.request(link, "x", timeout_s=1000)
            assert scope.cancelled_caught
            assert not a.links._requests._waiting

    run_virtual(main)


def test_only_the_one_who_was_asked_can_answer_and_only_once() -> None:
    async def main() -> None:
        async with endpoints(MemoryNetwork(latency_s=0.01), "a", "b", "c") as (a, b, c):
            link = await a.links.connect("b", [])
            meddler = await c.links.connect("a", [])
            await trio.sleep(0.1)

            async def answer_twice(link: Link, request: Request) -> None:
                meddler.send(Answer(request.request, True, "forged"))
                await trio.sleep(1)
                link.send(Answer(request.request, True, "first"))
                link.send(Answer(request.request, True, "second"))

            b.on_request = answer_twice
            answer, _ = await a.links.request(link, "x", timeout_s=5)
            assert answer.note == "first"
            await trio.sleep(1)
            assert not a.links._requests._waiting

    run_virtual(main)


def test_two_answers_to_one_request_are_a_strike_and_are_not_counted_any_more() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, b, link, _):

            async def answer_twice(_: Link, request: Request) -> None:
                (stream,) = network.transports["b"].streams
                frame = encode_frame(Answer(request.request, True, "x"), bytes(3000))
                # Both are read before the task that waits runs.
                await stream.send_all(frame + frame)

            b.on_request = answer_twice
            answer, payload = await a.links.request(link, "x", timeout_s=5)
            assert (answer.note, payload) == ("x", bytes(3000))
            await until(lambda: a.links.strikes == {"b": 1})
            assert link.lost_reason == "it broke the protocol: answered one request twice"
            assert a.links._requests._answer_bytes == 0

    run_virtual(main)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ends_by", ["time-out", "cancellation", "lost link"])
def test_an_answer_that_comes_as_its_request_ends_is_not_counted_any_more(ends_by: str, seed: int) -> None:
    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (a, _, link, _), trio.open_nursery() as nursery:
            scope, requests, end_s = trio.CancelScope(), a.links._requests, trio.current_time() + 1

            async def ask() -> None:
                with scope, contextlib.suppress(PeerLostError):
                    await a.links.request(link, "x", timeout_s=1 if ends_by == "time-out" else 1000)

            nursery.start_soon(ask)
            await until(lambda: bool(requests._waiting))
            (number,) = requests._waiting
            await trio.sleep_until(end_s)
            if ends_by == "cancellation":
                scope.cancel()
            elif ends_by == "lost link":
                link.close("test")
            requests.take(link, Answer(number, True, "x"), bytes(3000))
            with pytest.raises(WireError, match="twice"):
                requests.take(link, Answer(number, True, "x"), bytes(3000))
            assert requests._answer_bytes == 3000
            await until(lambda: not requests._waiting)
            requests.take(link, Answer(number, True, "x"), bytes(3000))
            assert requests._answer_bytes == 0

    run_virtual(main, seed)


# --- leaving -----------------------------------------------------------------------------------------------------


def test_cancelling_closes_every_stream() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with endpoints(network, "b", "c") as (b, c):
            async with trio.open_nursery() as nursery:
                a = await start_endpoint(network, nursery, hello_of("a"))
                await a.links.connect("b", [])
                await a.links.connect("c", [])
                await network.transports["a"].open_stream("c", [])
                nursery.cancel_scope.cancel()
            await until(lambda: bool(b.lost and c.lost))
            assert not [s for s in network.transports["b"].streams if s.remote == "a"]
            assert a.lost == ["b", "c"] or a.lost == ["c", "b"]

    run_virtual(main)


def test_closing_all_says_what_was_queued_first() -> None:
    async def main() -> None:
        async with endpoints(MemoryNetwork(latency_s=0.01), "a", "b", "c") as (a, b, c):
            for name in ("b", "c"):
                (await a.links.connect(name, [])).send(Leave("done"))
            a.links.close_all("we leave")
            await until(lambda: bool(b.lost and c.lost))
            assert b.of(Leave) == c.of(Leave) == [Leave("done")]
            await until(lambda: not a.links.live)

    run_virtual(main)


def test_a_second_hello_is_for_the_owner_to_judge() -> None:
    """Links hands it on like any message; the node refuses it."""

    async def main() -> None:
        async with linked_pair(MemoryNetwork()) as (_, b, link, _):
            link.send(hello_of("a"))
            await until(lambda: len(b.of(Hello)) == 1)

    run_virtual(main)


def test_duplicated_control_frames_do_no_harm() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with linked_pair(network) as (a, b, _, _):
            network.fault = lambda source, target, packet: PacketFault.DUPLICATE
            await trio.sleep(5)
            network.fault = lambda source, target, packet: PacketFault.NONE
            assert not a.lost
            await check_works(a, b)

    run_virtual(main)
