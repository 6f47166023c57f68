"""Storage of a DHT node's records with a limit for each key: what strangers store cannot push out members' records.

hivemind's storage keeps any number of records under a key. With a limit, somebody must go. The record that expires
first would be an honest one, as those live for 30 s and others up to an hour; so would a random one, sooner or later,
as a stranger can store faster than members renew. So the first ones stay, and new owners are refused while a key is
full. A member renews its record before it expires, and keeps its place. A new member that is refused still joins: it
dials those announced, and their heartbeats name it to others.
"""

from __future__ import annotations

from p2ptrain.network import _hivemind as hivemind

# Records under one key. Members are spread over 16 keys: room for a thousand, fifteen times the largest round.
MAX_RECORDS = 64


class BoundedStorage(hivemind.DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage, which refuses a new owner's record while its key has `MAX_RECORDS` others."""

    def store_subkey(self, key: object, subkey: object, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        if held is not None and isinstance(held.value, hivemind.DictionaryDHTValue):
            records = held.value
            if subkey not in records and len(records) >= MAX_RECORDS:
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


def bound_storage(node: hivemind.DHTNode) -> None:
    """Replace the storages of a node by bounded ones, with all that they hold."""
    for name in ("storage", "cache"):
        bounded = BoundedStorage()
        for key, (value, _) in getattr(node.protocol, name).items():
            if isinstance(value, hivemind.DictionaryDHTValue):
                for subkey, (record, expires) in value.items():
                    bounded.store_subkey(key, subkey, record, expires)
        setattr(node.protocol, name, bounded)
