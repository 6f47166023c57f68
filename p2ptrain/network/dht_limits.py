"""What strangers may do to our DHT node: limits of requests and answers, and of what it stores and remembers.

p2pd passes the requests of all peers to the node, also those that the user refuses, and the node asks nodes that
strangers name. hivemind takes whatever they send: nested msgpack of a kilobyte even ends the process, as hivemind
unpacks it by C functions that call each other. So `BoundedP2P` parses only messages that our own nodes could have sent,
and `BoundedStorage` and `BoundedRoutingTable` limit what stays.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from p2ptrain.errors import WireError
from p2ptrain.network import _hivemind as hivemind
from p2ptrain.network.addresses import MAX_PEER_ID_BYTES

# A member's addresses and state take a few hundred bytes.
MAX_VALUE_BYTES = 4 * 1024
# The OpenSSH form of a 2048-bit RSA key has 380 bytes, that of the largest allowed one 724.
MAX_SUBKEY_BYTES = 1024
# All records are members', which last 30 s. Four times that leaves room for later versions.
MAX_EXPIRES_IN_S = 120.0
# Records under one key. Members are spread over 16 keys: room for a thousand, fifteen times the largest round.
MAX_RECORDS = 64
# Keys in all: enough for 16 runs. A record takes at most 5.5 KiB with its signature and owner, all of them 90 MiB.
MAX_KEYS = 256
# Keys under which one owner may have a record. A member has one per run, and for 30 s after a change of runs two.
MAX_KEYS_OF_OWNER = 4
# Twice the value leaves room for the signature.
MAX_RECORD_BYTES = MAX_SUBKEY_BYTES + 2 * MAX_VALUE_BYTES + 64
# Neighbours that a node names for a key: hivemind's bucket size.
MAX_NEIGHBOURS = 20
NODE_ID_BYTES = 20
# A request or an answer without its records and neighbours has less than 100 bytes.
MAX_MESSAGE_BYTES = 1024
MAX_STORE_BYTES = MAX_MESSAGE_BYTES + MAX_RECORD_BYTES
MAX_FOUND_BYTES = MAX_MESSAGE_BYTES + MAX_RECORDS * MAX_RECORD_BYTES + MAX_NEIGHBOURS * 100
# hivemind's msgpack of all records under a key: the most of them, when the last one expires, and subkey, signed value
# and expiration of each.
DICTIONARY = 0x50
Records = tuple[float, float, list[tuple[bytes, bytes, float]]]


class BoundedP2P(hivemind.P2P):  # type: ignore[misc]
    """hivemind's connection to p2pd, which refuses requests to our DHT node, and answers to it, that break a rule."""

    @classmethod
    async def replicate(cls, daemon_listen_maddr: hivemind.Multiaddr) -> BoundedP2P:
        p2p: BoundedP2P = await super().replicate(daemon_listen_maddr)
        p2p._client.control._handler_tasks = RunningTasks()
        p2p._client.control._pending_calls = PendingCalls()
        return p2p

    async def _add_protobuf_unary_handler(
        self,
        handle_name: str,
        handler: Callable[..., Awaitable[Any]],
        input_protobuf_type: type,
        balanced: bool = False,
    ) -> None:
        limited = LimitedMessage(input_protobuf_type)
        await super()._add_protobuf_unary_handler(handle_name, handler, limited, balanced=balanced)

    async def _call_unary_protobuf_handler(
        self, peer_id: hivemind.PeerID, handle_name: str, input: Any, output_protobuf_type: type
    ) -> Any:
        limited = LimitedMessage(output_protobuf_type)
        return await super()._call_unary_protobuf_handler(peer_id, handle_name, input, limited)


class LimitedMessage:
    """A type of hivemind's messages, which parses only those that our own nodes could have sent."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def FromString(self, data: bytes) -> Any:
        """Parse a message of another node. Raises WireError."""
        check, most_bytes = LIMITS.get(self._kind, (_check_sender, MAX_MESSAGE_BYTES))
        if len(data) > most_bytes:
            raise WireError(f"a {self._kind.DESCRIPTOR.name} of {len(data)} bytes, more than {most_bytes}")
        message = self._kind.FromString(data)
        check(message)
        return message


def _check_sender(message: Any) -> None:
    if len(message.peer.node_id) not in (0, NODE_ID_BYTES):
        raise WireError(f"a node id of {len(message.peer.node_id)} bytes")


def _check_find(request: Any) -> None:
    _check_sender(request)
    _check_ids(request.keys, 1)


def _check_store(request: Any) -> None:
    """One record at a time, and none for the cache, whose records would be found instead of members'."""
    _check_sender(request)
    _check_ids(request.keys, 1)
    if len(request.subkeys) != 1 or request.subkeys[0] == hivemind.DHTProtocol.IS_DICTIONARY or any(request.in_cache):
        raise WireError("a request to store anything but one record")


def _check_found(answer: Any) -> None:
    """One key's records and neighbours. hivemind encodes peer ids in base 58, which takes minutes for a megabyte."""
    _check_sender(answer)
    if len(answer.results) != 1:
        raise WireError(f"{len(answer.results)} answers to the lookup of one key")
    (result,) = answer.results
    _check_ids(result.nearest_node_ids, MAX_NEIGHBOURS)
    if len(result.nearest_peer_ids) > MAX_NEIGHBOURS:
        raise WireError(f"{len(result.nearest_peer_ids)} neighbours of one key")
    if any(len(peer_id) > MAX_PEER_ID_BYTES for peer_id in result.nearest_peer_ids):
        raise WireError("a peer id that is too long")
    if result.type == hivemind.dht_pb2.FOUND_DICTIONARY:
        _check_dictionary(result.value)


