"""Addresses as people hand them on: `--initial-peers` values, files of addresses, and the line that others paste.

A multiaddr names the way to a peer and the peer itself: `/ip4/203.0.113.7/tcp/4001/p2p/Qm…`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig

EXAMPLE = "/ip4/192.168.1.5/tcp/4001/p2p/Qm…"
_TRANSPORT = re.compile(r"/(ip4|ip6|dns|dns4|dns6|dnsaddr|unix)/")
_LOOPBACK = re.compile(r"/ip4/127\.|/ip6/::1/")


def read_initial_peers(given: Sequence[str]) -> tuple[str, ...]:
    """Resolve `--initial-peers`: each item is a multiaddr, or a file with one a line (# starts a comment).

    Raises:
        ConfigError: an address is malformed or lacks the peer's id, or a file is missing or holds none.
    """
    addresses: list[str] = []
    for item in given:
        if _TRANSPORT.match(item) or "/p2p/" in item:
            addresses.append(_checked(item, "--initial-peers"))
        else:
            addresses.extend(_read_file(item))
    return tuple(dict.fromkeys(addresses))


def write_addresses(path: Path, maddrs: Sequence[str]) -> None:
    """Write addresses for others' `--initial-peers FILE`; a reader sees all of them or the file before.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(f"{maddr}\n" for maddr in maddrs), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"--write-addresses {path}: {error.strerror}; give a file that can be written") from error


def join_line(maddrs: Sequence[str], run_id: str, model: str = "") -> str:
    """The command that others paste to join through us: one line, without loopback where there is another way."""
    reachable = [maddr for maddr in maddrs if not _LOOPBACK.match(maddr)] or list(maddrs)
    words = ["p2ptrain", "join"]
    for maddr in reachable:
        words += ["--initial-peers", maddr]
    if run_id != RunConfig.run_id:
        words += ["--run-id", run_id]
    if ":" in model:  # code of one's own, which nobody takes over unasked
        words += ["--model", model]
    return shlex.join(words)


def _read_file(name: str) -> list[str]:
    path = Path(name)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ConfigError(
            f"--initial-peers {name}: neither an address nor a file; an address looks like {EXAMPLE}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"--initial-peers {name}: {reason}; give a file with one address a line") from error
    addresses = [line.partition("#")[0].strip() for line in lines]
    found = [_checked(address, name) for address in addresses if address]
    if not found:
        raise ConfigError(f"--initial-peers {name}: holds no address; expected lines like {EXAMPLE}")
    return found


def _checked(address: str, origin: str) -> str:
    if not _TRANSPORT.match(address) or " " in address:
        raise ConfigError(f"{origin}: {address!r} is not a multiaddr; it looks like {EXAMPLE}")
    _, separator, peer_id = address.rpartition("/p2p/")
    if not separator or not peer_id.isalnum():
        raise ConfigError(f"{origin}: {address!r} does not end in the peer's id; it looks like {EXAMPLE}")
    return address
