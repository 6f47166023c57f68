"""The first frames of a stream: both sides say who they are. In a closed run they first prove that they have its key.

In an open run the dialler sends Hello, and the acceptor answers with its own. In a closed run three frames come first:
Challenge (the dialler's nonce), Challenge (the acceptor's nonce and proof), Proof (the dialler's). Neither side sends
its Hello before it has checked the other's proof, so strangers learn only that the run is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from p2ptrain.errors import NotAllowedError, OtherRunError, PeerLostError, RunKeyError, RunMismatchError, WireError
from p2ptrain.protocol.links.copies import Copies
from p2ptrain.protocol.links.frame_reader import FrameReader
from p2ptrain.protocol.wire.closed_run import ACCEPTOR, DIALLER, NONCE_BYTES, ClosedRun
from p2ptrain.protocol.wire.frames import encode_frame
from p2ptrain.protocol.wire.messages import Challenge, Hello, Leave, Message, Proof
from p2ptrain.protocol.wire.transport import PeerId, Refusal, Stream, no_refusal
from p2ptrain.settings.access import DENIED, NOT_ALLOWED

logger = logging.getLogger(__name__)

# Roles in a Hello. Observers do not know the run's settings yet, so their Hello has no run digest.
TRAINER, OBSERVER = "trainer", "observer"
# The reason for refusing a process whose identity another one has, for its user.
COPIED = "another process uses this identity; remove identity.key from --out, and start again"
# A Hello holds at most 16 addresses of 512 bytes.
MAX_HELLO_BYTES = 16 * 1024


@dataclass(frozen=True)
class Admission:
    """Which peers this peer links to.

    Attributes:
        chosen: ids of the user's initial peers.
        closed: the run and its key; None if the run is open.
        refusal: which peers the user of this machine refuses, and why.
    """

    chosen: Collection[PeerId] = ()
    closed: ClosedRun | None = None
    refusal: Refusal = no_refusal


ANYBODY = Admission()


class Handshake:
    """Exchanges the first frames of one peer's streams.

    Args:
        me: our peer id.
        hello: makes our Hello; a peer with another run digest is refused, unless it is an observer.

    Attributes:
        mismatch: an error for the user if a chosen peer has other settings or another run key than we have; else None.
    """

    def __init__(self, me: PeerId, hello: Callable[[], Hello], admission: Admission) -> None:
        self.mismatch: RunMismatchError | None = None
        self._me = me
        self._hello = hello
        self._closed = admission.closed
        self._chosen = frozenset(admission.chosen)
        self._copies = Copies()

    async def dial(self, stream: Stream) -> tuple[Hello, FrameReader]:
        """Greet a peer that we have dialled. Raises WireError, PeerLostError, RunMismatchError."""
        reader = FrameReader(stream, max_body_bytes=MAX_HELLO_BYTES)
        if self._closed is not None:
            await self._prove_as_dialler(self._closed, stream, reader)
        await self.send_hello(stream)
        return await self._receive(stream, reader), reader

    async def receive(self, stream: Stream) -> tuple[Hello, FrameReader]:
        """Receive the Hello of a peer that has dialled us. Call `send_hello` next. Raises as `dial` does."""
        reader = FrameReader(stream, max_body_bytes=MAX_HELLO_BYTES)
        if self._closed is not None:
            await self._prove_as_acceptor(self._closed, stream, reader)
        return await self._receive(stream, reader), reader

    async def send_hello(self, stream: Stream) -> None:
        """Send our Hello. The dialler sends its own first."""
        await stream.send_all(encode_frame(self._hello()))

    async def answer_mismatch(self, stream: Stream, error: RunMismatchError) -> None:
        """Tell a dialler why we refuse it, so that it can tell its user, and wait until it has read that.

        We send our Hello, from which it sees what differs. If it lacks the key of our run, we send a Challenge without
        a proof instead.
        """
        try:
            if self._closed is not None and isinstance(error, RunKeyError):
                await stream.send_all(encode_frame(Challenge(self._closed.nonce(), b"")))
            else:
                await self.send_hello(stream)
            await stream.receive_some()
        except PeerLostError:
            return

    async def _prove_as_dialler(self, closed: ClosedRun, stream: Stream, reader: FrameReader) -> None:
        nonce = closed.nonce()
        await stream.send_all(encode_frame(Challenge(nonce, b"")))
        theirs = await self._next(stream, reader)
        if not isinstance(theirs, Challenge):
            raise self._other_key(stream.remote, theirs)
        nonces, ids = (nonce, theirs.nonce), (self._me, stream.remote)
        # Sent even if the other proof is wrong, so that the other side can tell its user.
        await stream.send_all(encode_frame(Proof(closed.proof(DIALLER, nonces, ids))))
        if not closed.is_proof(theirs.proof, ACCEPTOR, nonces, ids):
            raise self._other_key(stream.remote, theirs)

    async def _prove_as_acceptor(self, closed: ClosedRun, stream: Stream, reader: FrameReader) -> None:
        theirs = await self._next(stream, reader)
        if not isinstance(theirs, Challenge):
            raise self._other_key(stream.remote, theirs)
        nonces, ids = (theirs.nonce, closed.nonce()), (stream.remote, self._me)
        await stream.send_all(encode_frame(Challenge(nonces[1], closed.proof(ACCEPTOR, nonces, ids))))
        proof = await self._next(stream, reader)
        if not isinstance(proof, Proof) or not closed.is_proof(proof.proof, DIALLER, nonces, ids):
            raise self._other_key(stream.remote, proof)

    async def _receive(self, stream: Stream, reader: FrameReader) -> Hello:
        hello = await self._next(stream, reader)
        if not isinstance(hello, Hello):
            raise self._other_key(stream.remote, hello)
        if (hello.role == OBSERVER) != (not hello.digest):
            raise WireError(f"a {hello.role[:100]!r} {'with' if hello.digest else 'without'} a run digest")
        ours = self._hello()
        if hello.run_id != ours.run_id:
            raise OtherRunError(
                f"peer {stream.remote} belongs to run {hello.run_id!r}, not {ours.run_id!r}; choose that run id, or "
                "leave the address of this peer out"
            )
        if hello.digest and ours.digest and hello.digest != ours.digest:
            error = RunMismatchError(
                f"peer {stream.remote} trains run {ours.run_id!r} with other settings "
                f"(run digest {hello.digest[:12]!r}, ours is {ours.digest[:12]!r}); "
                "leave settings out to take over the run's, or choose another run id"
            )
            self._note(stream.remote, error)
            raise error
        return hello

    async def _next(self, stream: Stream, reader: FrameReader) -> Message:
        _, message, _ = await reader.frame()
        if isinstance(message, Leave):
            if stream.remote in self._chosen or (message.reason == COPIED and self._copies.is_news(stream.remote)):
                logger.warning("%s refused the link: %.100r; your id is %s", stream.remote, message.reason, self._me)
            if message.reason in (DENIED, NOT_ALLOWED):
                raise NotAllowedError(
                    f"peer {stream.remote} refuses this peer: {message.reason}; ask its owner to allow your id "
                    f"{self._me}"
                )
            raise PeerLostError(f"{stream.remote} refused the link: {message.reason[:100]!r}")
        if isinstance(message, Challenge) and len(message.nonce) != NONCE_BYTES:
            raise WireError(f"a nonce of {len(message.nonce)} bytes")
        return message

    def _other_key(self, peer: PeerId, frame: Message) -> RunKeyError | WireError:
        """The error for a frame that shows that the other side has another key than we have, or none."""
        if self._closed is None and isinstance(frame, Challenge):
            error = (
                f"the run is closed: peer {peer} asks for its key; give --run-key FILE, the key file of the run, "
                "or a ticket that holds the key"
            )
        elif self._closed is not None and isinstance(frame, Hello):
            error = (
                f"peer {peer} has no run key: its run is open, and ours is closed; leave --run-key out to join an open "
                "run, or give another --initial-peers"
            )
        elif self._closed is not None and isinstance(frame, Challenge | Proof):
            error = (
                f"wrong run key: peer {peer} has another run key or run id; give the key file that its owner has, "
                "and the same --run-id"
            )
        else:
            return WireError(f"unexpected {type(frame).__name__} in the handshake")
        refusal = RunKeyError(error)
        self._note(peer, refusal)
        return refusal

    def _note(self, peer: PeerId, error: RunMismatchError) -> None:
        if peer in self._chosen:
            self.mismatch = error
