"""Direct connections between two peers that are each behind a router or firewall (TCP hole punching).

Both dial each other's outer address at once, normally from the port that they listen on. A router lets in packets that
look like an answer, so the first packet of each peer opens its own router for the other. A relay sees the outer
addresses of both, and tells both to dial at one moment (`relay.Relay`). The messages are those of the circuit relay.

Packets that cross make a TCP connection without a listening end (RFC 9293, simultaneous open). Two p2pds would then
both be the client of the handshake, which fails. So only the peer that asks has its p2pd dial. The asked one dials
here, and passes all bytes on to its own p2pd, which sees a connection that it has accepted. If its machine has a public
IPv4 address, it dials from a new port, and names that port in its answer. The asking p2pd knows the listening port from
libp2p's DHT, and may just have dialled it in vain. p2pd then refuses that address for some seconds, and Linux's
connection tracking can spoil the simultaneous open.

It works between routers that give a machine one outer port for all destinations, as most home routers do. Otherwise
each peer dials a port that the other's router does not open, both dials end after 4 s, and the peers use the relay.
p2pd's own hole punching (DCUtR) needs four peers with different public addresses before it believes an outer address,
and a circuit before it starts. Ours comes before the circuit, because p2pd does not dial a peer that it is connected
to.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Collection, Iterable, Iterator

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.network._hivemind import Multiaddr
from p2ptrain.network.addresses import peer_id_bytes, peer_id_text, port_of
from p2ptrain.network.daemon import Connections, dial, open_stream
from p2ptrain.network.joined import End, joined
from p2ptrain.network.libp2p_pb2 import HopMessage, Peer, Status, StopMessage
from p2ptrain.network.socket_stream import Service, SocketStream, receive_message, send_message
from p2ptrain.protocol.membership.reachability import Scope, is_relayed, scope_of
from p2ptrain.protocol.token_bucket import TokenBucket
from p2ptrain.protocol.wire.transport import Refusal

logger = logging.getLogger(__name__)

PUNCH = "p2ptrain/punch/1"
# Three round trips through the relay, on a slow path (RTT 0.5 s) with a lost packet.
ASK_TIMEOUT_S = 3.0
# A second packet goes out after one second, a third after three; the handshake takes four round trips.
DIAL_TIMEOUT_S = 4.0
# How long a peer that was dialled in vain is not dialled: its router will fail again, and each try delays the link by
# DIAL_TIMEOUT_S.
FAILED_S = 600.0
# How many such peers are remembered; beyond it the oldest is forgotten.
MAX_FAILED = 1024
# How many requests are served at once, and for one relay in a minute. More are refused, so that neither a relay nor a
# peer that asks it can make us send many packets to strangers. A peer has about 64 links; it asks for half of them
# itself, and the others ask for the other half (guess).
MAX_AT_ONCE = 8
MAX_A_MINUTE = 32
# How many connections to peers that one relay named may be joined at once: half of the links, likewise.
MAX_JOINED = 32
# How many relays have a budget of their own; requests of more are refused. A peer has two at a time (guess).
MAX_COUNTED_RELAYS = 16
CONNECTED_EVERY_S = 0.05

Outer = tuple[str, int]
"""IPv4 address and TCP port of a router, from which it forwards to a peer."""


def meeting_points(maddrs: Iterable[str]) -> list[str]:
    """The addresses of a peer's relays, from its own addresses; none if it has no place at any."""
    return [maddr.partition("/p2p-circuit")[0] for maddr in maddrs if is_relayed(maddr)]


def outer_of(maddr: str) -> Outer | None:
    """The outer address that a connection's multiaddr shows; None if it is relayed, private, or not TCP over IPv4."""
    match maddr.split("/"):
        case ["", "ip4", host, "tcp", port] if scope_of(maddr) is Scope.PUBLIC:
            return host, int(port)
    return None


def peer_at(peer_id: str, outer: Outer) -> Peer:
    """A peer with its outer address, for a message."""
    host, port = outer
    return Peer(id=peer_id_bytes(peer_id), addrs=[Multiaddr(f"/ip4/{host}/tcp/{port}").to_bytes()])


def agreement(peer_id: str, port: int | None) -> StopMessage:
    """The answer to a relay that we dial. It names our port, if that is not the one at which the relay sees us."""
    message = StopMessage(type=StopMessage.STATUS, status=Status.OK)
    if port is not None:
        message.peer.CopyFrom(Peer(id=peer_id_bytes(peer_id), addrs=[Multiaddr(f"/tcp/{port}").to_bytes()]))
    return message


def outer_named(answer: StopMessage, seen: Outer) -> Outer:
    """The outer address from which a peer dials: `seen` by its relay, with the port that its answer names, if any."""
    with contextlib.suppress(Exception):  # the parser raises many types
        if port := port_of(Multiaddr(answer.peer.addrs[0])):
            return seen[0], port
    return seen


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as trial:
        trial.bind(("", 0))
        return int(trial.getsockname()[1])


