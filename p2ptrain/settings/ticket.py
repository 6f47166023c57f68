"""Tickets: one word that holds what a peer needs to join a run.

`p2pt1` and the base32 form of: flags, the run id, the run key if it is shared, the peer ids, and the addresses, in
which peer ids are numbers; then a checksum. The usual ticket, for one IPv4 address of the run's founder or of a
bootstrap node, has a shorter form of 76 characters. A ticket that holds the key is a secret; messages about tickets
never show them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RUN_ID, RunConfig
from p2ptrain.settings.peer_id import from_base58, to_base58
from p2ptrain.settings.run_key import CHECKSUM_BYTES, SECRET_BYTES, RunKey, base32, checksum, from_base32

PREFIX = "p2pt1"
# More do not help: a joining peer asks the first that answers for the others.
MAX_ADDRESSES = 6
MAX_IDS = 16
# All addresses of a ticket together; those that do not fit are left out.
MAX_ADDRESS_BYTES = 1024
# With the longest run id, and all ids.
MAX_CHARS = 4400
_HAS_KEY, _HAS_FOUNDER, _IS_SHORT = 1, 2, 4
# First bytes of a peer id that is the SHA-256 of a key (multihash).
_SHA256 = b"\x12\x20"
_USUAL_ADDRESS = re.compile(r"/ip4/(?P<host>[\d.]+)/tcp/(?P<port>\d{1,5})/p2p/(?P<id>Qm\w{44})", re.ASCII)
# The version has one digit: a second one could be of the base32 form, which has the digits 2 to 7.
_VERSION = re.compile(r"p2pt(\d)", re.IGNORECASE)
# The parts of an address by their numbers in a ticket, and what follows each; never renumber.
_PARTS = {
    1: ("ip4", "ip4"), 2: ("ip6", "ip6"), 3: ("tcp", "port"), 4: ("udp", "port"), 5: ("dns", "name"),
    6: ("dns4", "name"), 7: ("dns6", "name"), 8: ("dnsaddr", "name"), 9: ("p2p", "id"), 10: ("p2p-circuit", ""),
    11: ("quic", ""), 12: ("quic-v1", ""), 13: ("ws", ""), 14: ("wss", ""),
}  # fmt: skip
_NUMBERS = {name: number for number, (name, _) in _PARTS.items()}


@dataclass(frozen=True)
class Ticket:
    """The content of a ticket.

    Attributes:
        addresses: multiaddrs that end in the peer id, the best first.
        founder: the peer id of the run's founder; "" if it is not known.
        key: the run key, if the run is closed and the ticket shares it.
    """

    run_id: str
    addresses: tuple[str, ...]
    founder: str = ""
    key: RunKey | None = None


def ticket_text(ticket: Ticket) -> str | None:
    """The ticket as one word, with the addresses that fit into it; None if none fits."""
    if (short := _short_body(ticket)) is not None:
        return PREFIX + base32(short + checksum(PREFIX, short))
    ids: list[str] = []
    addresses: list[bytes] = []
    for address in ticket.addresses:
        encoded = _encode_address(address, ids) if len(addresses) < MAX_ADDRESSES else None
        if encoded is not None and sum(map(len, (*addresses, encoded))) <= MAX_ADDRESS_BYTES:
            addresses.append(encoded)
    if not addresses:
        return None
    founder = _number_of(ticket.founder, ids) if ticket.founder else None
    flags = (_HAS_KEY if ticket.key else 0) | (_HAS_FOUNDER if founder is not None else 0)
    run_id = ticket.run_id.encode()
    body = bytes([flags]) + len(run_id).to_bytes(2, "big") + run_id
    body += ticket.key.secret if ticket.key else b""
    body += bytes([len(ids)]) + b"".join(_sized(from_base58(peer_id)) for peer_id in ids)
    body += b"" if founder is None else bytes([founder])
    body += bytes([len(addresses)]) + b"".join(addresses)
    return PREFIX + base32(body + checksum(PREFIX, body))


def _short_body(ticket: Ticket) -> bytes | None:
    """Flags, run id (empty: the default), SHA-256 of the peer's key, IPv4 address and port; None if that is not all.

    The flag for a founder says that this peer is the founder.
    """
    if len(ticket.addresses) != 1 or ticket.key is not None:
        return None
    found = _USUAL_ADDRESS.fullmatch(ticket.addresses[0])
    run_id = b"" if ticket.run_id == RunConfig.run_id else ticket.run_id.encode()
    if found is None or ticket.founder not in ("", found["id"]):
        return None
    flags = bytes([_IS_SHORT | (_HAS_FOUNDER if ticket.founder else 0)])
    try:
        place = ipaddress.IPv4Address(found["host"]).packed + int(found["port"]).to_bytes(2, "big")
        peer_id = from_base58(found["id"])
        if not peer_id.startswith(_SHA256) or len(peer_id) != len(_SHA256) + 32:
            return None
        return flags + _sized(run_id) + peer_id.removeprefix(_SHA256) + place
    except (ValueError, OverflowError):
        return None


def looks_like_ticket(word: str) -> bool:
    """Whether a value of `--initial-peers` is meant as a ticket, whole or not, and not as an address or a file."""
    return word.lower().startswith("p2pt") and not set(word) & set("/.\\")


def parse_ticket(word: str) -> Ticket:
    """Read `ticket_text`. Raises ConfigError, which never shows the word."""
    word = word.strip()
    version = _VERSION.match(word)
    if version is not None and version[1] != "1":
        raise ConfigError(
            f"the ticket is of version {version[1]}, and this p2ptrain reads version 1: update p2ptrain, or use "
            "--initial-peers"
        )
    if not word.lower().startswith(PREFIX):
        raise ConfigError(f"a ticket begins with {PREFIX}; copy the whole word")
    data = from_base32(word[len(PREFIX) :]) if len(word) <= MAX_CHARS else None
    if data is None or data[-CHECKSUM_BYTES:] != checksum(PREFIX, data[:-CHECKSUM_BYTES]):
        raise ConfigError(
            f"the ticket is mistyped or cut (it has {len(word)} characters): copy the whole word that the other peer "
            "printed, and write it as one word, without spaces and line breaks"
        )
    try:
        return _decode(_Bytes(data[:-CHECKSUM_BYTES]))
    except (ValueError, LookupError):
        raise ConfigError("the ticket is malformed: ask for a new one, or use --initial-peers") from None


class _Bytes:
    """Takes values from the front of some bytes. Raises ValueError at their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self, count: int) -> bytes:
        if count > len(self._data):
            raise ValueError("too short")
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def number(self) -> int:
        return self.take(1)[0]

    def sized(self) -> bytes:
        return self.take(self.number())

    def end(self) -> None:
        if self._data:
            raise ValueError("too long")


