"""A search of the DHT among honest, silent and lying nodes, in virtual time."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from hivemind.dht.node import Blacklist

from p2ptrain.errors import PeerLostError
from p2ptrain.network import dht, dht_search
from p2ptrain.network._hivemind import DHTID, DictionaryDHTValue, PeerID, RSAPrivateKey
from p2ptrain.network.dht import HivemindDirectory, OwnedRecords
from p2ptrain.network.dht_limits import BoundedRoutingTable, BoundedStorage
from p2ptrain.network.dht_search import Found, search
from p2ptrain.network.identity import peer_id_of

KEY = DHTID.generate("run")
SILENT_S = 3.0
IDENTITY = RSAPrivateKey()


def peer(number: int) -> PeerID:
    return PeerID(bytes([18, 32, *[0] * 28, *number.to_bytes(4)]))


def near(rank: int) -> DHTID:
    """The node id of this rank by distance to the key."""
    return DHTID(KEY ^ rank)


class Net:
    """Nodes by peer id, and our node, which has heard those of `heard`.

    Attributes:
        names: which nodes each peer names; a peer without an entry is silent.
        holds: the records of each peer.
        asked: whom we have asked, in order.
    """

    def __init__(self, heard: Mapping[DHTID, PeerID], names: Mapping[PeerID, Mapping[DHTID, PeerID]]) -> None:
        self.names = names
        self.holds: dict[PeerID, BoundedStorage] = {peer_id: BoundedStorage() for peer_id in names}
        self.asked: list[PeerID] = []
        node_id = DHTID(KEY ^ (2**160 - 1))
        table = BoundedRoutingTable(node_id, 20, 5)
        for neighbour, peer_id in heard.items():
            table.add_or_update_node(neighbour, peer_id)
        self.node: Any = SimpleNamespace(
            node_id=node_id,
            peer_id=peer(10**6),
            num_workers=4,
            num_replicas=5,
            blacklist=Blacklist(5.0, 1.0),
            _call_find_with_blacklist=self._find,
            protocol=SimpleNamespace(
                storage=BoundedStorage(),
                routing_table=table,
                bucket_size=20,
                record_validator=OwnedRecords(IDENTITY),
                call_store=self._store,
            ),
        )

    async def _find(self, peer_id: PeerID, keys: list[DHTID]) -> Any:
        self.asked.append(peer_id)
        if peer_id not in self.names:
            await trio.sleep(SILENT_S)
            return None
        await trio.sleep(0.1)
        self.node.blacklist.register_failure(peer_id)
        return {key: (self.holds[peer_id].get(key), dict(self.names[peer_id])) for key in keys}

    async def _store(
        self, peer_id: PeerID, keys: list[DHTID], values: list[bytes], expires: float, subkeys: list[bytes]
    ) -> list[bool] | None:
        if peer_id not in self.names:
            await trio.sleep(SILENT_S)
            return None
        return [self.holds[peer_id].store_subkey(keys[0], subkeys[0], values[0], expires)]


def run_virtual(monkeypatch: pytest.MonkeyPatch, main: Any) -> None:
    async def plainly(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await coroutine

    monkeypatch.setattr(dht_search, "from_asyncio", plainly)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def honest_and_liar() -> Net:
    """Eight honest nodes, and a nearer one that names 20 made-up ones, nearer than all, whose dials hang."""
    honest = {near(1000 + number): peer(number) for number in range(8)}
    liar = {near(100): peer(99)}
    made_up = {near(number): peer(1000 + number) for number in range(20)}
    return Net(honest | liar, dict.fromkeys(honest.values(), honest) | {peer(99): made_up})


def test_a_node_that_names_made_up_ones_hides_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        net, began_s = honest_and_liar(), trio.current_time()
        for number in range(8):
            net.holds[peer(number)].store_subkey(KEY, b"owner %d" % number, b"value", time.time() + 60.0)
        found = await search(net.node, KEY, 5.0)
        assert trio.current_time() - began_s <= 5.0
        assert found.records.keys() == {b"owner %d" % number for number in range(8)}
        # Those of our routing table are asked before those that another one names.
        assert set(found.nodes.values()) == {*map(peer, range(8)), peer(99)}

    run_virtual(monkeypatch, main)


def test_a_peer_is_asked_once_however_many_node_ids_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        liar = {near(number): peer(0) for number in range(1, 20)}
        net = Net({near(100): peer(0), near(101): peer(1)}, {peer(0): liar, peer(1): liar})
        await search(net.node, KEY, 5.0)
        assert sorted(net.asked) == [peer(0), peer(1)]

    run_virtual(monkeypatch, main)


def test_a_peer_that_is_named_under_many_node_ids_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        named = {near(number): peer(9) for number in range(1, 21)} | {near(500): peer(2)}
        net = Net({near(101): peer(1)}, {peer(1): named, peer(2): {}})  # peer 9 is silent
        net.holds[peer(2)].store_subkey(KEY, b"owner", b"value", time.time() + 60.0)
        assert (await search(net.node, KEY, 5.0)).records.keys() == {b"owner"}

    run_virtual(monkeypatch, main)


def test_an_odd_answer_costs_one_answer_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        net = honest_and_liar()
        net.holds[peer(0)].store_subkey(KEY, b"member", b"record", time.time() + 30.0)
        odd = DictionaryDHTValue()
        odd.maxsize = cast(Any, "x")  # hivemind keeps what its sender wrote there
        net.holds[peer(99)].data[KEY] = cast(Any, SimpleNamespace(value=odd, expiration_time=time.time() + 30.0))
        assert (await search(net.node, KEY, 5.0)).records.keys() == {b"member"}
        assert not net.node.blacklist.ban_counter

    run_virtual(monkeypatch, main)


def test_nodes_that_others_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        chain = [(near(1000 - number), peer(number)) for number in range(30)]
        net = Net(dict(chain[:1]), {who: dict(chain[n + 1 : n + 2]) for n, (_, who) in enumerate(chain)})
        net.holds[peer(29)].store_subkey(KEY, b"owner", b"value", time.time() + 60.0)
        found = await search(net.node, KEY, 5.0)
        assert found.records.keys() == {b"owner"}
        assert found.nodes == dict(chain)

    run_virtual(monkeypatch, main)


def test_of_one_owners_records_the_latest_counts() -> None:
    found = Found()
    for value, expires_in_s in ((b"old", 10.0), (b"new", 20.0), (b"older", 5.0)):
        storage = BoundedStorage()
        storage.store_subkey(KEY, b"owner", value, time.time() + expires_in_s)
        found.add(storage.get(KEY))
    assert [value for value, _ in found.records.values()] == [b"new"]


def test_an_announcement_is_stored_on_the_nearest_nodes_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the search for nearer ones was cut short."""

    async def main() -> None:
        net = honest_and_liar()
        directory = HivemindDirectory(SimpleNamespace(key=IDENTITY))  # type: ignore[arg-type]
        with directory.through(net.node, may_be_alone=False):
            assert await directory.announce("run", b"here", 30.0)
            for who in (peer(99), *map(peer, range(4))):
                held = net.holds[who].get(KEY)
                assert held is not None
                assert isinstance(held.value, DictionaryDHTValue)
            assert await directory.lookup("run") == {peer_id_of(IDENTITY.get_public_key()): b"here"}

    run_virtual(monkeypatch, main)


@pytest.mark.parametrize("heard", [0, 3])
def test_a_peer_whose_line_is_down_takes_nothing_for_an_answer(monkeypatch: pytest.MonkeyPatch, heard: int) -> None:
    """Or it would found a second run. Only a peer without initial peers may be alone."""

    async def main() -> None:
        net = Net({near(number): peer(number) for number in range(heard)}, {})
        directory = HivemindDirectory(SimpleNamespace(key=IDENTITY))  # type: ignore[arg-type]
        with directory.through(net.node, may_be_alone=False):
            assert not await directory.announce("run", b"here", 30.0)
            with pytest.raises(PeerLostError, match="no other node"):
                await directory.lookup("run")
        with pytest.raises(PeerLostError, match="no DHT node"):
            await directory.lookup("run")
        with directory.through(net.node, may_be_alone=True):
            assert await directory.announce("run", b"here", 30.0)
            assert list((await directory.lookup("run")).values()) == [b"here"]

    assert dht.SEARCH_TIMEOUT_S > SILENT_S
    run_virtual(monkeypatch, main)
