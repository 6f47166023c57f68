"""Peers of one process connected by queues: every `send_all` is one packet that can be delayed, dropped or duplicated.

Packets arrive complete and in order unless their stream breaks; long ones arrive in segments as bandwidth allows.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import trio

from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.wire.transport import PeerId

# Segments that one direction of a stream holds before its sender waits, like a socket buffer.
SEGMENTS_IN_FLIGHT = 64
# Long packets arrive in pieces of this size, as on a real path.
SEGMENT_BYTES = 64 * 1024
# Bytes that an uplink buffers before senders wait: libp2p's daemon buffers megabytes.
BUFFER_BYTES = 4 * 1024 * 1024
MIN_SEGMENT_BYTES = 1400
# A bulk connection has the congestion control of its system, which fills no more of a path's queue than this (guess).
BULK_QUEUE_S = 0.1


class PacketFault(enum.Enum):
    """What happens to one packet."""

    NONE = "none"
    DROP = "drop"
    DUPLICATE = "duplicate"
    BREAK = "break"


PacketFaultRule = Callable[[PeerId, PeerId, bytes], PacketFault]


class MemoryNetwork:
    """The transports of all peers, their directory, and the conditions of the network between them.

    Attributes:
        latency_s: one-way delay of every packet; replace `latency(a, b)` for delays that differ.
        bandwidth_bytes_s: bandwidth of every peer's uplink, which its streams share in the order of their packets and
            which has a buffer of 4 MiB; infinite by default.
        fault: chooses what happens to each packet.
        relays: the name of the relay between two peers, if there is one.
        offers_bulk: whether peers offer bulk connections.
        can_dial_bulk: whether the first of two peers can open a bulk connection to the second.
    """

    def __init__(self, *, latency_s: float = 0.001, bandwidth_bytes_s: float = math.inf) -> None:
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.fault: PacketFaultRule = lambda source, target, packet: PacketFault.NONE
        self.offers_bulk = True
        self.can_dial_bulk: Callable[[PeerId, PeerId], bool] = lambda source, target: True
        self.relays: dict[frozenset[PeerId], PeerId] = {}
        self.transports: dict[PeerId, MemoryTransport] = {}
        self._narrow: dict[PeerId, float] = {}
        self._groups: dict[PeerId, int] = {}
        self._records: dict[str, dict[PeerId, tuple[bytes, float]]] | None = {}
        self._under_way: list[tuple[float, int, MemoryStream, bytes]] = []
        self._numbers = itertools.count()
        self._earlier: trio.Event | None = None  # set when a segment is due before the one that is waited for

    def transport(self, peer_id: PeerId) -> MemoryTransport:
        """Add a peer to the network; a second call for the same id is a restart of that peer."""
        transport = self.transports[peer_id] = MemoryTransport(self, peer_id)
        return transport

    def directory(self, peer_id: PeerId) -> MemoryDirectory:
        return MemoryDirectory(self, peer_id)

    def partition(self, *groups: list[PeerId]) -> None:
        """Let only peers of the same group reach each other; peers in no group form another one. No groups: heal."""
        self._groups = {peer: number for number, group in enumerate(groups, start=1) for peer in group}
        for transport in self.transports.values():
            for stream in list(transport.streams):
                if not self.connected(transport.peer_id, stream.remote):
                    stream.stall()

    def narrow(self, peer_id: PeerId, bandwidth_bytes_s: float | None) -> None:
        """Set the bandwidth of one peer's link in both directions; None removes the setting."""
        if bandwidth_bytes_s is None:
            self._narrow.pop(peer_id, None)
        else:
            self._narrow[peer_id] = bandwidth_bytes_s

    def connected(self, a: PeerId, b: PeerId) -> bool:
        return self._groups.get(a, 0) == self._groups.get(b, 0)

    def close_directory(self) -> None:
        """Make the directory fail from now on, as when a swarm's only bootstrap node has died."""
        self._records = None

    def crash(self, peer_id: PeerId) -> None:
        """Remove a peer at once: its streams break, and it cannot be dialled."""
        self.transports.pop(peer_id).close()

    def latency(self, a: PeerId, b: PeerId) -> float:
        return self.latency_s

    def deliver(self, due_s: float, stream: MemoryStream, segment: bytes) -> None:
        """Hand a segment to the end of a stream at this time, or just after the one before.

        One task does so for all streams: a reader that waits for its segments itself is woken twice for each, and needs
        a time-out, which is most of what a small packet costs.
        """
        due_s = stream.latest_s = max(due_s, stream.latest_s)
        stream.under_way += 1
        heapq.heappush(self._under_way, (due_s, next(self._numbers), stream, segment))
        if self._earlier is None:
            self._earlier = trio.Event()
            trio.lowlevel.spawn_system_task(self._deliver)
        elif self._under_way[0][2] is stream and self._under_way[0][0] == due_s:
            self._earlier.set()

    async def _deliver(self) -> None:
        try:
            while self._under_way:
                due_s = self._under_way[0][0]
                if due_s > trio.current_time():
                    self._earlier = trio.Event()
                    with trio.move_on_at(due_s):
                        await self._earlier.wait()
                    continue
                _, _, stream, segment = heapq.heappop(self._under_way)
                stream.arrive(segment)
        finally:
            self._earlier = None


