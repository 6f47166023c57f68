"""The end of a socket of which forked processes have copies.

Workers of a `DataLoader` are forked and inherit all sockets. The system keeps a connection, or a port, until the last
copy is closed. So after `close` alone a port would stay taken, and the other end of a connection would hear nothing,
for as long as workers live; those with `persistent_workers=True` live on after the peer has left.
"""

from __future__ import annotations

import contextlib
import socket


def close_everywhere(ended: socket.socket) -> None:
    """End a connection, or stop listening, in all copies of the socket, and close this one."""
    with contextlib.suppress(OSError):  # it is closed already, or a system that knows no shutdown of such a socket
        ended.shutdown(socket.SHUT_RDWR)
    ended.close()
