"""Parses the address of a local HTTP server: `9100` or `0.0.0.0:9100`."""

from __future__ import annotations

# Not reachable from other machines, unless the user gives a host.
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def parse_endpoint(text: str) -> tuple[str, int] | None:
    """Host and port of `PORT` (on loopback), `HOST:PORT` or `[IPV6]:PORT`; None if malformed. Port 0: any free one."""
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
