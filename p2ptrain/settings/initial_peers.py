"""Reads `--initial-peers` values and files, writes address files, and formats the command that joins a run.

A multiaddr contains a peer's address and its id: `/ip4/203.0.113.7/tcp/4001/p2p/Qm…`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.files import open_file, read_text, reason_of, write_whole
from p2ptrain.settings.run_key import RunKey, looks_like_key, warn_if_shared
from p2ptrain.settings.setting import shortened
from p2ptrain.settings.ticket import Ticket, looks_like_ticket, parse_ticket, ticket_text

EXAMPLE = "/ip4/192.168.1.5/tcp/4001/p2p/Qm…"
_TRANSPORT = re.compile(r"/(ip4|ip6|dns|dns4|dns6|dnsaddr|unix)/")
MAX_TICKET_FILE_BYTES = 8192
_LOOPBACK = re.compile(r"/ip4/127\.|/ip6/::1/")


def read_initial_peers(given: Sequence[str]) -> tuple[str, ...]:
    """Resolve `--initial-peers`: each item is a multiaddr, or a file with one per line (# starts a comment).

    Raises:
        ConfigError: an address is malformed or lacks the peer's id, or a file is missing or has no address.
    """
    addresses: list[str] = []
    for item in given:
        if _TRANSPORT.match(item) or "/p2p/" in item:
            addresses.append(_checked(item, "--initial-peers"))
        else:
            addresses.extend(_read_file(item))
    return tuple(dict.fromkeys(addresses))


def expand_ticket(given: Sequence[str]) -> tuple[tuple[str, ...], Ticket | None]:
    """Replace a ticket by its addresses, whether it was given itself or as a file that holds it.

    Returns the initial peers, and the ticket or None. Raises ConfigError if a ticket is damaged, or if there are two.
    """
    addresses: list[str] = []
    found: Ticket | None = None
    for item in given:
        if looks_like_key(item):
            raise ConfigError("this is a run key, and a secret: write it to a file, and use --run-key FILE")
        word = item if looks_like_ticket(item) else _ticket_in(item)
        if word is None:
            addresses.append(item)
            continue
        try:
            ticket = parse_ticket(word)
        except ConfigError as error:
            raise error if word is item else ConfigError(f"{item}: {error}") from None
        if found not in (None, ticket):
            raise ConfigError("two tickets were given: give one")
        if ticket.key is not None and word is not item:
            warn_if_shared(Path(item))
        found = ticket
        addresses += ticket.addresses
    return tuple(addresses), found


def _ticket_in(name: str) -> str | None:
    """The ticket in a file, alone or in a line `p2ptrain join TICKET`; None if the file holds no ticket.

    Raises ConfigError if it holds a key, or a ticket and something else. The message does not show them.
    """
    if _TRANSPORT.match(name) or "/p2p/" in name:
        return None
    try:
        with open_file(Path(name)) as file:
            lines = file.read(MAX_TICKET_FILE_BYTES).decode().splitlines()
    except (OSError, ValueError):
        return None
    words = [word for line in lines for word in line.partition("#")[0].split()]
    if words[:2] == ["p2ptrain", "join"]:
        words = words[2:]
    if any(map(looks_like_key, words)):
        raise ConfigError(f"{name}: this file holds a run key: use --run-key {name}")
    if not any(map(looks_like_ticket, words)):
        return None
    if len(words) != 1:
        raise ConfigError(
            f"{name}: holds a ticket and something else; write the ticket as one word, without spaces and line breaks, "
            "and give options to the command"
        )
    return words[0]


def write_addresses(path: Path, maddrs: Sequence[str]) -> None:
    """Write a file for `--initial-peers FILE`. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{maddr}\n" for maddr in maddrs).encode())
    except OSError as error:
        raise ConfigError(f"--write-addresses {path}: {error.strerror}; give a writable file") from error


def ticket_line(
    maddrs: Sequence[str],
    run_id: str,
    model: str = "",
    *,
    founder: str = "",
    run_key: str | None = None,
    shared: RunKey | None = None,
) -> str | None:
    """The command that joins with a ticket; None if no address fits into one.

    Args:
        maddrs: addresses of this peer, the best first.
        founder: peer id of the run's founder, if it is known.
        run_key: the key file of a closed run, as this machine names it.
        shared: the run key, if the ticket is to hold it.
    """
    word = ticket_text(Ticket(run_id, tuple(maddrs), founder, shared))
    if word is None:
        return None
    words = ["p2ptrain", "join", word]
    if run_key is not None and shared is None:
        words += ["--run-key", run_key]
    if ":" in model:
        words += ["--model", model]
    return shlex.join(words)


def join_line(maddrs: Sequence[str], run_id: str, model: str = "", run_key: str | None = None) -> str:
    """The command that joins through this peer, without loopback addresses if there are others.

    `run_key`: the key file of a closed run, as this machine names it.
    """
    reachable = [maddr for maddr in maddrs if not _LOOPBACK.match(maddr)] or list(maddrs)
    words = ["p2ptrain", "join"]
    for maddr in reachable:
        words += ["--initial-peers", maddr]
    if run_id != RunConfig.run_id:
        words += ["--run-id", run_id]
    if run_key is not None:
        words += ["--run-key", run_key]
    if ":" in model:  # the user's own code, which a joiner has to name
        words += ["--model", model]
    return shlex.join(words)


def _read_file(name: str) -> list[str]:
    path = Path(name)
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError as error:
        if name == "lan":  # as `p2ptrain.join` takes it
            raise ConfigError(
                "--initial-peers lan: to join a run on the local network, give --lan join instead"
            ) from error
        raise ConfigError(
            f"ticket or --initial-peers {name}: no such file, and not a ticket or an address; an address looks like "
            f"{EXAMPLE}"
        ) from error
    except (OSError, ValueError) as error:
        origin = f"--initial-peers {name if name.isprintable() else repr(name)}"
        raise ConfigError(f"{origin}: {reason_of(error)}; give a file with one address per line") from error
    addresses = [line.partition("#")[0].strip() for line in lines]
    found = [_checked(address, name) for address in addresses if address]
    if not found:
        raise ConfigError(f"--initial-peers {name}: holds no address; expected lines like {EXAMPLE}")
    return found


def _checked(address: str, origin: str) -> str:
    if not _TRANSPORT.match(address) or " " in address or not address.isprintable():
        raise ConfigError(f"{origin}: {shortened(address)} is not a multiaddr; it looks like {EXAMPLE}")
    _, separator, peer_id = address.rpartition("/p2p/")
    if not separator or not peer_id.isalnum():
        raise ConfigError(f"{origin}: {shortened(address)} does not end in the peer's id; it looks like {EXAMPLE}")
    return address


def nobody_found(run_id: str, option: str) -> str:
    """The message for a user whose run has no peer that answers. `option`: the one that takes the run's name."""
    return (
        f"no peers found for run {run_id!r}; starting it, unless another peer does so first. If you expected peers, "
        f"check {option}; the run may have ended"
    )