class MemoryTransport:
    """Implements `protocol.wire.transport.Transport`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self.network = network
        self.streams: set[MemoryStream] = set()
        self.closed = False
        self.uplink_free_s = 0.0
        self.downlink_free_s = 0.0
        self.bulk = MemoryBulk(self)
        self._incoming_send, self._incoming = trio.open_memory_channel[MemoryStream](256)

    @property
    def maddrs(self) -> list[str]:
        return [f"/memory/{self.peer_id}/p2p/{self.peer_id}"]

    async def open_stream(self, peer_id: PeerId, maddrs: list[str]) -> MemoryStream:
        ours, theirs = await self.connect(peer_id, is_bulk=False)
        await theirs.owner._incoming_send.send(theirs)
        return ours

    async def connect(self, peer_id: PeerId, *, is_bulk: bool) -> tuple[MemoryStream, MemoryStream]:
        """Both ends of a new connection. Raises PeerLostError."""
        target = self.network.transports.get(peer_id)
        await trio.sleep(self.network.latency(self.peer_id, peer_id))
        if target is None or target.closed or self.closed or not self.network.connected(self.peer_id, peer_id):
            raise PeerLostError(f"{peer_id}: cannot be reached")
        ours, theirs = MemoryStream(self, peer_id, is_bulk), MemoryStream(target, self.peer_id, is_bulk)
        ours.other, theirs.other = theirs, ours
        return ours, theirs

    def relay_to(self, peer_id: PeerId) -> PeerId:
        return self.network.relays.get(frozenset((self.peer_id, peer_id)), "")

    async def accept(self) -> MemoryStream:
        return await self._incoming.receive()

    def sign(self, data: bytes) -> bytes:
        """A stand-in for a signature, in 1 µs. Nobody here has another peer's transport, so nobody can sign for it."""
        return _signature(self.peer_id, data)

    def verify(self, peer_id: PeerId, data: bytes, signature: bytes) -> bool:
        return signature == _signature(peer_id, data)

    def close(self) -> None:
        self.closed = True
        for stream in list(self.streams):
            stream.break_both()


class MemoryBulk:
    """Implements `protocol.wire.transport.BulkTransport` for one peer."""

    def __init__(self, owner: MemoryTransport) -> None:
        self._owner = owner
        self._admitted: dict[PeerId, bytes] = {}
        self._incoming_send, self._incoming = trio.open_memory_channel[MemoryStream](256)

    @property
    def offer(self) -> bytes:
        """A stand-in for a certificate."""
        return self._owner.peer_id.encode() if self._owner.network.offers_bulk else b""

    def admit(self, peer_id: PeerId, offer: bytes) -> None:
        self._admitted[peer_id] = offer

    async def open(self, peer_id: PeerId, offer: bytes, maddrs: Sequence[str]) -> MemoryStream:
        if not self._owner.network.can_dial_bulk(self._owner.peer_id, peer_id):
            raise PeerLostError(f"{peer_id}: no bulk connection can be opened")
        ours, theirs = await self._owner.connect(peer_id, is_bulk=True)
        theirs.owner.bulk.take(theirs, self.offer)
        return ours

    def take(self, stream: MemoryStream, offer: bytes) -> None:
        """A peer with this offer has opened a connection."""
        if self._admitted.get(stream.remote) == offer != b"":
            self._incoming_send.send_nowait(stream)
        else:
            stream.break_both()

    async def accept(self) -> MemoryStream:
        return await self._incoming.receive()


