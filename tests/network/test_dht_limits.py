"""What a stranger's requests and answers may do to a DHT node."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import msgspec
import pytest
import trio
from hivemind.dht import DHTID
from hivemind.dht.routing import RoutingTable

from p2ptrain.errors import WireError
from p2ptrain.network._hivemind import DHTNode, DictionaryDHTValue, MSGPackSerializer, PeerID, dht_pb2, p2pd_pb2
from p2ptrain.network.dht_limits import (
    MAX_FOUND_BYTES,
    MAX_NEIGHBOURS,
    MAX_RECORDS,
    MAX_STORE_BYTES,
    MAX_SUBKEY_BYTES,
    MAX_VALUE_BYTES,
    BoundedRoutingTable,
    BoundedStorage,
    LimitedMessage,
)
from p2ptrain.network.host import open_network
from p2ptrain.network.socket_stream import varint
from p2ptrain.network.thread import from_asyncio
from tests.network.local import config, open_pair

Run = Callable[..., Any]
ID = bytes(20)
PEER = bytes([18, 32, *range(32)])


def named(*peer_ids: bytes, node_ids: int | None = None) -> dht_pb2.FindResponse:
    """An answer that names these peers for one key."""
    count = len(peer_ids) if node_ids is None else node_ids
    result = dht_pb2.FindResult(nearest_node_ids=count * [ID], nearest_peer_ids=peer_ids)
    return dht_pb2.FindResponse(results=[result])


def holding(value: bytes) -> dht_pb2.FindResponse:
    """An answer with these records."""
    return dht_pb2.FindResponse(results=[dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=value)])


def records(count: int, size: int = 9) -> DictionaryDHTValue:
    held = DictionaryDHTValue()
    for number in range(count):
        held.store(bytes([number]) * MAX_SUBKEY_BYTES, bytes(size), time.time() + 30.0)
    return held


def dictionary(most: Any, *records: Any) -> bytes:
    """Records whose sender chose how many of them we keep."""
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(0x50, msgspec.msgpack.encode([most, 1.0, records])))


def nested(code: int, depth: int) -> bytes:
    """Msgpack that contains msgpack, and so on: hivemind unpacks it by C functions that call each other."""
    packed = b"\xc0"
    for _ in range(depth):
        packed = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, packed))
    return packed


def to_store(**changed: Any) -> dht_pb2.StoreRequest:
    """A request to store one record."""
    fields = {"keys": [ID], "subkeys": [b"\xc4\x01a"], "values": [b"v"], "expiration_time": [1.0], "in_cache": [False]}
    return dht_pb2.StoreRequest(**{**fields, **changed})


def take(message: Any) -> None:
    """Parse a message as a node would."""
    LimitedMessage(type(message)).FromString(message.SerializeToString())


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        named(bytes(100)),
        named(PEER, bytes(65)),
        named(*(MAX_NEIGHBOURS + 1) * [PEER]),
        named(PEER, node_ids=MAX_NEIGHBOURS + 1),
        dht_pb2.FindResponse(),
        dht_pb2.FindResponse(results=[dht_pb2.FindResult(), dht_pb2.FindResult()]),
        dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=bytes(MAX_FOUND_BYTES))]),
        holding(b""),
        holding(b"\xc1"),
        holding(MSGPackSerializer.dumps([])),
        holding(MSGPackSerializer.dumps(records(MAX_RECORDS + 1))),
        holding(dictionary("x", [b"a", b"v", 1.0])),
        holding(dictionary(0, [b"a", b"v", 1.0])),
        holding(dictionary(math.inf, [1, 2, 3])),
        holding(nested(0x40, 300)),
        holding(nested(0x50, 20000)),
        dht_pb2.PingResponse.FromString(b"\x7a\xb0\x09" + bytes(1200)),
        dht_pb2.FindResponse(results=[dht_pb2.FindResult(nearest_node_ids=[bytes(21)], nearest_peer_ids=[PEER])]),
        dht_pb2.FindResponse(peer=dht_pb2.NodeInfo(node_id=bytes(21))),
        dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=b"\1")),
        dht_pb2.StoreResponse(peer=dht_pb2.NodeInfo(node_id=bytes(1000))),
    ],
)
def test_answers_that_no_honest_node_gives_are_refused(answer: Any) -> None:
    with pytest.raises(WireError):
        take(answer)


def test_the_answers_of_honest_nodes_are_taken() -> None:
    take(named(*MAX_NEIGHBOURS * [PEER]))
    full = named(*MAX_NEIGHBOURS * [bytes(64)])
    full.results[0].type = dht_pb2.FOUND_DICTIONARY
    full.results[0].value = MSGPackSerializer.dumps(records(MAX_RECORDS, 2 * MAX_VALUE_BYTES))
    take(full)
    take(holding(MSGPackSerializer.dumps(DictionaryDHTValue())))
    take(holding(dictionary(math.inf, [b"a", b"v", 1.0])))
    take(dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=ID)))
    take(dht_pb2.PingResponse())  # of a node that only asks
    take(dht_pb2.StoreResponse(store_ok=[True]))


@pytest.mark.processes
def test_a_long_peer_id_in_an_answer_is_not_parsed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind encodes it in base 58: for a megabyte that takes minutes, on the network thread."""

    async def main() -> None:
        async with open_pair() as (victim, attacker):
            ours, theirs = node_of(victim).protocol, node_of(attacker).protocol
            long_id = PeerID(bytes(100))
            monkeypatch.setattr(
                theirs.routing_table, "get_nearest_neighbors", lambda *_, **__: [(DHTID.generate("made up"), long_id)]
            )
            parsed = Mock()
            monkeypatch.setattr("hivemind.dht.protocol.PeerID", parsed)
            peer = PeerID.from_base58(attacker.peer_id)
            assert await from_asyncio(ours.call_find(peer, [DHTID.generate("run")])) is None
            assert not parsed.called
            while peer in ours.routing_table:  # such a node is asked no more
                await trio.sleep(0.01)

    run(main)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["response", "error", "daemon error"])
