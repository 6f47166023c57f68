"""`9100` or `0.0.0.0:9100`: where a local HTTP server listens, as people write it."""

from __future__ import annotations

# What this machine shows of itself is shown to this machine alone, unless its user says otherwise.
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def parse_endpoint(text: str) -> tuple[str, int] | None:
    """Host and port of `PORT`, `HOST:PORT` or `[IPV6]:PORT`, loopback where no host is given; None for all else.

    Port 0 stands for any that is free.
    """
    host, found, port = text.rpartition(":")
    if found and not host:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or not host.isprintable() or " " in host:
        return None
    if not (port.isascii() and port.isdecimal()) or int(port) > MAX_PORT:
        return None
    return host or LOOPBACK, int(port)
