"""Circuit relay v2 of libp2p: `Relay` serves other peers, `Reservations` are our own places at relays.

A relay is a peer with a public address that forwards bytes between peers that cannot dial each other, or helps them to
(`punch`). A peer that wants to be dialled through a relay reserves a place there ("hop" protocol). A dialling peer asks
the relay for a connection ("hop"), the relay asks the target ("stop" protocol), and then forwards bytes both ways. The
ends of a circuit encrypt and authenticate their traffic: a relay sees only who talks to whom, and how much.

p2pd has both sides, too, and they do not suffice. Its relay ends each circuit after two minutes or 128 KiB; its flags
for higher limits sometimes have no effect, because two of its parts race for the protocol. It reserves only at relays
named at its start, if all of them answer, and after other peers report that it is behind NAT, or after three minutes.
A reservation takes one message, so we send it to any connected public peers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.addresses import peer_id_bytes, peer_id_text
from p2ptrain.network.daemon import Connections, open_stream, public_peers
from p2ptrain.network.libp2p_pb2 import HopMessage, Peer, Reservation, Status, StopMessage
from p2ptrain.network.punch import MAX_A_MINUTE, PUNCH, ExpiringSet, Outer, outer_named, outer_of, peer_at
from p2ptrain.network.socket_stream import Service, SocketStream, receive_message, send_message
from p2ptrain.protocol.token_bucket import TokenBucket
from p2ptrain.protocol.wire.transport import Refusal, Stream, said_here
from p2ptrain.settings.link import BYTES_PER_MBIT

logger = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
# How long a reservation lasts. Peers renew theirs three times a minute.
RESERVATION_S = 120.0
REQUEST_TIMEOUT_S = 10.0
# How often a circuit checks whether its ends are refused by now; the lists are read as often.
ASK_REFUSAL_EVERY_S = 2.0
# How many requests and circuits there may be at once; more are refused.
MAX_STREAMS = 512
# Share of the relay's rate that one circuit may use, so that four pairs are always carried at a fair speed (guess).
CIRCUIT_SHARE = 0.25
# So much of a rate may pass at once after a pause, so that heartbeats and fragments do not wait beside a round.
BURST_S = 0.5
# How old a list of p2pd's connections may be that has both peers who want a direct one.
LIST_EVERY_S = 1.0
# How many direct connections one peer may ask for: as many as it dials for a relay. How many such peers are remembered.
PUNCHES_A_MINUTE, MAX_PUNCHERS = MAX_A_MINUTE, 1024
# How many relays we use; the second is a spare. No more, because relays carry all traffic of their peers.
MAX_RELAYS = 2
# A reservation expires after two minutes at a p2ptrain peer, and with the connection at other relays. Renewing is
# cheap.
RENEW_EVERY_S = 20.0
RESERVE_TIMEOUT_S = 3.0
# How long a peer that refused is not asked again: it may be full, or not a relay.
REFUSED_S = 120.0
# How many such peers are remembered. They are connected, and there are never so many (guess).
MAX_REFUSED = 1024
# Many libp2p programs forward 128 KiB for two minutes; that is too little for training.
MIN_CIRCUIT_BYTES, MIN_CIRCUIT_S = 2**30, 600

Connect = Callable[[SocketStream, str], Awaitable[None]]
"""Connects a peer, which has opened the stream, to the peer with the id."""


class Relay:
    """Grants at most `max_reservations` reservations at a time, and carries circuits to peers that have one.

    No peer has more than `max_reservations` circuits. All circuits together carry at most `rate_mbit`, and each of them
    a quarter of it, in both directions together; faster senders wait. A refused peer gets neither a reservation nor a
    circuit, and its circuits end.
    """

    def __init__(self, control_path: str, max_reservations: int, rate_mbit: float, refusal: Refusal) -> None:
        self.service = Service("relaying", MAX_STREAMS, MAX_STREAMS // 8)
        self._control_path = control_path
        self._max_reservations = max_reservations
        self._refusal = refusal
        self._rate = rate_mbit * BYTES_PER_MBIT
        self._in_all: TokenBucket | None = None
        self._reserved = ExpiringSet(RESERVATION_S, max_reservations)
        self._punches: dict[str, TokenBucket] = {}
        self._connections = Connections(control_path, REQUEST_TIMEOUT_S)
        self._circuits: Counter[str] = Counter()

    def take(self, stream: SocketStream) -> None:
        """Take a stream for the hop protocol from a peer. Called in the event loop."""
        self.service.take(stream, lambda source: self._answer(source, self._connect, may_reserve=True))

    def take_punch(self, stream: SocketStream) -> None:
        """Take a stream from a peer that wants a direct connection, see `punch`. Called in the event loop."""
        self.service.take(stream, lambda source: self._answer(source, self._introduce, may_reserve=False))

    async def _answer(self, stream: SocketStream, connect: Connect, *, may_reserve: bool) -> None:
        with trio.fail_after(REQUEST_TIMEOUT_S):
            request, _ = await receive_message(stream, HopMessage)
        if self._refusal(stream.remote) is not None:
            await send_message(stream, _status(Status.PERMISSION_DENIED))
            return
        match request.type if request.HasField("type") else None:
            case HopMessage.RESERVE if may_reserve:
                await send_message(stream, self._reserve(stream.remote))
            case HopMessage.CONNECT:
                target = _target_of(request)
                if target not in self._reserved or self._refusal(target) is not None:
                    await send_message(stream, _status(Status.NO_RESERVATION))
                else:
                    await connect(stream, target)
            case _:
                await send_message(stream, _status(Status.MALFORMED_MESSAGE))

    def _reserve(self, peer_id: str) -> HopMessage:
        if peer_id not in self._reserved and len(self._reserved) >= self._max_reservations:
            return _status(Status.RESERVATION_REFUSED)
        self._reserved.add(peer_id)
        reservation = Reservation(expire=int(time.time() + RESERVATION_S))
        return HopMessage(type=HopMessage.STATUS, status=Status.OK, reservation=reservation)

    async def _connect(self, source: SocketStream, target: str) -> None:
        """Open a circuit and carry it until it ends."""
        ends = (source.remote, target)
        if any(self._circuits[end] >= self._max_reservations for end in ends):
            await send_message(source, _status(Status.RESOURCE_LIMIT_EXCEEDED))
            return
        self._circuits.update(ends)
        try:
            try:
                request = StopMessage(type=StopMessage.CONNECT, peer=Peer(id=peer_id_bytes(source.remote)))
                stop, _, read_ahead = await self._ask_target(target, STOP, request)
            except PeerLostError:
                await send_message(source, _status(Status.CONNECTION_FAILED))
                raise
            try:
                await send_message(source, _status(Status.OK))
                if read_ahead:
                    await source.send_all(read_ahead)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._end_when_refused, source, stop, target)
                    await self._carry(source, stop)
                    nursery.cancel_scope.cancel()
            finally:
                await stop.aclose()
        finally:
            self._circuits -= Counter(ends)  # forgets those at zero

    async def _introduce(self, source: SocketStream, target: str) -> None:
        """Tell two peers each other's outer address, and to dial now.

        Both are told at once. A packet from one to the other takes longer than the difference between their ways to us,
        so each router has seen its own peer's packet when the other's arrives. Routers that do not ignore but refuse
        unexpected packets need that.
        """
        if not self._may_punch(source.remote):
            await send_message(source, _status(Status.RESOURCE_LIMIT_EXCEEDED))
            return
        outer = await self._outer_addresses(source.remote, target)
        ours, theirs = outer.get(source.remote), outer.get(target)
        if ours is None or theirs is None or ours[0] == theirs[0]:  # peers behind one router use their own addresses
            await send_message(source, _status(Status.CONNECTION_FAILED))
            return
        request = StopMessage(type=StopMessage.CONNECT, peer=peer_at(source.remote, ours))
        try:
            stop, answer, _ = await self._ask_target(target, PUNCH, request)
        except PeerLostError:
            await send_message(source, _status(Status.CONNECTION_FAILED))
            raise
        try:
            await send_message(stop, StopMessage(type=StopMessage.STATUS, status=Status.OK))
            told = HopMessage(
                type=HopMessage.STATUS, status=Status.OK, peer=peer_at(target, outer_named(answer, theirs))
            )
            await send_message(source, told)
        finally:
            await stop.aclose()

    def _may_punch(self, peer_id: str) -> bool:
        if peer_id not in self._punches and len(self._punches) >= MAX_PUNCHERS:
            del self._punches[next(iter(self._punches))]
        bucket = self._punches.setdefault(peer_id, TokenBucket(PUNCHES_A_MINUTE / 60, PUNCHES_A_MINUTE, now=0.0))
        return bucket.spend(1, trio.current_time())

    async def _outer_addresses(self, *peer_ids: str) -> dict[str, Outer]:
        """The outer addresses of our peers, with those of `peer_ids` if they are known."""
        found: dict[str, Outer] = {}
        for most_s in (LIST_EVERY_S, 0.0):
            for peer_id, maddr in await self._connections.listed(most_s):
                if (outer := outer_of(maddr)) is not None:
                    found[peer_id] = outer
            if found.keys() >= set(peer_ids):
                break
        return found

    async def _end_when_refused(self, source: SocketStream, stop: SocketStream, target: str) -> None:
        while self._refusal(source.remote) is None and self._refusal(target) is None:
            await trio.sleep(ASK_REFUSAL_EVERY_S)
        for stream in (source, stop):
            stream.fail("its peer is refused")

    async def _ask_target(
        self, target: str, protocol: str, request: StopMessage
    ) -> tuple[SocketStream, StopMessage, bytes]:
        """Ask a peer with a reservation to accept a circuit, or to dial.

        Returns the stream to it, its answer, and the bytes that it has sent behind it. Raises PeerLostError.
        """
        stream = await open_stream(self._control_path, target, protocol, REQUEST_TIMEOUT_S)
        try:
            with trio.fail_after(REQUEST_TIMEOUT_S):
                await send_message(stream, request)
                answer, read_ahead = await receive_message(stream, StopMessage)
            if answer.status != Status.OK:
                raise PeerLostError(f"{target} does not accept")
        except BaseException as error:
            stream.fail("not connected")
            if isinstance(error, trio.TooSlowError):
                raise PeerLostError(f"{target} does not answer") from None
            raise
        return stream, answer, read_ahead

    async def _carry(self, one: Stream, other: Stream) -> None:
        """Forward bytes both ways until one of the streams ends or breaks."""
        now = trio.current_time()
        if self._in_all is None:
            self._in_all = TokenBucket(self._rate, BURST_S * self._rate, now)
        circuit_rate = CIRCUIT_SHARE * self._rate
        buckets = TokenBucket(circuit_rate, BURST_S * circuit_rate, now), self._in_all
        async with trio.open_nursery() as nursery:

            async def forward(source: Stream, target: Stream) -> None:
                with contextlib.suppress(PeerLostError):
                    while data := await source.receive_some():
                        # Meanwhile nothing is read, so the sender waits too.
                        for bucket in buckets:
                            await trio.sleep(bucket.take(len(data), trio.current_time()))
                        await target.send_all(data)
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward, one, other)
            nursery.start_soon(forward, other, one)


def _status(status: Status) -> HopMessage:
    return HopMessage(type=HopMessage.STATUS, status=status)


def _target_of(request: HopMessage) -> str:
    """The peer id that a request asks to be connected to. Raises PeerLostError."""
    try:
        return peer_id_text(request.peer.id)
    except ValueError:
        raise PeerLostError("malformed peer id") from None


class Reservations:
    """This peer's reservations, at relays that the user does not refuse.

    Attributes:
        maddrs: our addresses through these relays, without our peer id.
    """

    def __init__(self, control_path: str, refusal: Refusal) -> None:
        self.maddrs: tuple[Multiaddr, ...] = ()
        self._control_path = control_path
        self._refusal = refusal
        self._told: set[str] = set()
        self._reserved: dict[str, str] = {}
        self._refused = ExpiringSet(REFUSED_S, MAX_REFUSED)

    def relays(self) -> Collection[str]:
        """The relays at which we have a reservation."""
        return self._reserved.keys()

    def drop(self) -> None:
        """Forget our reservations and their addresses. The relays let them expire."""
        self._reserved, self.maddrs = {}, ()

    async def renew(self) -> None:
        """Renew our reservations, and ask for more while there are fewer than two.

        Raises PeerLostError if the daemon does not answer.
        """
        candidates = {**self._reserved, **await public_peers(self._control_path, RESERVE_TIMEOUT_S)}
        for relay in candidates:
            if (reason := self._refusal(relay)) is not None and relay not in self._told:
                self._told.add(relay)
                logger.info("%s is not used as a relay: %s", relay, said_here(reason))
        kept: dict[str, str] = {}
        try:
            for relay, maddr in candidates.items():
                if len(kept) == MAX_RELAYS:
                    break
                refused = relay in self._refused or self._refusal(relay) is not None
                if not refused and await self._is_granted(relay):
                    kept[relay] = maddr
        finally:
            self._reserved = kept
            self.maddrs = tuple(Multiaddr(f"{maddr}/p2p/{relay}/p2p-circuit") for relay, maddr in kept.items())

    async def _is_granted(self, relay: str) -> bool:
        """Ask a relay for a reservation or its renewal. Returns whether it agrees."""
        try:
            stream = await open_stream(self._control_path, relay, HOP, RESERVE_TIMEOUT_S)
            try:
                with trio.fail_after(RESERVE_TIMEOUT_S):
                    await send_message(stream, HopMessage(type=HopMessage.RESERVE))
                    answer, _ = await receive_message(stream, HopMessage)
            finally:
                stream.fail("asked")
            check_answer(answer)
        except (PeerLostError, trio.TooSlowError) as error:
            logger.debug("no reservation at relay %s: %s", relay, str(error) or "no answer in time")
            # A relay where we had one may be busy or restarting.
            if relay not in self._reserved:
                self._refused.add(relay)
            return False
        return True


def check_answer(answer: HopMessage) -> None:
    """Raises PeerLostError unless a relay grants a reservation, with limits that are high enough for training."""
    if answer.status != Status.OK:
        raise PeerLostError(f"it refused, with status {answer.status}")
    # A missing field means no limit, and reads as 0.
    seconds, size = answer.limit.duration, answer.limit.data
    if 0 < seconds < MIN_CIRCUIT_S or 0 < size < MIN_CIRCUIT_BYTES:
        raise PeerLostError(f"it forwards at most {size} bytes in {seconds} s")
