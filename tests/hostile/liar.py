"""A liar on the public wire format: it sends any message to anybody, signed as itself, and changes what a node sends.

It needs a `Transport` and nothing else of its victims, so it works on the memory network and over libp2p. A stranger
has links and no node. A member runs an honest node over the same transport, so that it takes part in rounds, and lies
between that node's frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import trio

from p2ptrain.errors import P2PTrainError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.node.node import Node
from p2ptrain.protocol.rounds.deciding.proof import Prover
from p2ptrain.protocol.wire import frames
from p2ptrain.protocol.wire.messages import (
    Answer,
    Attempt,
    Beat,
    Commit,
    Hello,
    Message,
    Ready,
    Record,
    Request,
    Vote,
)
from p2ptrain.protocol.wire.transport import PeerId, Stream, Transport

Sent = tuple[Message, bytes]
Edit = Callable[[PeerId, Message, bytes], Iterable[Sent]]
Serve = Callable[[Request], tuple[Answer, bytes] | None]


class LyingTransport:
    """A transport whose frames are changed by `edit` before they are sent, and that sends others between them."""

    def __init__(self, honest: Transport) -> None:
        self.edit: Edit | None = None
        self.streams: dict[PeerId, LyingStream] = {}
        self._open: list[LyingStream] = []
        self._honest = honest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    async def open_stream(self, peer_id: PeerId, maddrs: list[str]) -> LyingStream:
        return LyingStream(self, await self._honest.open_stream(peer_id, maddrs))

    async def accept(self) -> LyingStream:
        return LyingStream(self, await self._honest.accept())

    def note_opened(self, stream: LyingStream) -> None:
        self._open.append(stream)
        self.streams[stream.remote] = stream

    def note_closed(self, stream: LyingStream) -> None:
        """Of two streams that cross, the other one may go on."""
        self._open = [other for other in self._open if other is not stream]
        self.streams = {other.remote: other for other in self._open}


class LyingStream:
    """One stream of it. Every `send_all` of a link is one frame."""

    def __init__(self, owner: LyingTransport, honest: Stream) -> None:
        self.remote = honest.remote
        self._owner = owner
        self._honest = honest
        self._sending = trio.Lock()
        owner.note_opened(self)

    async def send_all(self, data: bytes) -> None:
        await self.send_raw(data if self._owner.edit is None else edited(self.remote, data, self._owner.edit))

    async def send_raw(self, data: bytes) -> None:
        """Any bytes, not between those of another frame."""
        async with self._sending:
            await self._honest.send_all(data)

    async def receive_some(self) -> bytes:
        return await self._honest.receive_some()

    async def aclose(self) -> None:
        self._owner.note_closed(self)
        await self._honest.aclose()


def edited(to: PeerId, data: bytes, edit: Edit) -> bytes:
    """The frames that `edit` makes of one, with its flags and acknowledgement; a Hello is left as it is."""
    prefix = frames.decode_prefix(data[: frames.PREFIX_BYTES])
    message, payload = frames.decode_body(prefix, data[frames.PREFIX_BYTES :])
    if isinstance(message, Hello):
        return data
    return b"".join(
        frames.encode_frame(changed, more, acked_bytes=prefix.acked_bytes, bulk=prefix.bulk)
        for changed, more in edit(to, message, payload)
    )


class Liar:
    """One hostile identity, which signs for the run of this digest.

    Attributes:
        sent: frames that it sent of its own accord.
        serve: what it answers to a request; None for no answer. A member's node answers instead.
        beat: its heartbeat, of a stranger.
    """

    def __init__(self, transport: LyingTransport, links: Links, digest: str, incarnation: str) -> None:
        self.peer_id = transport.peer_id
        self.transport = transport
        self.links = links
        self.incarnation = incarnation
        self.prover = Prover(transport, incarnation, digest)
        self.serve: Serve = lambda request: None
        self.beat = Beat(0.0, 0.0, 0.0, "", "", -1, 0, 0, "", 0.0, (), 0)
        self.sent = 0

    async def tell(self, victim: PeerId, message: Message, payload: bytes = b"") -> bool:
        """Send one frame, linking first if needed. Returns whether it went out."""
        return await self.send(victim, frames.encode_frame(message, payload))

    async def send(self, victim: PeerId, data: bytes) -> bool:
        """Send any bytes on a link, which is made if needed. Returns whether they went out."""
        try:
            await self.links.connect(victim, [])
            await self.transport.streams[victim].send_raw(data)
        except (P2PTrainError, KeyError):
            return False
        self.sent += 1
        return True

    def sign(self, message: Message) -> Message:
        """The message with its own signatures wherever it has any."""
        match message:
            case Ready():
                return self.prover.signed_ready(message)
            case Commit():
                return self.commit(message.record, message.attempt)
        return message

    def commit(self, record: Record, attempt: Attempt | None = None) -> Commit:
        """A Commit with its own vote, which is all that it can sign."""
        attempt = attempt or Attempt(2**20, self.peer_id, self.incarnation)
        ready = Ready(record.lineage, record.round, attempt, self.incarnation, record.sha256, b"")
        vote = Vote(self.peer_id, self.incarnation, self.prover.signed_ready(ready).signature)
        return Commit(record, attempt, (vote,))

    # What `Links` calls, for a stranger.

    async def on_message(self, link: Link, message: Message, payload: bytes) -> None:
        if isinstance(message, Request) and (answer := self.serve(message)) is not None:
            await link.send_bulk(*answer, Traffic.STATE)

    def on_link(self, link: Link) -> None:
        """Nothing to do."""

    def on_lost(self, link: Link) -> None:
        """Nothing to do."""

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> Beat:
        return msgspec.structs.replace(self.beat, sent_s=sent_s, echo_s=echo_s, held_s=held_s)


async def stranger(nursery: trio.Nursery, transport: Transport, run_id: str, digest: str) -> Liar:
    """A liar without a node, as anybody who knows the run: its links run in the nursery."""
    lying = LyingTransport(transport)
    incarnation = f"{transport.peer_id}.1"
    hello = Hello(run_id, digest, incarnation, "trainer", tuple(transport.maddrs)[:16], b"")
    liar = Liar.__new__(Liar)
    links = Links(lying, lambda: hello, liar)
    Liar.__init__(liar, lying, links, digest, incarnation)
    await nursery.start(links.run)
    return liar


def member(node: Node) -> Liar:
    """A liar that takes part in rounds: the node, which has not been started yet, sends through it."""
    lying = LyingTransport(node.links._transport)
    node.links._transport = lying
    return Liar(lying, node.links, node.run.digest, node.incarnation)
