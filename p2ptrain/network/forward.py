"""Forwards a connection along a way, for a program that cannot choose its interface: p2pd, in `probe`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio

from p2ptrain.network.interfaces import Way, socket_to
from p2ptrain.network.thread import open_background

_PIECE_BYTES = 64 * 1024


@contextlib.asynccontextmanager
async def forwarded(way: Way) -> AsyncIterator[str]:
    """A multiaddr on loopback for one connection, which is forwarded along a way until the block ends."""
    with trio.socket.socket() as listening:
        await listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        async with open_background() as background:
            background.start_soon(_forward_one, listening, way)
            yield f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}"


async def _forward_one(listening: trio.socket.SocketType, way: Way) -> None:
    with contextlib.suppress(OSError):
        near, _ = await listening.accept()
        with near, await socket_to(way.target, way.interface) as far:
            await far.connect(way.target)
            here, there = trio.SocketStream(near), trio.SocketStream(far)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump, here, there, nursery.cancel_scope)
                nursery.start_soon(_pump, there, here, nursery.cancel_scope)


async def _pump(source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        while data := await source.receive_some(_PIECE_BYTES):
            await target.send_all(data)
    both.cancel()
