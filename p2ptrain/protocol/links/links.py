"""All links of a peer: opens and accepts them, and sends heartbeats. `handshake` has the first frames of a stream.

There is one link per peer. If two peers dial each other at the same instant, the link has a second stream to read from.
A peer that was restarted, or that dials us again because it lost the link on its side, gets a new link.

An error closes the link that it happened on and nothing else. Bytes that break a rule are also a strike; an exception
in our code is logged once with its traceback.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import trio

from p2ptrain.error_log import ErrorLog, innermost
from p2ptrain.errors import P2PTrainError, PeerLostError, RunMismatchError, WireError
from p2ptrain.protocol.links.bulk import BulkConnections
from p2ptrain.protocol.links.copies import Copies
from p2ptrain.protocol.links.frame_reader import ReceiveBudget
from p2ptrain.protocol.links.handshake import ANYBODY, COPIED, OBSERVER, TRAINER, Admission, Handshake
from p2ptrain.protocol.links.limits import (
    MAX_REASON,
    MAX_STRIKES,
    STRIKE_S,
    PeerRates,
    Strikes,
    Struck,
    excess_observers,
    greeting_to_end,
)
from p2ptrain.protocol.links.link import MAX_BEAT_EVERY_S, PEER_TIMEOUT_S, Link, LinkSetup
from p2ptrain.protocol.links.outbox import LinkCounters
from p2ptrain.protocol.links.requests import Requests
from p2ptrain.protocol.wire.frames import encode_frame
from p2ptrain.protocol.wire.messages import Answer, Beat, Hello, Leave, Message
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import BulkTransport, PeerId, Stream, Transport, said_here

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 8.0
# A link has two streams if both sides dialled at the same instant.
MAX_STREAMS = 2
BEAT_EVERY_S = 1.0
# With more links than LINKS_BEATEN, each link gets fewer Beats: about LINKS_BEATEN a second in all, and at least one
# per MAX_BEAT_EVERY_S.
LINKS_BEATEN = 16
# If the heartbeat loop is later than this, the process was held up, and messages of other peers wait to be read.
HELD_UP_S = 1.0


class LinkEvents(Protocol):
    """Callbacks of the owner of the links."""

    async def on_message(self, link: Link, message: Message, payload: bytes) -> None: ...

    def on_link(self, link: Link) -> None: ...

    def on_lost(self, link: Link) -> None: ...

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> Beat: ...


class Links:
    """Owns every stream of a peer.

    Args:
        hello: makes our Hello.
        admission: which peers this one links to.
        peer_timeout_s: the most seconds without a message before a peer is considered lost.
        errors: logs exceptions of our code.
        bulk: opens and accepts bulk connections; None: bulk bytes take the streams.

    Attributes:
        live: the link to each linked peer, the oldest first.
        counters: bytes and fragments of all links.
        budget: limits the bytes of incomplete and unread frames of all links.
        chosen: ids of the user's initial peers.
        bulk: the bulk connections.
    """

    def __init__(
        self,
        transport: Transport,
        hello: Callable[[], Hello],
        events: LinkEvents,
        *,
        admission: Admission = ANYBODY,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        errors: ErrorLog | None = None,
        bulk: BulkTransport | None = None,
    ) -> None:
        self.peer_timeout_s = peer_timeout_s
        self.live: dict[PeerId, Link] = {}
        self.counters = LinkCounters()
        self.budget = ReceiveBudget()
        self._strikes = Strikes()
        self._rates = PeerRates(peer_timeout_s)
        self._copies = Copies()
        self.chosen = frozenset(admission.chosen)
        self._refusal = admission.refusal
        self._transport = transport
        self._handshake = Handshake(transport.peer_id, hello, admission)
        self._events = events
        self._errors = errors or ErrorLog(logger)
        self.bulk = BulkConnections(bulk, self.live, self.containing, self._errors)
        self._setup = LinkSetup(self._on_message, self.counters, self.budget, self.bulk.opened, peer_timeout_s)
        self._greeting: dict[trio.CancelScope, PeerId] = {}  # oldest first
        self._requests = Requests()
        self._connecting: dict[PeerId, trio.Event] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept streams and send beats until cancelled; then every stream is closed."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._accept)
            nursery.start_soon(self.bulk.run)
            nursery.start_soon(self._beat)
            task_status.started()

    @property
    def mismatch(self) -> RunMismatchError | None:
        """An error for the user if a chosen peer has other settings or another run key than we have."""
        return self._handshake.mismatch

    def get(self, peer_id: PeerId) -> Link | None:
        return self.live.get(peer_id)

    def trainers(self) -> list[Link]:
        """Live links to training peers, with or without the run's state."""
        return [link for link in list(self.live.values()) if link.hello.role == TRAINER]

    def announce(self) -> None:
        """Send a heartbeat to all peers now."""
        for link in self.live.values():
            link.make_beat(self._events.make_beat)

    async def connect(self, peer_id: PeerId, maddrs: list[str]) -> Link:
        """The live link to a peer, opened if there is none. Raises PeerLostError, RunMismatchError."""
        while (pending := self._connecting.get(peer_id)) is not None:
            await pending.wait()
        if (link := self.live.get(peer_id)) is not None:
            return link
        if self._is_struck_out(peer_id):
            raise PeerLostError(f"{peer_id}: refused after {MAX_STRIKES} strikes")
        if (refusal := self._refusal(peer_id)) is not None:
            raise PeerLostError(f"{peer_id}: {said_here(refusal)}")
        assert self._nursery is not None
        self._connecting[peer_id] = trio.Event()
        try:
            stream = await self._transport.open_stream(peer_id, maddrs)
            try:
                with trio.fail_after(HELLO_TIMEOUT_S):
                    hello, reader = await self._handshake.dial(stream)
            except BaseException as error:
                if isinstance(error, WireError):
                    self.strike(peer_id, str(error))
                await stream.aclose()
                if isinstance(error, trio.TooSlowError):
                    raise PeerLostError(f"{peer_id}: no Hello within {HELLO_TIMEOUT_S:.0f} s") from None
                raise
            return await self._register(peer_id, hello, stream, reader.read_ahead)
        except P2PTrainError:
            raise
        except Exception as error:
            self._errors.note(f"linking to {peer_id}", error)
            raise PeerLostError(f"{peer_id}: internal error: {error!r}") from error
        finally:
            self._connecting.pop(peer_id).set()

    async def request(
        self, link: Link, what: str, subject: str = "", index: int = 0, *, timeout_s: float
    ) -> tuple[Answer, bytes]:
        """Send a request and wait for its answer.

        Raises PeerLostError if the link is lost, if no answer to any request of ours arrives on it for `timeout_s` (on
        a slow link this answer may be queued behind others), or after 8 times as long.
        """
        return await self._requests.ask(link, what, subject, index, timeout_s)

    def close_all(self, reason: str) -> None:
        for link in list(self.live.values()):
            link.close(reason)

    def strike(self, peer_id: PeerId, what: str, *, count: int = 1) -> None:
        """Give a peer a strike and close its link. With three, it is neither dialled nor accepted until one expires.

        Args:
            what: how it broke the protocol, for the log and for `p2ptrain peers`. Made safe to print.
            count: how many strikes; 3 refuse it at once, if its guilt is proved.
        """
        reason = f"broke the protocol: {what}"
        total = self._strikes.add(peer_id, reason, trio.current_time(), count=count)
        if (link := self.live.get(peer_id)) is not None:
            link.close(f"it {reason}")
        refused = f"; refused for {STRIKE_S / 60:.0f} minutes" if total >= MAX_STRIKES else ""
        logger.warning("%s %s (strike %d of %d%s)", peer_id, shown(reason, MAX_REASON), total, MAX_STRIKES, refused)

    @property
    def strikes(self) -> dict[PeerId, int]:
        """The number of each peer's strikes that have not expired."""
        return self._strikes.counts(trio.current_time())

    def relayed(self) -> dict[PeerId, PeerId]:
        """The linked trainers that our bulk bytes reach through a relay (and which), or only through libp2p ("")."""
        relays = {link: self._transport.relay_to(link.peer_id) for link in self.trainers()}
        return {link.peer_id: relay for link, relay in relays.items() if relay or self.bulk.is_impossible(link)}

    def struck(self, most: int) -> list[Struck]:
        """The peers struck last, the newest first."""
        return self._strikes.latest(most, trio.current_time())

    def _is_struck_out(self, peer_id: PeerId) -> bool:
        return self._strikes.count(peer_id, trio.current_time()) >= MAX_STRIKES

    @contextlib.contextmanager
    def containing(self, link: Link, what: str) -> Iterator[None]:
        """Close the link if the block raises an `Exception` other than PeerLostError. A WireError is also a strike.

        Args:
            what: the action in the block, for the log: "answering a request".
        """
        try:
            yield
        except* Exception as errors:
            cause = innermost(errors)
            if isinstance(cause, WireError):
                self.strike(link.peer_id, str(cause))
            elif not isinstance(cause, PeerLostError):
                link.close(f"internal error, {what}: {cause!r}")
                self._errors.note(f"link to {link.peer_id} closed, {what}", cause)

    async def _accept(self) -> None:
        assert self._nursery is not None
        while True:
            stream = await self._transport.accept()
            ended = greeting_to_end(list(self._greeting.values()), stream.remote)
            if ended is not None:
                scope = list(self._greeting)[ended]
                silent = self._greeting.pop(scope)
                logger.debug("%s has sent no Hello; its stream makes room for one of %s", silent, stream.remote)
                scope.cancel()
            scope = trio.CancelScope()
            self._greeting[scope] = stream.remote
            self._nursery.start_soon(self._greet, stream, scope)

    async def _greet(self, stream: Stream, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await self._welcome(stream)
            if scope.cancelled_caught:
                await stream.aclose()
        finally:
            self._greeting.pop(scope, None)

    async def _welcome(self, stream: Stream) -> None:
        try:
            if self._is_struck_out(stream.remote):
                raise PeerLostError(f"refused after {MAX_STRIKES} strikes")
            with trio.fail_after(HELLO_TIMEOUT_S):
                if (refusal := self._refusal(stream.remote)) is not None:
                    await stream.send_all(encode_frame(Leave(refusal)))
                    raise PeerLostError(refusal)
                hello, reader = await self._handshake.receive(stream)
                if self._displaced_by(stream.remote, hello.role) is None:
                    await stream.send_all(encode_frame(Leave(f"it has {len(self.live)} links, and accepts no more")))
                    raise PeerLostError("too many links")
                if (refusal := self._identity_refusal(stream.remote, hello)) is not None:
                    await stream.send_all(encode_frame(Leave(refusal)))
                    raise PeerLostError(refusal)
                await self._handshake.send_hello(stream)
            # Others may have taken the last places since then.
            if (displaced := self._displaced_by(stream.remote, hello.role)) is None:
                raise PeerLostError("too many links")
            for link in displaced:
                link.close("its place is needed for another peer")
                self._remove(link)
            await self._register(stream.remote, hello, stream, reader.read_ahead)
        except (PeerLostError, WireError, RunMismatchError, trio.TooSlowError) as error:
            logger.debug("stream from %s refused: %s", stream.remote, error)
            if isinstance(error, WireError):
                self.strike(stream.remote, str(error))
            if isinstance(error, RunMismatchError):
                with trio.move_on_after(1):
                    await self._handshake.answer_mismatch(stream, error)
            await stream.aclose()
        except Exception as error:
            self._errors.note(f"welcoming {stream.remote}; its stream is closed", error)
            await stream.aclose()
        except BaseException:
            await stream.aclose()
            raise

    def _displaced_by(self, newcomer: PeerId, role: str) -> list[Link] | None:
        """The links of observers that end to make room for a link of this peer; None if it is refused."""
        others = [link for link in self.live.values() if link.peer_id != newcomer]  # oldest first
        observers = [link for link in others if link.hello.role == OBSERVER]
        excess = excess_observers(role, len(others) - len(observers), len(observers))
        return None if excess is None else observers[:excess]

    async def _register(self, peer_id: PeerId, hello: Hello, stream: Stream, read_ahead: bytes) -> Link:
        """Add a stream to its peer's link, or to a new one. Raises PeerLostError if the link already has two."""
        assert self._nursery is not None
        link = self.live.get(peer_id)
        if link is not None:
            if link.hello.incarnation != hello.incarnation:
                if (refusal := self._identity_refusal(peer_id, hello)) is not None:
                    await stream.aclose()
                    raise PeerLostError(refusal)
                self._copies.note_replaced(peer_id, link.hello.incarnation)
                link.close("it was restarted")
            elif trio.current_time() - link.opened_s > HELLO_TIMEOUT_S:
                link.close("it dialled again")
            if not link.lost.is_set():
                if link.streams >= MAX_STREAMS:
                    await stream.aclose()
                    raise PeerLostError(f"{peer_id}: it has {MAX_STREAMS} streams on its link")
                self._start(link, stream, read_ahead)
                return link
            self._remove(link)
        rates = self._rates.of(peer_id, trio.current_time())
        link = self.live[peer_id] = Link(peer_id, hello, self._setup, rates)
        self._copies.note_linked(peer_id, hello.incarnation)
        self._start(link, stream, read_ahead)
        with self.containing(link, "beginning the link"):
            self.bulk.begin(link)
            self._events.on_link(link)
        return link

    def _identity_refusal(self, peer_id: PeerId, hello: Hello) -> str | None:
        """Why this process of a peer is refused beside the one that is linked; None if it is not. Warns once."""
        link = self.live.get(peer_id)
        if link is None or link.hello.incarnation == hello.incarnation:
            return None
        linked = link.hello
        # Beside a live trainer an observer is a copy. One that has been silent for half of its limit (a guess) may have
        # lost its power: after a restart it asks for the run's settings first, as an observer.
        if linked.role == TRAINER and hello.role == OBSERVER and link.silent_s < link.patience_s / 2:
            return COPIED
        if not self._copies.is_copy(peer_id, hello.incarnation, linked.incarnation):
            return None
        if self._copies.is_news(peer_id):
            logger.warning(
                "several processes use the identity of %s, as after a machine was copied; the last one is kept. Remove "
                "identity.key from the --out directories of the others, and start them again",
                peer_id,
            )
        return COPIED

    def _start(self, link: Link, stream: Stream, read_ahead: bytes) -> None:
        assert self._nursery is not None
        link.streams += 1
        self._nursery.start_soon(self._run_stream, link, stream, read_ahead)

    def _remove(self, link: Link) -> None:
        if self.live.get(link.peer_id) is link:
            del self.live[link.peer_id]
            self._rates.note_gone(link.peer_id, trio.current_time())
            with self.containing(link, "ending the link"):
                self.bulk.end(link)
                self._events.on_lost(link)

    async def _run_stream(self, link: Link, stream: Stream, read_ahead: bytes) -> None:
        try:
            with self.containing(link, "serving the link"):
                await link.run_stream(stream, read_ahead)
        finally:
            self._remove(link)

    async def _on_message(self, link: Link, message: Message, payload: bytes) -> None:
        if isinstance(message, Answer):
            self._requests.take(link, message, payload)
        else:
            await self._events.on_message(link, message, payload)

    async def _beat(self) -> None:
        due, excused = trio.current_time(), False
        while True:
            now = trio.current_time()
            # While this process was held up, silence proves nothing. Not twice in a row: a machine that is always late
            # must detect lost peers too.
            excused = now - due > HELD_UP_S and not excused
            every_s = min(MAX_BEAT_EVERY_S, BEAT_EVERY_S * math.ceil(len(self.live) / LINKS_BEATEN))
            for link in list(self.live.values()):
                if (refusal := self._refusal(link.peer_id)) is not None:
                    link.send(Leave(refusal))
                    link.close(said_here(refusal))
                    continue
                if link.silent_s > link.patience_s and not excused:
                    link.close(f"nothing heard for {link.patience_s:.0f} s")
                    continue
                # At most twice as long as before: the partner waits for a multiple of the intervals that it has seen.
                gap_s = min(every_s, 2 * link.beat_gap_s)
                if now < link.beat_sent_s + gap_s - BEAT_EVERY_S / 2:
                    continue
                link.beat_gap_s = gap_s
                try:
                    link.make_beat(self._events.make_beat)
                except Exception as error:
                    self._errors.note(f"making a heartbeat for {link.peer_id}", error)
            due = now + BEAT_EVERY_S
            await trio.sleep_until(due)