def test_an_answer_to_a_call_that_was_just_given_up_ends_nothing(run: Run, kind: str) -> None:
    """A stranger may answer as late as it likes."""

    async def main() -> None:
        async with open_network(config()) as network:
            control, call_id = node_of(network).p2p._client.control, uuid4()
            answer = p2pd_pb2.PersistentConnectionResponse(callId=call_id.bytes)
            if kind == "daemon error":
                answer.daemonError.message = "late"
            else:
                setattr(answer.callUnaryResponse, kind, b"late")

            async def read() -> None:
                control._pending_calls[call_id] = asyncio.get_running_loop().create_future()
                control._pending_calls[call_id].cancel()
                reader, message = asyncio.StreamReader(), answer.SerializeToString()
                reader.feed_data(varint(len(message)) + message)
                reader.feed_eof()
                await control._read_from_persistent_conn(reader)

            await from_asyncio(read())

    run(main)


# --- requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        dht_pb2.FindRequest(keys=2 * [ID]),
        dht_pb2.FindRequest(keys=[bytes(21)]),
        dht_pb2.FindRequest(keys=[ID], peer=dht_pb2.NodeInfo(node_id=bytes(1000))),
        dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=bytes(21))),
        dht_pb2.PingRequest.FromString(b"\x7a\xe8\x07" + bytes(1000) + b"\x7a\x20" + bytes(32)),
        to_store(keys=2 * [ID]),
        to_store(keys=[b""]),
        to_store(subkeys=[]),
        to_store(subkeys=[b""], values=[nested(0x50, 300)]),  # a dictionary
        to_store(values=[bytes(MAX_STORE_BYTES)]),
        to_store(in_cache=[True]),
    ],
)
def test_requests_that_no_honest_node_sends_are_refused(request_: Any) -> None:
    with pytest.raises(WireError):
        take(request_)


def test_the_requests_of_honest_nodes_are_taken() -> None:
    sender = dht_pb2.NodeInfo(node_id=ID)
    take(dht_pb2.FindRequest(keys=[ID], peer=sender))
    take(dht_pb2.PingRequest(peer=sender, validate=True))
    take(dht_pb2.PingRequest())
    take(to_store(subkeys=[bytes(MAX_SUBKEY_BYTES)], values=[bytes(2 * MAX_VALUE_BYTES)], peer=sender))


def test_the_largest_answer_fits_into_a_message() -> None:
    assert MAX_FOUND_BYTES < 4 * 2**20


@pytest.mark.processes
def test_a_node_refuses_many_keys_and_forgets_the_request(run: Run) -> None:
    async def main() -> None:
        async with open_pair() as (victim, attacker):
            theirs, running = node_of(attacker).protocol, node_of(victim).p2p._client.control._handler_tasks
            peer = PeerID.from_base58(victim.peer_id)
            one, two = ([DHTID.generate(number) for number in range(count)] for count in (1, 2))
            assert await from_asyncio(theirs.call_find(peer, one)) is not None
            assert await from_asyncio(theirs.call_find(peer, two)) is None
            while running:
                await trio.sleep(0.01)

    run(main)