def _decode(data: _Bytes) -> Ticket:
    flags = data.number()
    if flags & ~_HAS_FOUNDER == _IS_SHORT:
        return _decode_short(data, has_founder=bool(flags & _HAS_FOUNDER))
    run_id = data.take(int.from_bytes(data.take(2), "big")).decode()
    if flags & ~(_HAS_KEY | _HAS_FOUNDER) or not RUN_ID.fits(run_id):
        raise ValueError("flags or run id")
    key = RunKey(data.take(SECRET_BYTES)) if flags & _HAS_KEY else None
    ids = _list(data, MAX_IDS, lambda: to_base58(data.sized()))
    founder = ids[data.number()] if flags & _HAS_FOUNDER else ""
    addresses = _list(data, MAX_ADDRESSES, lambda: _decode_address(data, ids))
    data.end()
    return Ticket(run_id, tuple(addresses), founder, key)


def _decode_short(data: _Bytes, *, has_founder: bool) -> Ticket:
    run_id = data.sized().decode() or RunConfig.run_id
    if not RUN_ID.fits(run_id):
        raise ValueError("run id")
    peer_id = to_base58(_SHA256 + data.take(32))
    host, port = ipaddress.ip_address(data.take(4)), int.from_bytes(data.take(2), "big")
    data.end()
    return Ticket(run_id, (f"/ip4/{host}/tcp/{port}/p2p/{peer_id}",), peer_id if has_founder else "")


def _list(data: _Bytes, most: int, item: Callable[[], str]) -> list[str]:
    count = data.number()
    if not 0 < count <= most:
        raise ValueError("number of items")
    return [item() for _ in range(count)]


def _encode_address(address: str, ids: list[str]) -> bytes | None:
    """The address with its peer ids replaced by their numbers in `ids`, which takes new ones; None if it has none."""
    parts = address.split("/")[1:]
    known = list(ids)
    encoded, count = b"", 0
    try:
        while parts:
            number, count = _NUMBERS[parts.pop(0)], count + 1
            follows = _PARTS[number][1]
            encoded += bytes([number]) + (_encode_value(follows, parts.pop(0), known) if follows else b"")
    except (LookupError, ValueError, OverflowError):
        return None
    if len(known) > MAX_IDS or count > 255 or not address.rpartition("/p2p/")[1]:
        return None
    ids[:] = known
    return bytes([count]) + encoded


def _encode_value(kind: str, text: str, ids: list[str]) -> bytes:
    match kind:
        case "ip4":
            return ipaddress.IPv4Address(text).packed
        case "ip6":
            return ipaddress.IPv6Address(text).packed
        case "port":
            return int(text).to_bytes(2, "big")
        case "name":
            return _sized(text.encode())
    return bytes([_number_of(text, ids)])


def _decode_address(data: _Bytes, ids: Sequence[str]) -> str:
    parts: list[str] = []
    for _ in range(data.number()):
        name, follows = _PARTS[data.number()]
        parts += [name, _decode_value(follows, data, ids)] if follows else [name]
    if parts[-2:-1] != ["p2p"]:
        raise ValueError("no peer id at the end")
    return "/" + "/".join(parts)


def _decode_value(kind: str, data: _Bytes, ids: Sequence[str]) -> str:
    match kind:
        case "ip4":
            return str(ipaddress.IPv4Address(data.take(4)))
        case "ip6":
            return str(ipaddress.IPv6Address(data.take(16)))
        case "port":
            return str(int.from_bytes(data.take(2), "big"))
        case "name":
            name = data.sized().decode()
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise ValueError("host name")
            return name
    return ids[data.number()]


def _number_of(peer_id: str, ids: list[str]) -> int:
    if peer_id not in ids:
        from_base58(peer_id)  # raises ValueError
        ids.append(peer_id)
    return ids.index(peer_id)


def _sized(data: bytes) -> bytes:
    if len(data) > 255:
        raise ValueError("too long for a ticket")
    return bytes([len(data)]) + data
