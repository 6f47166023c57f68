"""Endpoints on the memory network that record callbacks, for tests of links without nodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field

import msgspec
import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.memory_network import MemoryNetwork
from p2ptrain.protocol.links.handshake import Admission
from p2ptrain.protocol.links.link import PEER_TIMEOUT_S, Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.messages import Attempt, Beat, Contribution, Hello, Message, Request
from p2ptrain.protocol.wire.transport import Refusal, no_refusal

OnRequest = Callable[[Link, Request], Awaitable[None]]


@dataclass
class Endpoint:
    """One peer's links; implements `LinkEvents`. Requests are answered in tasks of their own, as a node does it."""

    peer_id: str
    nursery: trio.Nursery
    links: Links = field(init=False)
    received: list[tuple[str, Message, bytes]] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    on_request: OnRequest | None = None
    on_frame: Callable[[Message, bytes], Awaitable[None]] | None = None

    async def on_message(self, link: Link, message: Message, payload: bytes) -> None:
        if isinstance(message, Request) and self.on_request is not None:
            self.nursery.start_soon(self._answer, self.on_request, link, message)
        if self.on_frame is not None:
            await self.on_frame(message, payload)
        self.received.append((link.peer_id, message, payload))

    async def _answer(self, on_request: OnRequest, link: Link, request: Request) -> None:
        with contextlib.suppress(PeerLostError):
            await on_request(link, request)

    def on_link(self, link: Link) -> None:
        self.linked.append(link.peer_id)

    def on_lost(self, link: Link) -> None:
        self.lost.append(link.peer_id)

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> Beat:
        return Beat(sent_s, echo_s, held_s, "", "", -1, 0, 0, "", 0.0, (), 0)

    def of(self, kind: type[Message]) -> list[Message]:
        """What was received of one kind, in order."""
        return [message for _, message, _ in self.received if isinstance(message, kind)]


def hello_of(
    peer_id: str, *, run_id: str = "test", digest: str = "digest", incarnation: str = "1", role: str = "trainer"
) -> Hello:
    return Hello(run_id, digest, f"{peer_id}.{incarnation}", role, (f"/memory/{peer_id}",), b"")


def offering(peer_id: str) -> Hello:
    """The Hello of a peer that offers bulk connections."""
    return msgspec.structs.replace(hello_of(peer_id), bulk=peer_id.encode())


async def start_endpoint(
    network: MemoryNetwork,
    nursery: trio.Nursery,
    hello: Hello,
    *,
    bulk: bool = False,
    peer_timeout_s: float = PEER_TIMEOUT_S,
    chosen: Collection[str] = (),
    refusal: Refusal = no_refusal,
    closed: ClosedRun | None = None,
) -> Endpoint:
    """Put a peer on the network; the name before the dot of its incarnation is its peer id."""
    peer_id = hello.incarnation.split(".")[0]
    endpoint = Endpoint(peer_id, nursery)
    transport = network.transport(peer_id)
    endpoint.links = Links(
        transport,
        lambda: hello,
        endpoint,
        admission=Admission(chosen, closed, refusal),
        peer_timeout_s=peer_timeout_s,
        bulk=transport.bulk if bulk else None,
    )
    await nursery.start(endpoint.links.run)
    return endpoint


@contextlib.asynccontextmanager
async def endpoints(network: MemoryNetwork, *peer_ids: str) -> AsyncIterator[list[Endpoint]]:
    """Peers of one run, not linked yet."""
    async with trio.open_nursery() as nursery:
        yield [await start_endpoint(network, nursery, hello_of(peer_id)) for peer_id in peer_ids]
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def linked_pair(network: MemoryNetwork) -> AsyncIterator[tuple[Endpoint, Endpoint, Link, Link]]:
    """Two peers, "a" and "b", their ends of one link, and its first second behind them."""
    async with endpoints(network, "a", "b") as (a, b):
        link = await a.links.connect("b", [])
        await until(lambda: b.links.get("a") is not None)
        other = b.links.get("a")
        assert other is not None
        yield a, b, link, other


@contextlib.asynccontextmanager
async def bulk_pair(
    network: MemoryNetwork, *, offers: Collection[str] = ("a", "b"), peer_timeout_s: float = PEER_TIMEOUT_S
) -> AsyncIterator[tuple[Endpoint, Endpoint, Link, Link]]:
    """As `linked_pair`, of peers that offer bulk connections."""
    async with trio.open_nursery() as nursery:
        endpoints = []
        for peer_id in "ab":
            has_bulk = peer_id in offers
            hello = offering(peer_id) if has_bulk else hello_of(peer_id)
            endpoints.append(
                await start_endpoint(network, nursery, hello, bulk=has_bulk, peer_timeout_s=peer_timeout_s)
            )
        a, b = endpoints
        link = await a.links.connect("b", [])
        await until(lambda: b.links.get("a") is not None)
        other = b.links.get("a")
        assert other is not None
        yield a, b, link, other
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Let virtual time pass until the condition holds."""
    with trio.fail_after(within_s):
        while not condition():
            await trio.sleep(0.01)


def chunk_message(start: int, stop: int) -> Contribution:
    """Of the first attempt of round 1, without a commitment."""
    return Contribution("0-g", 1, Attempt(1, "a", "a.1"), start, stop, b"", ())
