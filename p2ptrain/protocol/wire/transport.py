"""The interface between the protocol and a network.

`p2ptrain.network` implements it over hivemind's libp2p daemon and DHT, `p2ptrain.memory_network` over in-process queues
with faults and virtual time. The protocol imports neither.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

PeerId = str
"""A peer's network identity (libp2p: base58 of the hash of its public key)."""

Refusal = Callable[[PeerId], str | None]
"""Returns why the user of this machine refuses a peer, as a text for that peer; None if the peer is allowed."""


def no_refusal(peer_id: PeerId) -> str | None:
    """The `Refusal` that allows every peer."""
    return None


def said_here(refusal: str) -> str:
    """Rewrite the text of a `Refusal` for the user of this machine."""
    return refusal.replace("this peer is", "it is").replace(" its ", " your ")


class Stream(Protocol):
    """An ordered, reliable, authenticated byte stream with one other peer."""

    @property
    def remote(self) -> PeerId:
        """The authenticated identity of the other end."""
        ...

    async def send_all(self, data: bytes) -> None:
        """Send all bytes, waiting while the network is full. Raises PeerLostError when the stream is broken."""
        ...

    async def receive_some(self) -> bytes:
        """Receive at least one byte, or b"" once the other end has closed. Raises PeerLostError when broken."""
        ...

    async def aclose(self) -> None:
        """Close both directions at once. Never raises, may be called twice."""
        ...


class Signer(Protocol):
    """Signs with the key of our network identity, and checks signatures of other identities."""

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, data: bytes) -> bytes:
        """Sign `data`. Anyone who knows our peer id can verify the result."""
        ...

    def verify(self, peer_id: PeerId, data: bytes, signature: bytes) -> bool:
        """Whether this peer has signed `data`; never raises, whatever the bytes."""
        ...


class Transport(Signer, Protocol):
    """Opens and accepts streams."""

    @property
    def maddrs(self) -> list[str]:
        """Addresses at which other peers can dial us: multiaddrs that end in /p2p/<peer id>, loopback last."""
        ...

    async def open_stream(self, peer_id: PeerId, maddrs: list[str]) -> Stream:
        """Open a stream; `maddrs` are hints and may be empty. Raises PeerLostError."""
        ...

    def relay_to(self, peer_id: PeerId) -> PeerId:
        """The relay that carries all streams with this peer; empty if a stream is direct, or there is none."""
        ...

    async def accept(self) -> Stream:
        """Wait for the next stream that another peer opened."""
        ...


class BulkTransport(Protocol):
    """Opens and accepts connections that carry only bulk bytes, beside the streams of `Transport`."""

    @property
    def offer(self) -> bytes:
        """Bytes for our Hello, with which others open connections to us and accept ours; empty if none are possible."""
        ...

    def admit(self, peer_id: PeerId, offer: bytes) -> None:
        """Accept connections of this peer that match the offer in its last Hello; with an empty offer, accept none.

        Raises WireError if the offer is malformed.
        """
        ...

    async def open(self, peer_id: PeerId, offer: bytes, maddrs: Sequence[str]) -> Stream:
        """Open a connection to a peer at one of these addresses. Raises PeerLostError."""
        ...

    async def accept(self) -> Stream:
        """Wait for the next connection of an admitted peer."""
        ...


class Directory(Protocol):
    """A shared table of signed, expiring records (a DHT, or a dict in tests). Peers of a run find each other in it."""

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        """Store our record under `key`, replacing our earlier one. Returns False if nobody accepted it."""
        ...

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        """All records under `key` that have not expired, by the peer that signed them.

        Raises PeerLostError if nobody answers, which does not mean that there are none.
        """
        ...


class Compute(Protocol):
    """Runs work of more than a few milliseconds in a worker thread; inline under virtual time.

    Work that has begun is not cancelled: the call returns when it has ended. Calls may run at the same time.
    """

    @property
    def threads(self) -> int:
        """How many calls run at the same time."""
        ...

    def __call__(self, work: Callable[..., T], /, *args: Any) -> Awaitable[T]: ...


class Inline:
    """The `Compute` of peers in virtual time: runs work at once, in the calling task."""

    threads = 1

    async def __call__(self, work: Callable[..., T], /, *args: Any) -> T:
        return work(*args)
