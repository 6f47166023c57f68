"""Searching hivemind's DHT for the nodes nearest to a key (Kademlia), and storing a record there.

hivemind's own search returns nothing if it is cut short, and it asks the nearest nodes first, also those that were only
named to it. One node that names 20 made-up ones nearer than all others, whose dials hang, makes each such search run
out of time. Here what has arrived by the deadline counts, and nodes of our routing table, which have been heard, are
asked before those that others name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import trio

from p2ptrain.network import _hivemind as hivemind
from p2ptrain.network.thread import from_asyncio

logger = logging.getLogger(__name__)


@dataclass
class Found:
    """What a search has found.

    Attributes:
        nodes: the peers that have answered, by node id.
        records: signed values and when they expire, by subkey: the latest of each.
    """

    nodes: dict[Any, hivemind.PeerID] = field(default_factory=dict)
    records: dict[Any, tuple[bytes, float]] = field(default_factory=dict)

    def add(self, held: Any) -> None:
        """Add what a node holds under the key, checked."""
        if held is not None and isinstance(held.value, hivemind.DictionaryDHTValue):
            for subkey, (value, expiration) in held.value.items():
                if subkey not in self.records or expiration > self.records[subkey][1]:
                    self.records[subkey] = value, expiration


async def search(node: hivemind.DHTNode, key: Any, timeout_s: float) -> Found:
    """Ask our node and those nearest to a key for its records, for at most `timeout_s`.

    It ends sooner once the `bucket_size` nearest nodes that are known and not silent have answered. Each peer is asked
    once, under whatever node ids it is named.
    """
    protocol, found = node.protocol, Found()
    found.add(protocol.storage.get(key))
    heard = dict(protocol.routing_table.get_nearest_neighbors(key, protocol.bucket_size, exclude=node.node_id))
    known, asked, running = dict(heard), {node.peer_id}, 0

    def ask_more() -> None:
        nonlocal running
        nearest = sorted(known, key=key.xor_distance)[: protocol.bucket_size]
        for node_id in sorted(heard.keys() & known, key=key.xor_distance) + nearest:
            if running < node.num_workers and known[node_id] not in asked:
                asked.add(known[node_id])
                running += 1
                nursery.start_soon(ask, node_id, known[node_id])

    async def ask(node_id: Any, peer_id: hivemind.PeerID) -> None:
        nonlocal running
        for other in [named for named, its_peer in known.items() if its_peer == peer_id and named != node_id]:
            del known[other]  # a peer has one place, under whatever node ids it is named
        neighbours: dict[Any, hivemind.PeerID] | None = None
        with unless_it_ends():
            if (answer := await from_asyncio(node._call_find_with_blacklist(peer_id, [key]))) is not None:
                held, neighbours = answer[key]
                found.add(held)
        running -= 1
        if neighbours is None:
            del known[node_id]
        else:
            found.nodes[node_id] = peer_id
            for neighbour, its_peer in neighbours.items():
                if its_peer not in asked:
                    known.setdefault(neighbour, its_peer)
        ask_more()

    with trio.move_on_after(timeout_s):
        async with trio.open_nursery() as nursery:
            ask_more()
    # It counts the failures of each id, also of those that strangers make up. We do not need it: all bans last as long.
    node.blacklist.ban_counter.clear()
    return found


async def store(
    node: hivemind.DHTNode, key: Any, subkey: bytes, value: bytes, expires: float, nodes: dict[Any, hivemind.PeerID]
) -> dict[Any, bool]:
    """Store our record on the nearest of `nodes` and our own. Returns which of them have accepted it."""
    protocol = node.protocol
    packed = hivemind.MSGPackSerializer.dumps(subkey)
    record = hivemind.DHTRecord(key.to_bytes(), packed, hivemind.MSGPackSerializer.dumps(value), expires)
    signed = protocol.record_validator.sign_value(record)
    accepted: dict[Any, bool] = {}

    async def store_at(node_id: Any) -> None:
        with unless_it_ends():
            asking = protocol.call_store(nodes[node_id], [key], [signed], expires, subkeys=[subkey])
            accepted[node_id] = bool(all(await from_asyncio(asking) or [False]))

    async with trio.open_nursery() as nursery:
        for node_id in sorted({*nodes, node.node_id}, key=key.xor_distance)[: node.num_replicas]:
            if node_id == node.node_id:
                accepted[node_id] = protocol.storage.store_subkey(key, subkey, signed, expires)
            else:
                nursery.start_soon(store_at, node_id)
    return accepted


@contextlib.contextmanager
def unless_it_ends() -> Iterator[None]:
    """Ignore errors: when the daemon ends during an operation, hivemind raises one of many types."""
    try:
        yield
    except Exception as error:
        logger.debug("an operation of the DHT failed: %r", error)
