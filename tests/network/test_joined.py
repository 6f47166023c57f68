"""Two joined connections: what passes between them, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from p2ptrain.errors import PeerLostError
from p2ptrain.network import joined
from tests.network.local import end_of, two_listening

Run = Callable[..., Any]


def test_what_arrives_on_one_of_two_joined_connections_leaves_on_the_other(run: Run) -> None:
    """From the port on which another socket listens."""

    async def main() -> None:
        async with two_listening() as (p2pd, far):
            async with joined.joined(p2pd.getsockname(), far.getsockname()):
                (theirs, address), (ours, _) = await far.accept(), await p2pd.accept()
            assert address == p2pd.getsockname()
            data = bytes(range(256)) * 8192
            async with trio.open_nursery() as nursery:
                for sender, receiver in ((theirs, ours), (ours, theirs)):
                    nursery.start_soon(trio.SocketStream(sender).send_all, data)
                    received = bytearray()
                    while len(received) < len(data):
                        received += await receiver.recv(65536)
                    assert received == data
            theirs.close()
            assert await end_of(ours) == b""

    run(main)


@pytest.mark.parametrize("sent", [b"", b"hello"])
def test_a_connection_that_ends_before_it_is_joined_ends_the_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """What it has sent still arrives."""

    async def main() -> None:
        async with two_listening() as (p2pd, far):
            bridged = joined.from_asyncio

            async def send_and_close(coroutine: Any) -> Any:
                """After the first connection, and before the second."""
                result = await bridged(coroutine)
                if result is not None:
                    monkeypatch.setattr(joined, "from_asyncio", bridged)
                    theirs, _ = await far.accept()
                    await theirs.send(sent)
                    theirs.close()
                    await trio.testing.wait_all_tasks_blocked()
                return result

            monkeypatch.setattr(joined, "from_asyncio", send_and_close)
            async with joined.joined(p2pd.getsockname(), far.getsockname()):
                ours, _ = await p2pd.accept()
            assert await end_of(ours) == sent

    run(main)


def test_a_peer_that_reads_nothing_keeps_no_connection_open(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(joined, "LINGER_S", 0.0)
        aborted = trio.Event()
        end = joined.End()
        end.other = Mock(abort=aborted.set)
        end.connection_lost(None)
        await aborted.wait()

    run(main)


def test_a_port_that_nobody_listens_on_is_a_lost_peer(run: Run) -> None:
    async def main() -> None:
        async with two_listening() as (p2pd, far):
            silent = far.getsockname()
            far.close()
            with pytest.raises(PeerLostError, match="dialling from our own port"):
                async with joined.joined(p2pd.getsockname(), silent):
                    pass

    run(main)
