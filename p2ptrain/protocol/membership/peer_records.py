"""Records in the directory: each member announces itself with one, and renews it.

A hash of the peer id spreads them over 16 keys, which keeps each key small.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

import msgspec
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.links.handshake import TRAINER
from p2ptrain.protocol.wire.messages import MAX_MADDRS, Maddrs, Name
from p2ptrain.protocol.wire.transport import Directory, PeerId

logger = logging.getLogger(__name__)

BUCKETS = 16
# Records outlive two missed announcements.
ANNOUNCE_EVERY_S = 10.0
RECORD_TTL_S = 30.0


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