def _check_ids(ids: Any, most: int) -> None:
    if len(ids) > most:
        raise WireError(f"{len(ids)} keys or node ids, more than {most}")
    if any(len(node_id) != NODE_ID_BYTES for node_id in ids):
        raise WireError(f"a key or node id that does not have {NODE_ID_BYTES} bytes")


def _check_dictionary(packed: bytes) -> None:
    try:
        dictionary = msgspec.msgpack.decode(packed, type=msgspec.msgpack.Ext)
        most, _, records = msgspec.msgpack.decode(dictionary.data, type=Records)
    except msgspec.MsgspecError as error:
        raise WireError(f"records that are not a dictionary: {error}") from None
    if dictionary.code != DICTIONARY or most != math.inf or len(records) > MAX_RECORDS:
        raise WireError(f"a dictionary of {len(records)} records, with room for {most}")


LIMITS: dict[Any, tuple[Callable[[Any], None], int]] = {
    hivemind.dht_pb2.FindRequest: (_check_find, MAX_MESSAGE_BYTES),
    hivemind.dht_pb2.StoreRequest: (_check_store, MAX_STORE_BYTES),
    hivemind.dht_pb2.FindResponse: (_check_found, MAX_FOUND_BYTES),
}


class RunningTasks(dict[Any, "asyncio.Task[None]"]):
    """The tasks that handle requests, by call. Each is forgotten when it ends.

    hivemind forgets only those that have answered: not those that are cancelled because the peer closes its stream, nor
    those whose answer is too large.
    """

    def __setitem__(self, call_id: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


class PendingCalls(dict[Any, "asyncio.Future[bytes]"]):
    """The calls that wait for an answer, by id. One that was given up does not wait, though its task has yet to notice.

    hivemind's reader would end at the answer to such a call, and with it the whole DHT node.
    """

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)
        return call is not None and not call.done()


class BoundedRoutingTable(hivemind.RoutingTable):  # type: ignore[misc]
    """hivemind's routing table with one node id per peer, and at most `bucket_size` replacements in each bucket.

    hivemind's has any number of them. A peer's new node id replaces its old one: a restarted peer has a new one, and
    p2pd authenticates who names it, so a peer moves only itself. A node id that another peer has is refused, so that
    nobody takes an honest node's place.
    """

    def add_or_update_node(self, node_id: Any, peer_id: hivemind.PeerID) -> Any:
        """The node to ping if the bucket is full, else None."""
        if self.get(node_id=node_id, default=peer_id) != peer_id:
            return None
        old = self.get(peer_id=peer_id, default=node_id)
        if old != node_id:
            del self[old]
        asked = super().add_or_update_node(node_id, peer_id)
        replacements = self.buckets[self.get_bucket_index(node_id)].replacement_nodes
        if len(replacements) > self.bucket_size:
            del self[next(iter(replacements))]
        return asked

    def split_bucket(self, index: int) -> None:
        """Split a bucket. hivemind puts the node at the middle into the wrong half, from which it is never removed."""
        super().split_bucket(index)
        left, right = self.buckets[index : index + 2]
        for nodes in (left.nodes_to_peer_id, left.replacement_nodes):
            if (peer_id := nodes.pop(right.lower, None)) is not None:
                right.add_or_update_node(hivemind.DHTID(right.lower), peer_id)


class BoundedStorage(hivemind.DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage with limits: strangers' records cannot push out members'.

    hivemind's storage keeps any number of keys, and of records under each. With a limit, a full storage must drop a
    record or refuse one. Dropping the record that expires first would drop a member's: those live for 30 s, a
    stranger's for up to two minutes. Dropping a random one would do so sooner or later, as a stranger can store faster
    than members renew. So stored records stay: new owners are refused while a key is full, and new keys while there are
    too many. Renewals are accepted, so a member keeps its place. A new member that is refused still joins: it dials the
    announced members, and their heartbeats name it to others.

    hivemind's node hands what it stores to each node that it meets, up to 4 MiB as often as that one comes back with
    another id. Members renew their records every few seconds, so we hand over nothing.

    A node whose clock is behind refuses all records under a key if one expires too late for it. So what is stored
    expires a few seconds sooner than it accepts.

    For a record that is stored again, hivemind's storage keeps one more entry until it expires, and it removes a record
    as early as an older one that is stored after it. So only a record that expires later reaches it.
    """

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        records = _records(self.get(key))
        latest = hivemind.get_dht_time() + MAX_EXPIRES_IN_S
        if expiration_time > latest:
            return False
        for owner in [owner for owner, held in records.items() if held.expiration_time > latest]:
            del records[owner]  # from before our clock was set back
        held = records.get(subkey)
        if held is not None and held.expiration_time >= expiration_time:
            return False
        if held is None and (
            len(records) >= MAX_RECORDS
            or (key not in self and len(self) >= MAX_KEYS)
            or sum(subkey in _records(other) for other in self.data.values()) >= MAX_KEYS_OF_OWNER
        ):
            return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def items(self) -> Iterator[Any]:
        """Nothing: hivemind asks only for what it hands over."""
        return iter(())


def _records(held: Any) -> Any:
    """The records under a key, by owner."""
    is_shared = held is not None and isinstance(held.value, hivemind.DictionaryDHTValue)
    return held.value if is_shared else hivemind.DictionaryDHTValue()
