"""What a stranger's requests and answers may do to a DHT node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import trio
from hivemind.dht import DHTID

from p2ptrain.errors import WireError
from p2ptrain.network._hivemind import DHTNode, PeerID, dht_pb2
from p2ptrain.network.dht_limits import (
    MAX_NEIGHBOURS,
    MAX_RECORDS_BYTES,
    check_answer,
)
from p2ptrain.network.thread import from_asyncio
from tests.network.local import open_pair

Run = Callable[..., Any]
ID = bytes(20)
PEER = bytes([18, 32, *range(32)])


def node_of(network: Any) -> DHTNode:
    node = network.directory._node
    assert node is not None
    return node


def named(*peer_ids: bytes, node_ids: int | None = None, value: bytes = b"") -> dht_pb2.FindResponse:
    """An answer that names these peers for one key."""
    count = len(peer_ids) if node_ids is None else node_ids
    result = dht_pb2.FindResult(nearest_node_ids=count * [ID], nearest_peer_ids=peer_ids, value=value)
    return dht_pb2.FindResponse(results=[result])


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        named(bytes(100)),
        named(PEER, bytes(65)),
        named(*(MAX_NEIGHBOURS + 1) * [PEER]),
        named(PEER, node_ids=MAX_NEIGHBOURS + 1),
        named(value=bytes(MAX_RECORDS_BYTES + 1)),
        dht_pb2.FindResponse(results=[dht_pb2.FindResult(nearest_node_ids=[bytes(21)], nearest_peer_ids=[PEER])]),
        dht_pb2.FindResponse(peer=dht_pb2.NodeInfo(node_id=bytes(21))),
        dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=b"\1")),
        dht_pb2.StoreResponse(peer=dht_pb2.NodeInfo(node_id=bytes(1000))),
    ],
)
def test_answers_that_no_honest_node_gives_are_refused(answer: Any) -> None:
    with pytest.raises(WireError):
        check_answer(answer)


def test_the_answers_of_honest_nodes_are_taken() -> None:
    check_answer(named(*MAX_NEIGHBOURS * [PEER], value=bytes(MAX_RECORDS_BYTES)))
    check_answer(dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=ID)))
    check_answer(dht_pb2.PingResponse())  # of a node that only asks
    check_answer(dht_pb2.StoreResponse(store_ok=[True]))


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
