"""The directory of a run: each member announces itself there with a record, and renews it.

A hash of the peer id spreads the records over 16 keys, so that each key has few.

In a closed run, names are derived from the run key, and values are encrypted. A stranger cannot compute the names, so
it cannot list the run. A node that stores the records sees the names, the size of each record, and which peer writes it
and when. Records of peers without the key are ignored.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError
from p2ptrain.protocol.links.handshake import TRAINER
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.messages import MAX_MADDRS, Maddrs, Name
from p2ptrain.protocol.wire.transport import Directory, PeerId

logger = logging.getLogger(__name__)

BUCKETS = 16
# A record outlives two missed announcements.
ANNOUNCE_EVERY_S = 10.0
RECORD_TTL_S = 30.0
# Addresses and role of each announced member.
Members = dict[PeerId, tuple[tuple[str, ...], str]]


def member_key(run_id: str, bucket: int) -> str:
    return f"p2ptrain/{run_id}/members/{bucket}"


def bucket_of(peer_id: PeerId) -> int:
    return hashlib.blake2b(peer_id.encode(), digest_size=1).digest()[0] % BUCKETS


def encode_record(maddrs: Sequence[str], role: str) -> bytes:
    return msgspec.msgpack.encode((maddrs[:MAX_MADDRS], role))


def decode_record(value: bytes) -> tuple[tuple[str, ...], str] | None:
    """Addresses and role of an announced record; None if malformed or not safe to print."""
    try:
        maddrs, role = msgspec.msgpack.decode(value, type=tuple[Maddrs, Name])
    except ValueError:
        return None
    return maddrs, role


async def keep_announced(
    directory: Directory, run_id: str, me: PeerId, maddrs: Callable[[], Sequence[str]], announced: trio.Event
) -> None:
    """Announce ourselves every ANNOUNCE_EVERY_S until cancelled. Sets `announced` after the first success."""
    key, errors = member_key(run_id, bucket_of(me)), ErrorLog(logger)
    while True:
        stored = False
        with errors.containing("announcing this peer"):
            stored = await directory.announce(key, encode_record(maddrs(), TRAINER), RECORD_TTL_S)
        if stored:
            announced.set()
        await trio.sleep(ANNOUNCE_EVERY_S if stored else 1.0)


class ClosedDirectory:
    """Implements `Directory` over another one, for the peer `me`. Ignores values that no member has sealed."""

    def __init__(self, directory: Directory, closed: ClosedRun, me: PeerId) -> None:
        self._directory = directory
        self._closed = closed
        self._me = me

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        name = self._closed.hidden_name(key)
        return await self._directory.announce(name, self._closed.seal(value, name, self._me), expires_in_s)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        name = self._closed.hidden_name(key)
        found = await self._directory.lookup(name)
        values = {owner: self._closed.unseal(value, name, owner) for owner, value in found.items()}
        return {owner: value for owner, value in values.items() if value is not None}


def directory_of(directory: Directory, closed: ClosedRun | None, me: PeerId) -> Directory:
    """The directory for members of a run: that of a closed run hides names and values."""
    return directory if closed is None else ClosedDirectory(directory, closed, me)


async def find_members(directory: Directory, run_id: str, me: PeerId, found: Members | None = None) -> Members:
    """Look up all other members of a run. Keys for which nobody answers are skipped.

    `found` is filled as the keys answer, for callers that do not wait for the last one.
    """
    found = {} if found is None else found

    async def look(bucket: int) -> None:
        try:
            records = await directory.lookup(member_key(run_id, bucket))
        except PeerLostError as error:
            logger.debug("looking up members of run %s: %s", run_id, error)
            return
        for peer_id, value in records.items():
            record = decode_record(value)
            if record is not None and peer_id != me and bucket_of(peer_id) == bucket:
                found[peer_id] = record

    async with trio.open_nursery() as nursery:
        for bucket in range(BUCKETS):
            nursery.start_soon(look, bucket)
    return found