def read_peer(peer: Peer) -> tuple[str, Outer]:
    """A peer and its outer address, from a message. Raises PeerLostError."""
    try:
        peer_id, (address,) = peer_id_text(peer.id), peer.addrs
        outer = outer_of(str(Multiaddr(address)))
    except Exception:  # the parsers raise many types
        outer = None
    if outer is None:
        raise PeerLostError("malformed address of a peer")
    return peer_id, outer


class ExpiringSet:
    """A set that forgets a key `ttl_s` after it was added last, and the oldest of more than `max_size` keys."""

    def __init__(self, ttl_s: float, max_size: int) -> None:
        self._ttl_s = ttl_s
        self._max_size = max_size
        self._until_s: dict[str, float] = {}  # the oldest first

    def add(self, key: str) -> None:
        self._until_s.pop(key, None)
        if len(self) >= self._max_size:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[key] = trio.current_time() + self._ttl_s

    def __contains__(self, key: str) -> bool:
        return self._until_s.get(key, -math.inf) > trio.current_time()

    def __len__(self) -> int:
        now = trio.current_time()
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now}
        return len(self._until_s)


class DialBudget:
    """Limits of the dials for one relay, or for ourselves.

    Attributes:
        failed: the peers that were dialled in vain.
    """

    def __init__(self) -> None:
        self.failed = ExpiringSet(FAILED_S, MAX_FAILED)
        self._rate = TokenBucket(MAX_A_MINUTE / 60, MAX_A_MINUTE, now=0.0)
        self._joined: list[End] = []
        self._places = 0

    def may_dial(self, peer_id: str) -> bool:
        """Whether we may dial a peer for a relay. If so, counts that dial, and the caller takes a `place` at once."""
        return peer_id not in self.failed and not self.is_full and self._rate.spend(1, trio.current_time())

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Until the block ends, count one connection that may yet be joined."""
        self._places += 1
        try:
            yield
        finally:
            self._places -= 1

    @property
    def is_full(self) -> bool:
        """Whether no more connections may be joined."""
        return self._connections() >= MAX_JOINED

    @property
    def is_unused(self) -> bool:
        """Whether a new budget would allow no more than this one."""
        return not self.failed and not self._connections() and self._rate.is_full(trio.current_time())

    def _connections(self) -> int:
        self._joined = [end for end in self._joined if not end.transport.is_closing()]
        return self._places + len(self._joined)

    def keep(self, end: End) -> None:
        """Count two joined connections, of which this is one end, until they are closed."""
        self._joined.append(end)


class Puncher:
    """Makes direct connections to peers behind other routers, on our request or on theirs."""

    def __init__(
        self,
        control_path: str,
        peer_id: str,
        maddrs: Callable[[], Iterable[str]],
        relays: Callable[[], Collection[str]],
        refusal: Refusal,
        *,
        has_public_ip4: bool,
    ) -> None:
        """
        Args:
            maddrs: returns our own addresses.
            relays: returns the relays at which we have a reservation; they may ask us to dial.
            has_public_ip4: whether this machine has a public IPv4 address, so that others see its ports as they are.
        """
        self._has_public_ip4 = has_public_ip4
        self.service = Service("dialling a peer at the same time", MAX_AT_ONCE)
        self._control_path = control_path
        self._peer_id = peer_id
        self._maddrs = maddrs
        self._relays = relays
        self._refusal = refusal
        self._connections = Connections(control_path, ASK_TIMEOUT_S)
        # A budget for each, as a dial for a relay says nothing about a peer: the relay can name a wrong address.
        self._ours = DialBudget()
        self._for_relay: dict[str, DialBudget] = {}
        self._asking: set[str] = set()
        self._asked: dict[str, trio.Event] = {}

    def take(self, stream: SocketStream) -> None:
        """Take a stream from a relay. Called in the event loop."""
        if stream.remote in self._relays():
            self.service.take(stream, self._answer)
        else:
            stream.fail("no relay of ours")

    async def _answer(self, relay: SocketStream) -> None:
        with trio.fail_after(ASK_TIMEOUT_S):
            request, _ = await receive_message(relay, StopMessage)
            peer_id, outer = read_peer(request.peer)
            is_connected = (await self._connected()).get(peer_id, False)
            budget = self._for(relay.remote)
            if is_connected or not self._agrees(relay.remote, peer_id, budget):
                await send_message(relay, StopMessage(type=StopMessage.STATUS, status=Status.PERMISSION_DENIED))
                return
        port = free_port() if self._has_public_ip4 else None
        done = self._asked[peer_id] = trio.Event()
        try:
            with budget.place():
                with trio.fail_after(ASK_TIMEOUT_S):
                    await send_message(relay, agreement(self._peer_id, port))
                    now, _ = await receive_message(relay, StopMessage)
                # Before we dial, or the relay could see when the dial ends, and so which ports are open where.
                await relay.aclose()
                if now.status == Status.OK:
                    await self._punch(peer_id, outer, budget, asked=True, port=port)
        finally:
            del self._asked[peer_id]
            done.set()

    def _agrees(self, relay: str, peer_id: str, budget: DialBudget) -> bool:
        """Whether we dial a peer because a relay asks us to. Strangers can make it ask, and choose the ids."""
        # When both ask at once, the request of the lower id counts.
        ours_counts = peer_id in self._asking and self._peer_id < peer_id
        busy = ours_counts or peer_id in self._asked or peer_id in self._ours.failed
        refused = relay not in self._relays() or self._refusal(peer_id) is not None
        return not busy and not refused and budget.may_dial(peer_id)

    def _for(self, relay: str) -> DialBudget:
        """The budget of a relay, which it keeps if we lose our reservation for a moment. Raises PeerLostError."""
        self._for_relay = {known: budget for known, budget in self._for_relay.items() if not budget.is_unused}
        if relay not in self._for_relay and len(self._for_relay) >= MAX_COUNTED_RELAYS:
            raise PeerLostError(f"{len(self._for_relay)} other relays had us dial in the last ten minutes")
        return self._for_relay.setdefault(relay, DialBudget())

    async def reach(self, peer_id: str, maddrs: list[str]) -> None:
        """Try to connect directly to a peer that has places at relays, if it is not connected yet."""
        points = [point for point in meeting_points(maddrs) if self._refusal(_relay_at(point)) is None]
        if not points or peer_id in self._ours.failed or self._ours.is_full or peer_id in await self._connected():
            return
        self._asking.add(peer_id)
        try:
            with trio.fail_after(ASK_TIMEOUT_S):
                outer = await self._ask(points[0], peer_id)
        except (PeerLostError, trio.TooSlowError) as error:
            logger.debug("%s is not asked to dial at the same time: %s", peer_id, error)
            if (done := self._asked.get(peer_id)) is not None:
                await done.wait()
            return
        finally:
            self._asking.discard(peer_id)
        await self._punch(peer_id, outer, self._ours, asked=False)

    async def _ask(self, point: str, peer_id: str) -> Outer:
        """Ask a relay to make a peer dial us now. Returns the address at which to dial it now. Raises PeerLostError."""
        relay = _relay_at(point)
        await dial(self._control_path, relay, [point], ASK_TIMEOUT_S)
        stream = await open_stream(self._control_path, relay, PUNCH, ASK_TIMEOUT_S)
        try:
            await send_message(stream, HopMessage(type=HopMessage.CONNECT, peer=Peer(id=peer_id_bytes(peer_id))))
            answer, _ = await receive_message(stream, HopMessage)
        finally:
            stream.fail("asked")
        if answer.status != Status.OK:
            raise PeerLostError(f"the relay refused, with status {answer.status}")
        named, outer = read_peer(answer.peer)
        if named != peer_id:
            raise PeerLostError("the relay answered for another peer")
        return outer

    async def _punch(
        self, peer_id: str, outer: Outer, budget: DialBudget, *, asked: bool, port: int | None = None
    ) -> None:
        """Dial a peer at the same moment as it dials us. Logs the outcome, and notes a failure.

        `asked`: whether that peer asked for it, and not we. `port`: the port from which we told it that we dial.
        """
        level = logging.DEBUG if asked else logging.INFO
        try:
            with trio.fail_after(DIAL_TIMEOUT_S):
                if asked:
                    budget.keep(await self._join(peer_id, outer, port))
                else:
                    host, dialled = outer
                    await dial(self._control_path, peer_id, [f"/ip4/{host}/tcp/{dialled}"], DIAL_TIMEOUT_S)
        except (PeerLostError, trio.TooSlowError) as error:
            budget.failed.add(peer_id)
            logger.log(level, "no direct connection to %s: dialling each other at once failed; using a relay", peer_id)
            logger.debug("dialling %s at the same time: %s", peer_id, error)
        else:
            logger.log(level, "connected directly to %s, by dialling each other at once", peer_id)

    async def _join(self, peer_id: str, outer: Outer, port: int | None) -> End:
        """Dial a peer, and join that connection to one to p2pd. Returns one end. Raises PeerLostError."""
        async with joined(_listening(self._maddrs()), outer, port) as end:
            while not (await self._connected()).get(peer_id):
                await trio.sleep(CONNECTED_EVERY_S)
            return end

    async def _connected(self) -> dict[str, bool]:
        """All connected peers, and whether their connection is direct."""
        found: dict[str, bool] = {}
        for peer_id, maddr in await self._connections.listed(CONNECTED_EVERY_S):
            found[peer_id] = found.get(peer_id, False) or not is_relayed(maddr)
        return found


def _relay_at(point: str) -> str:
    return point.rpartition("/p2p/")[2]


def _listening(maddrs: Iterable[str]) -> Outer:
    """The address at which our p2pd listens: loopback's, if it listens there, else a local one, else a public one.

    Raises PeerLostError if it listens at none.
    """
    for maddr in reversed(list(maddrs)):
        match maddr.split("/"):
            case ["", "ip4", host, "tcp", port, "p2p", _]:
                return host, int(port)
    raise PeerLostError("this peer listens on no TCP port")
