"""Streams between two real daemons."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from p2ptrain.errors import PeerLostError
from p2ptrain.network import socket_stream, transport
from p2ptrain.network.host import Network, open_network
from p2ptrain.protocol.wire.transport import Directory, Stream, Transport
from tests.network.local import config, open_pair, open_streams, read

pytestmark = pytest.mark.processes

Run = Callable[..., Any]
STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_echo_of_many_sizes_both_ways(run: Run) -> None:
    async def main() -> None:
        async with open_streams() as (ours, theirs, first, second), trio.open_nursery() as nursery:
            assert (ours.remote, theirs.remote) == (second.peer_id, first.peer_id)
            generator = random.Random(0)
            sizes = [1, 7, 65536, 1_200_000, *(generator.randrange(1, 300_000) for _ in range(10))]
            for one, other in ((ours, theirs), (theirs, ours)):
                for size in sizes:
                    data = generator.randbytes(size)
                    nursery.start_soon(one.send_all, data)
                    back = await read(other, size)
                    nursery.start_soon(other.send_all, back)
                    assert await read(one, size) == data

    run(main)


def test_implements_the_protocol_types(run: Run) -> None:
    def check(stream: Stream, transport: Transport, directory: Directory) -> None:
        assert transport.peer_id == first_id
        assert stream.remote != first_id
        assert callable(directory.lookup)

    async def main() -> None:
        nonlocal first_id
        async with open_streams() as (ours, _, first, _):
            first_id = first.peer_id
            check(ours, first.transport, first.directory)

    first_id = ""
    run(main)


def test_close_reads_as_end_on_the_other_side_after_all_bytes(run: Run) -> None:
    async def main() -> None:
        async with open_streams() as (ours, theirs, _, _):
            await ours.send_all(bytes(200_000))
            await ours.aclose()
            await ours.aclose()
            assert len(await read(theirs, 200_000)) == 200_000
            assert await theirs.receive_some() == b""
            assert await theirs.receive_some() == b""
            with pytest.raises(PeerLostError, match="closed"):
                await theirs.send_all(b"too late")
            for operation in (ours.send_all(b"x"), ours.receive_some()):
                with pytest.raises(PeerLostError, match="closed on this side"):
                    await operation

    run(main)


def test_last_words_arrive_when_the_whole_network_is_closed(run: Run) -> None:
    async def main(second: Network) -> None:
        async with open_network(config(second)) as first:
            ours = await first.transport.open_stream(second.peer_id, [])
            await ours.send_all(b"I leave")
        theirs = await second.transport.accept()
        assert await read(theirs, 7) == b"I leave"
        assert await theirs.receive_some() == b""

    async def repeated() -> None:
        async with open_network(config()) as second:
            for _ in range(3):
                await main(second)

    run(repeated)


def test_close_wakes_a_task_that_receives(run: Run) -> None:
    async def main() -> None:
        async with open_streams() as (ours, _, _, _), trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(PeerLostError):
                    await ours.receive_some()

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await ours.aclose()

    run(main)


def test_slow_reader_stops_the_sender_and_our_buffer_is_bounded(run: Run) -> None:
    async def main() -> None:
        async with open_streams() as (ours, theirs, _, _):
            sent = 0
            chunk = os.urandom(256 * 1024)
            # p2pd buffers some megabytes; then the sender blocks.
            for _ in range(400):
                with trio.move_on_after(1.0) as scope:
                    await ours.send_all(chunk)
                sent += len(chunk)
                if scope.cancelled_caught:
                    break
            else:
                pytest.fail(f"{sent} bytes were sent to a peer that reads nothing")
            # One read of the event loop may exceed the bound.
            assert theirs._buffered_bytes <= socket_stream.RECEIVE_BUFFER_BYTES + 256 * 1024  # type: ignore[attr-defined]
            assert await read(theirs, sent) == chunk * (sent // len(chunk))

    run(main)


def test_cancelled_receive_loses_nothing(run: Run) -> None:
    async def main() -> None:
        async with open_streams() as (ours, theirs, _, _):
            with trio.move_on_after(0.01) as scope:
                await theirs.receive_some()
            assert scope.cancelled_caught
            await ours.send_all(b"later")
            assert await read(theirs, 5) == b"later"

    run(main)


def test_streams_that_are_not_accepted_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ACCEPT_QUEUE", 2)

    async def main() -> None:
        async with open_pair() as (first, second), trio.open_nursery() as nursery:
            refused: list[int] = []
            three_refused = trio.Event()

            async def open_one(index: int) -> None:
                with contextlib.suppress(PeerLostError):
                    stream = await first.transport.open_stream(second.peer_id, [])
                    await stream.send_all(bytes([index]))
                    assert await stream.receive_some() == b""
                refused.append(index)
                if len(refused) == 3:
                    three_refused.set()

            for index in range(5):
                nursery.start_soon(open_one, index)
            await three_refused.wait()
            accepted = {(await read(await second.transport.accept(), 1))[0] for _ in range(2)}
            assert accepted == set(range(5)) - set(refused)
            nursery.cancel_scope.cancel()

    run(main)


def test_peers_that_cannot_be_reached(run: Run) -> None:
    async def main() -> None:
        async with open_pair() as (first, second):
            for peer_id, maddrs in (
                (STRANGER, []),
                (STRANGER, ["/ip4/127.0.0.1/tcp/9"]),
                (STRANGER, second.maddrs),
                (STRANGER, ["no address", "/ip4/999.0.0.1/tcp/1", "é"]),
                ("not a peer id", []),
                ("", []),
                (first.peer_id, first.maddrs),
            ):
                with pytest.raises(PeerLostError):
                    await first.transport.open_stream(peer_id, maddrs)
            stream = await first.transport.open_stream(second.peer_id, ["no address", *second.maddrs])
            assert stream.remote == second.peer_id

    run(main)


def test_a_peer_that_is_reached_when_the_time_is_out_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "OPEN_TIMEOUT_S", 0.0)

    async def reached(*arguments: object) -> None:
        """A link that was cut is whole again, at the last moment."""

    async def main() -> None:
        async with open_pair() as (first, second):
            monkeypatch.setattr(transport, "dial", reached)
            with pytest.raises(PeerLostError, match="timeout"):
                await first.transport.open_stream(second.peer_id, second.maddrs)

    run(main)


def test_maddrs_are_dialable_with_loopback_last(run: Run) -> None:
    async def main() -> None:
        async with open_network(config(host_maddrs=("/ip4/0.0.0.0/tcp/0",))) as network:
            assert network.maddrs
            assert all(maddr.endswith(f"/p2p/{network.peer_id}") for maddr in network.maddrs)
            assert not any("/0.0.0.0/" in maddr or "/tcp/0/" in maddr for maddr in network.maddrs)
            assert len(set(network.maddrs)) == len(network.maddrs)
            assert network.maddrs[-1].startswith("/ip4/127.0.0.1/")
        announced = ("/dns4/peer.example.org/tcp/31337",)
        async with open_network(config(announce_maddrs=announced)) as network:
            assert network.maddrs == [f"{announced[0]}/p2p/{network.peer_id}"]

    run(main)


def test_a_refresh_that_fails_is_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug while refreshing addresses or reservations breaks no stream."""

    async def main() -> None:
        async with open_pair() as (first, second):
            done = trio.Event()
            failures = 0

            async def fail(*arguments: object) -> list[str]:
                nonlocal failures
                failures += 1
                if failures == 5:
                    done.set()
                raise ZeroDivisionError("a bug of ours")

            # Both loops already wait with the old interval: start new ones with a short one.
            monkeypatch.setattr(transport, "REFRESH_MADDRS_S", 0.01)
            monkeypatch.setattr(transport, "RENEW_EVERY_S", 0.01)
            monkeypatch.setattr(transport, "own_maddrs", fail)
            before = first.maddrs
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first.transport._keep_maddrs, SimpleNamespace(end_if_outgrown=lambda: None))
                nursery.start_soon(first.transport._keep_reservations)
                await done.wait()
                nursery.cancel_scope.cancel()
            assert first.maddrs == before
            assert 1 <= caplog.text.count("Traceback") <= 4  # of each loop of each network once
            await first.transport.open_stream(second.peer_id, second.maddrs)

    run(main)
