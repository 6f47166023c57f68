"""Storage of a DHT node's records with limits: what strangers store cannot push out members' records.

hivemind's storage keeps any number of keys, and of records under each. With a limit, a full storage must drop a record
or refuse one. Dropping the record that expires first would drop a member's: those live for 30 s, a stranger's for up to
two minutes. Dropping a random one would do so sooner or later, as a stranger can store faster than members renew. So
stored records stay: new owners are refused while a key is full, and new keys while there are too many. A member renews
its record before it expires, and keeps its place. A new member that is refused still joins: it dials the announced
members, and their heartbeats name it to others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from p2ptrain.network import _hivemind as hivemind

# Records under one key. Members are spread over 16 keys: room for a thousand, fifteen times the largest round.
MAX_RECORDS = 64
# Keys in all: those of 16 runs. A record takes at most some 5.5 KiB with its signature and owner, all together 90 MiB.
MAX_KEYS = 256
# Keys with a record of one owner. A member has one per run, and after a change of runs two for 30 s.
MAX_KEYS_OF_OWNER = 4


class BoundedStorage(hivemind.DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage, which refuses a new record that would exceed one of the limits. Renewals are accepted."""

    def store_subkey(self, key: object, subkey: object, value: bytes, expiration_time: float) -> bool:
        records = _records(self.get(key))
        if subkey not in records and (
            len(records) >= MAX_RECORDS
            or (key not in self and len(self) >= MAX_KEYS)
            or sum(subkey in _records(held) for _, held in self.items()) >= MAX_KEYS_OF_OWNER
        ):
            return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


def _records(held: Any) -> Collection[object]:
    """The owners of the records under a key."""
    return held.value if held is not None and isinstance(held.value, hivemind.DictionaryDHTValue) else ()


def bound_storage(node: hivemind.DHTNode) -> None:
    """Replace the storages of a node by bounded ones, with all that they hold."""
    for name in ("storage", "cache"):
        bounded = BoundedStorage()
        for key, (value, _) in getattr(node.protocol, name).items():
            if isinstance(value, hivemind.DictionaryDHTValue):
                for subkey, (record, expires) in value.items():
                    bounded.store_subkey(key, subkey, record, expires)
        setattr(node.protocol, name, bounded)
