"""Sockets between rank 0 and each other rank of one machine, for the small messages that ranks exchange at every step.

Gloo hands every transfer to threads of its own, in several messages. Where all cores compute, each hand-over waits for
a core: on two shared cores, a step's messages took 12.8 ms that way and 3.3 ms over a socket, whose reader is woken by
the writer itself (docs/log, 2026-11-26). Weights go through the process group.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from p2ptrain.network.process_lifetime import close_everywhere

# Local connections take below a millisecond; longer where all cores are busy.
OPEN_TIMEOUT_S = 10.0
TOKEN_BYTES = 32
# No message is larger: `ProcessGroup` sends reports and small tensors, and more through the group.
MOST_BYTES = 1 << 20
_RANK = struct.Struct("<q")


class RankSockets:
    """Connections of a star: rank 0 has one to each rank, in order, and the others have one to it.

    Any thread may call the methods, one at a time. They raise OSError or EOFError if a rank is lost, or does not take
    part within the timeout.
    """

    def __init__(self, sockets: list[socket.socket], timeout_s: float) -> None:
        """Owns the sockets, which close with it. A send or receive fails after the timeout."""
        self._timeout_s = timeout_s
        self._connections = [_connection(each, timeout_s) for each in sockets]

    def close(self) -> None:
        """Let the other ranks notice at once that this one takes part no more. May be called twice."""
        for connection in self._connections:
            if not connection.closed:
                close_everywhere(socket.socket(fileno=os.dup(connection.fileno())))
                connection.close()

    def collect(self, own: bytes) -> list[bytes]:
        """On rank 0: its own message, and those that the others have sent, in order of the ranks."""
        return [own, *map(self._received, self._connections)]

    def send(self, data: bytes) -> None:
        """Send to all connected ranks: on rank 0 to each of the others, on the others to rank 0."""
        for connection in self._connections:
            connection.send_bytes(data)

    def receive(self) -> bytes:
        """On the other ranks: the message that rank 0 has sent."""
        (first,) = self._connections
        return self._received(first)

    def _received(self, connection: Connection) -> bytes:
        # The kernel's own timeout begins anew after each signal that the program handles.
        if not connection.poll(self._timeout_s):
            raise BlockingIOError("Timed out")
        return connection.recv_bytes(MOST_BYTES)


def open_sockets(
    rank: int, size: int, timeout_s: float, tell: Callable[[bytes], bytes], all_true: Callable[[bool], bool]
) -> RankSockets | None:
    """All ranks: connect them. Returns None on all if one cannot connect, as on another machine.

    Args:
        rank, size: number of this process, and number of processes.
        timeout_s: how long a send or receive may take.
        tell: returns the bytes of rank 0 on all ranks.
        all_true: returns whether a flag is true on all ranks.
    """
    # Ranks wait for each other meanwhile, in the group.
    limit_s = min(OPEN_TIMEOUT_S, timeout_s / 2)
    if rank:
        told = tell(b"")
        port, token = int.from_bytes(told[:2], "big"), told[2:]
        own = _connect(port, token, rank, limit_s)
        # Rank 0 accepts only when all have connected, and may miss one that has reached another machine's port.
        ready = all_true(own is not None) and all_true(True)
        if own is not None and not ready:
            own.close()
        return RankSockets([own], timeout_s) if own is not None and ready else None
    token = secrets.token_bytes(TOKEN_BYTES)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(size)
        tell(listener.getsockname()[1].to_bytes(2, "big") + token)
        if not all_true(True):
            return None
        accepted = _accept(listener, size, token, limit_s)
    if not all_true(len(accepted) == size - 1):
        for each in accepted.values():
            each.close()
        return None
    return RankSockets([accepted[other] for other in range(1, size)], timeout_s)


def _connect(port: int, token: bytes, rank: int, limit_s: float) -> socket.socket | None:
    with contextlib.ExitStack() as unless_kept:
        try:
            connected = unless_kept.enter_context(socket.create_connection(("127.0.0.1", port), limit_s))
            connected.sendall(token + _RANK.pack(rank))
        except OSError:
            return None
        unless_kept.pop_all()
        return connected


def _accept(listener: socket.socket, size: int, token: bytes, limit_s: float) -> dict[int, socket.socket]:
    """The connections of the other ranks by number. Those of other programs are closed."""
    accepted: dict[int, socket.socket] = {}
    deadline_s = time.monotonic() + limit_s
    while len(accepted) < size - 1 and (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            one, _ = listener.accept()
        except OSError:
            break
        rank = _rank_of(one, token, left_s)
        if rank is None or not 0 < rank < size or rank in accepted:
            one.close()
        else:
            accepted[rank] = one
    return accepted


def _rank_of(one: socket.socket, token: bytes, timeout_s: float) -> int | None:
    """The number that a connection begins with; None if its token is not ours."""
    one.settimeout(min(1.0, timeout_s))
    try:
        hello = one.recv(TOKEN_BYTES + _RANK.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) < TOKEN_BYTES + _RANK.size or not hmac.compare_digest(hello[:TOKEN_BYTES], token):
        return None
    rank: int = _RANK.unpack(hello[TOKEN_BYTES:])[0]
    return rank


def _connection(connected: socket.socket, timeout_s: float) -> Connection:
    """A connection that frames messages. The kernel ends a read or write after the timeout, with BlockingIOError."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)
    return Connection(connected.detach())
