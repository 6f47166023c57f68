"""The end of a listening socket, which frees its port although forked processes have copies of it.

Workers of a `DataLoader` are forked and inherit all sockets. The system listens until the last copy is closed. So
`close` alone would leave the port taken for as long as workers live, and those with `persistent_workers=True` live on
after the peer has left.
"""

from __future__ import annotations

import contextlib
import socket


def stop_listening(listener: socket.socket) -> None:
    """Stop listening, in all copies of the socket, and close this one. Nothing may be accepting from it any more."""
    with contextlib.suppress(OSError):  # it is closed already, or a system that knows no shutdown of such a socket
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
