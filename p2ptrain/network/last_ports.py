"""The ports that a peer listened on last, kept in a file beside its identity.

A peer that may choose its port (port 0) takes the one of before its restart, if it is free. Other peers remember it
under that address; if all peers of a run came back on new ports, none would find another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.network.addresses import check_host_maddrs, with_ports_of

logger = logging.getLogger(__name__)

# Far more than the addresses of one machine; a longer file is not ours.
MAX_FILE_BYTES = 64 * 1024


def on_last_ports(host_maddrs: tuple[str, ...], identity: Path) -> tuple[str, ...]:
    """Return the addresses to listen on, with port 0 replaced by the port used last if this machine can listen there.

    `identity`: the identity file of the peer.
    """
    try:
        if not _file(identity).is_file():  # a pipe would block
            return host_maddrs
        with open(_file(identity), "rb") as file:
            found = file.read(MAX_FILE_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return host_maddrs

    def available(host_maddr: str) -> str:
        (last,) = with_ports_of([host_maddr], found)
        try:
            check_host_maddrs([last])
        except ConfigError:
            return host_maddr
        return last

    return tuple(map(available, host_maddrs))


def keep_ports(maddrs: Iterable[str], identity: Path) -> None:
    """Write the addresses that a peer listens on. A directory that cannot be written is no error."""
    unfinished = _file(identity).with_suffix(".ports.new")
    try:
        unfinished.write_text("".join(f"{maddr}\n" for maddr in maddrs))
        unfinished.replace(_file(identity))
    except OSError as error:
        logger.debug("the ports of %s cannot be kept: %s", identity, error)


def _file(identity: Path) -> Path:
    return identity.with_name(f"{identity.name}.ports")