class MemoryStream:
    """One end of a stream; implements `protocol.wire.transport.Stream`."""

    other: MemoryStream

    def __init__(self, owner: MemoryTransport, remote: PeerId, is_bulk: bool) -> None:
        self.owner = owner
        self.remote = remote
        self.is_bulk = is_bulk
        self.under_way = 0  # segments sent to this end that have not arrived
        self.latest_s = 0.0  # when the last of them arrives
        self._arrived: deque[bytes] = deque()
        self._readers = trio.lowlevel.ParkingLot()
        self._senders = trio.lowlevel.ParkingLot()
        self._broken = False
        self._stalled = False
        owner.streams.add(self)

    async def send_all(self, data: bytes) -> None:
        network = self.owner.network
        if self._broken:
            raise PeerLostError(f"{self.remote}: the stream is broken")
        fault = network.fault(self.owner.peer_id, self.remote, data)
        if fault is PacketFault.BREAK:
            self.break_both()
            raise PeerLostError(f"{self.remote}: the stream broke")
        for _ in range(2 if fault is PacketFault.DUPLICATE else 1):
            size = self._segment_bytes
            for start in range(0, len(data), size):
                await self._send_segment(data[start : start + size], lost=fault is PacketFault.DROP)

    @property
    def _segment_bytes(self) -> int:
        """Other streams get their turn between two segments: on a bulk connection after 0.1 s at most."""
        if not self.is_bulk:
            return SEGMENT_BYTES
        narrow, most = self.owner.network._narrow, self.owner.network.bandwidth_bytes_s
        rate = min(narrow.get(self.owner.peer_id, most), narrow.get(self.remote, most))
        return max(MIN_SEGMENT_BYTES, int(min(SEGMENT_BYTES, BULK_QUEUE_S * rate)))

    async def _send_segment(self, segment: bytes, *, lost: bool) -> None:
        owner, network = self.owner, self.owner.network
        up = network._narrow.get(owner.peer_id, network.bandwidth_bytes_s)
        down = network._narrow.get(self.remote, math.inf)
        free_s = owner.uplink_free_s = max(trio.current_time(), owner.uplink_free_s) + len(segment) / up
        if down < math.inf:
            target = self.other.owner
            free_s = target.downlink_free_s = max(free_s, target.downlink_free_s) + len(segment) / down
        due = free_s + network.latency(owner.peer_id, self.remote)
        begins_s = free_s - (BULK_QUEUE_S if self.is_bulk else BUFFER_BYTES / min(up, down))
        if begins_s > trio.current_time():  # not so for most packets, and each sleep costs 50 µs
            await trio.sleep_until(begins_s)
        if lost or self._stalled:
            return
        other = self.other
        while other.under_way + len(other._arrived) >= SEGMENTS_IN_FLIGHT and not other._broken:
            await other._senders.park()
        if other._broken:
            raise PeerLostError(f"{self.remote}: the stream is broken")
        network.deliver(due, other, segment)

    def arrive(self, segment: bytes) -> None:
        """A segment has come."""
        self.under_way -= 1
        self._arrived.append(segment)
        self._readers.unpark()

    async def receive_some(self) -> bytes:
        while not self._arrived:
            if self._broken and not self.under_way:
                return b""
            await self._readers.park()
        self._senders.unpark()
        return self._arrived.popleft()

    async def aclose(self) -> None:
        self.break_both()

    def stall(self) -> None:
        """Drop everything from now on, as a network without a route does."""
        self._stalled = True

    def break_both(self) -> None:
        """Close both ends; across a partition only this end, as the other side does not notice."""
        for end in (self,) if self._stalled else (self, self.other):
            end._broken = True
            end._readers.unpark_all()
            end._senders.unpark_all()
            end.owner.streams.discard(end)


class MemoryDirectory:
    """Implements `protocol.wire.transport.Directory`, with one dict for all peers."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self._network = network
        self._peer_id = peer_id

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        await trio.sleep(self._network.latency_s)
        if self._network._records is None:
            return False
        self._network._records.setdefault(key, {})[self._peer_id] = (value, trio.current_time() + expires_in_s)
        return True

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        await trio.sleep(2 * self._network.latency_s)
        now = trio.current_time()
        records = (self._network._records or {}).get(key, {})
        return {peer: value for peer, (value, expires_s) in records.items() if expires_s > now}


def _signature(peer_id: PeerId, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=peer_id.encode()[:64]).digest()