@pytest.mark.processes
@pytest.mark.parametrize("fate", ["closed by the peer", "answer too large"])
def test_a_request_is_forgotten_however_it_ends(run: Run, fate: str) -> None:
    async def main() -> None:
        async with open_network(config()) as network:
            control, call_id = node_of(network).p2p._client.control, uuid4()

            async def handler(request: bytes, remote: PeerID) -> bytes:
                if fate == "closed by the peer":
                    await asyncio.sleep(3600.0)
                return bytes(2 * control.persistent_conn_max_msg_size)

            async def handle() -> None:
                control.unary_handlers["test"] = handler
                request = p2pd_pb2.CallUnaryRequest(proto="test", peer=PEER)
                task = asyncio.create_task(control._handle_persistent_request(call_id, request))
                control._handler_tasks[call_id] = task
                if fate == "closed by the peer":
                    await asyncio.sleep(0)
                    task.cancel()
                await asyncio.wait([task])
                await asyncio.sleep(0)

            await from_asyncio(handle())
            assert not control._handler_tasks

    run(main)


# --- the routing table -------------------------------------------------------------------------------------------


def node_of(network: Any) -> DHTNode:
    node = network.directory._node
    assert node is not None
    return node


def peer(number: int) -> PeerID:
    return PeerID(bytes([18, 32, *[0] * 28, *number.to_bytes(4)]))


def table(node_id: int = 0) -> BoundedRoutingTable:
    return BoundedRoutingTable(DHTID(node_id), MAX_NEIGHBOURS, 5)


def test_one_peer_has_one_node_id() -> None:
    """A stranger names any number of node ids; a restarted peer has a new one."""
    nodes = table()
    nodes.add_or_update_node(DHTID(7), peer(7))
    for number in range(100, 1100):
        nodes.add_or_update_node(DHTID(number), peer(1))
    assert nodes.uid_to_peer_id == {7: peer(7), 1099: peer(1)}
    assert nodes.peer_id_to_uid == {peer(7): 7, peer(1): 1099}
    assert sum(len(bucket.nodes_to_peer_id) + len(bucket.replacement_nodes) for bucket in nodes.buckets) == 2


def test_nobody_takes_the_node_id_of_another_peer() -> None:
    nodes = table()
    nodes.add_or_update_node(DHTID(7), peer(7))
    nodes.add_or_update_node(DHTID(8), peer(8))
    assert nodes.add_or_update_node(DHTID(7), peer(8)) is None
    assert nodes.uid_to_peer_id == {7: peer(7), 8: peer(8)}


def test_many_peers_fill_a_bucket_and_its_replacements_only() -> None:
    nodes, top = table(), DHTID.MAX - 1
    for number in range(1000):
        nodes.add_or_update_node(DHTID(top - number), peer(number))
    assert len(nodes.uid_to_peer_id) == len(nodes.peer_id_to_uid) == 2 * MAX_NEIGHBOURS
    assert nodes.get(node_id=DHTID(top)) == peer(0)  # the first stay as long as they answer
    assert nodes.get(node_id=DHTID(top - 999)) == peer(999)  # of the replacements the latest


def test_a_thousand_honest_nodes_are_kept_as_hivemind_does() -> None:
    rng = random.Random(0)
    theirs, ours = RoutingTable(DHTID(5), MAX_NEIGHBOURS, 5), table(5)
    for number in range(1000):
        node_id = DHTID(rng.getrandbits(160))
        theirs.add_or_update_node(node_id, peer(number))
        ours.add_or_update_node(node_id, peer(number))
    assert [b.nodes_to_peer_id for b in ours.buckets] == [b.nodes_to_peer_id for b in theirs.buckets]
    assert len(ours.uid_to_peer_id) > 900


def test_a_node_at_the_middle_of_a_bucket_can_be_removed() -> None:
    """With hivemind's table it would stay for good, and each lookup would wait for it."""
    nodes, middle = table(), DHTID(2**159)
    nodes.add_or_update_node(middle, peer(0))
    for number in range(1, 25):
        nodes.add_or_update_node(DHTID(2**159 + number * 2**100), peer(number))
    assert len(nodes.buckets) > 1
    assert nodes.get(node_id=middle) == peer(0)
    del nodes[middle]
    assert middle not in nodes


# --- the storage -------------------------------------------------------------------------------------------------


def test_storing_a_record_again_takes_no_memory_and_an_older_one_ends_no_record() -> None:
    storage, later = BoundedStorage(), time.time() + 60.0
    assert storage.store_subkey(b"key", b"owner", b"new", later)
    for number in range(100):
        assert not storage.store_subkey(b"key", b"owner", b"old", later - number % 50)
    held = storage.get(b"key").value
    assert len(storage.expiration_heap) == len(held.expiration_heap) == 1
    assert held.key_to_heap[b"owner"].expiration_time == later
