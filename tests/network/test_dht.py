"""The directory over real DHT nodes, and the records that they accept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht import DHTID

from p2ptrain.errors import ConfigError, PeerLostError, UnreachableError
from p2ptrain.network import dht, dht_limits
from p2ptrain.network._hivemind import DHTRecord, MSGPackSerializer, PeerID, RSAPrivateKey
from p2ptrain.network.dht import OwnedRecords, owner_of, owner_subkey
from p2ptrain.network.dht_limits import MAX_EXPIRES_IN_S, MAX_VALUE_BYTES
from p2ptrain.network.host import open_network
from p2ptrain.network.identity import peer_id_of
from p2ptrain.network.thread import from_asyncio
from p2ptrain.protocol.membership.directory import RECORD_TTL_S
from tests.network.local import config, keep_open, open_pair
from tests.network.test_dht_limits import nested, node_of

pytestmark = pytest.mark.processes

Run = Callable[..., Any]


def test_records_of_all_are_seen_by_all(run: Run) -> None:
    async def main() -> None:
        async with open_pair() as (first, second), open_network(config(first)) as third:
            networks = (first, second, third)
            assert await third.directory.lookup("run") == {}
            for index, network in enumerate(networks):
                assert await network.directory.announce("run", bytes([index]) * 500, 30.0)
            expected = {network.peer_id: bytes([index]) * 500 for index, network in enumerate(networks)}
            for network in networks:
                assert await network.directory.lookup("run") == expected
            # A later record replaces the earlier one at once, also when it expires sooner.
            assert await second.directory.announce("run", b"new", 5.0)
            for network in networks:
                assert (await network.directory.lookup("run"))[second.peer_id] == b"new"
            assert await first.directory.lookup("another run") == {}

    run(main)


def test_a_stranger_that_floods_a_key_displaces_no_record(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_limits, "MAX_RECORDS", 2)

    async def main() -> None:
        async with open_pair() as (first, second), open_network(config(first)) as late:
            assert await first.directory.announce("run", b"1", 30.0)
            assert await second.directory.announce("run", b"2", 30.0)
            assert not await late.directory.announce("run", b"3", MAX_EXPIRES_IN_S)
            assert await first.directory.announce("run", b"still 1", 31.0)
            expected = {first.peer_id: b"still 1", second.peer_id: b"2"}
            assert await second.directory.lookup("run") == expected

    run(main)


def test_a_peer_alone_finds_its_own_record_until_it_expires(run: Run) -> None:
    async def main() -> None:
        async with open_network(config()) as network:
            # On a busy machine it may have expired before it is looked up.
            while await network.directory.lookup("run") != {network.peer_id: b"alone"}:
                assert await network.directory.announce("run", b"alone", 0.3)
            while await network.directory.lookup("run") != {}:
                await trio.sleep(0.05)

    run(main)


def test_a_record_for_the_cache_hides_no_members(run: Run) -> None:
    """hivemind's nodes would return it instead of the members', as it expires later."""

    async def main() -> None:
        async with open_pair() as (victim, attacker):
            assert await victim.directory.announce("run", b"member", 30.0)
            protocol, subkey = node_of(attacker).protocol, attacker.directory._subkey
            key, later, peer = DHTID.generate("run"), time.time() + 100.0, PeerID.from_base58(victim.peer_id)
            value = MSGPackSerializer.dumps(b"stranger")
            record = DHTRecord(key.to_bytes(), MSGPackSerializer.dumps(subkey), value, later)
            signed = protocol.record_validator.sign_value(record)
            stored = protocol.call_store(peer, [key], [signed], later, subkeys=[subkey], in_cache=True)
            assert await from_asyncio(stored) is None
            assert await victim.directory.lookup("run") == {victim.peer_id: b"member"}

    run(main)


def test_a_node_hands_nothing_to_one_that_it_meets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_network(config()) as first:
            assert await first.directory.announce("run", b"member", 30.0)
            stored = Mock()
            monkeypatch.setattr(dht.hivemind.DHTProtocol, "call_store", stored)
            async with open_network(config(first)) as second:
                while not node_of(first).protocol.routing_table.uid_to_peer_id:
                    await trio.sleep(0.01)
                assert await second.directory.lookup("run") == {first.peer_id: b"member"}
            assert not stored.called

    run(main)


def test_forged_and_unowned_records_are_refused(run: Run) -> None:
    async def main() -> None:
        async with open_pair() as (victim, attacker), open_network(config(victim)) as reader:
            assert await victim.directory.announce("run", b"true", 30.0)
            protocol = attacker.directory._node.protocol
            key, subkey, later = DHTID.generate("run"), victim.directory._subkey, time.time() + 60.0
            signed = attacker.directory._node.protocol.record_validator.sign_value
            false = MSGPackSerializer.dumps(b"false")
            forged = signed(
                DHTRecord(key.to_bytes(), MSGPackSerializer.dumps(attacker.directory._subkey), false, later)
            )
            for other in (victim, reader):
                peer = PeerID.from_base58(other.peer_id)
                for given_subkey, value in ((subkey, false), (subkey, forged), (None, false), (b"anyone", false)):
                    answer = protocol.call_store(peer, [key], [value], later, subkeys=[given_subkey])
                    assert await from_asyncio(answer) == [False]
            # Readers reject it even if a node serves it.
            protocol.storage.store_subkey(key, subkey, forged, later)
            assert await reader.directory.lookup("run") == {victim.peer_id: b"true"}

    run(main)


def test_the_others_stay_together_when_the_first_peer_leaves(run: Run) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            first, close_first = await nursery.start(keep_open, config())
            async with open_network(config(first)) as second, open_network(config(first)) as third:
                await close_first()
                assert await second.directory.announce("run", b"2", 30.0)
                assert await third.directory.announce("run", b"3", 30.0)
                expected = {second.peer_id: b"2", third.peer_id: b"3"}
                assert await second.directory.lookup("run") == expected
                assert await third.directory.lookup("run") == expected

    run(main)


def test_dead_initial_peers_delay_none_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, tried = [f"dead {number}" for number in range(15)], list[float]()

    async def dial(control_path: str, peer_id: str, maddrs: list[str], timeout_s: float) -> None:
        if peer_id == "living":
            tried.append(trio.current_time())
        await trio.sleep(timeout_s)
        raise PeerLostError("cannot be reached")

    async def main() -> None:
        began_s = trio.current_time()
        with trio.move_on_after(60.0):
            await dht._keep_initial_peers(Mock(**{"protocol.routing_table.get.return_value": None}), "", initial_peers)
        assert [time - began_s for time in tried] == pytest.approx([0, 25, 50])

    initial_peers: dict[str, list[str]] = {peer_id: [] for peer_id in [*dead, "living"]}
    monkeypatch.setattr(dht, "dial", dial)
    monkeypatch.setattr(dht.hivemind, "PeerID", Mock())
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_an_initial_peer_that_comes_back_is_found_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dht, "REJOIN_INTERVAL_S", 0.2)
    identity = str(tmp_path / "first.key")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            first, close_first = await nursery.start(keep_open, config(identity=identity))
            address = first.maddrs[0].rpartition("/p2p/")[0]
            async with open_network(config(first)) as second:
                await close_first()
                with pytest.raises(PeerLostError, match="no other node"):
                    await second.directory.lookup("run")
                again = config(identity=identity, host_maddrs=(address,))
                first, close_first = await nursery.start(keep_open, again)
                assert await first.directory.announce("run", b"back", 30.0)
                found: Mapping[str, bytes] = {}
                while found != {first.peer_id: b"back"}:
                    with contextlib.suppress(PeerLostError):
                        found = await second.directory.lookup("run")
                    await trio.sleep(0.05)
                await close_first()

    run(main)


@pytest.mark.parametrize("lost", ["one", "all"])
def test_an_exception_while_peers_are_brought_back_costs_that_time_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    monkeypatch.setattr(dht, "REJOIN_INTERVAL_S", 0.05)
    monkeypatch.setattr(dht, "ALONE_INTERVAL_S", 0.05)

    async def main() -> None:
        async with open_network(config()) as first, open_network(config(first)) as second:
            # One has an initial peer to reconnect, the other only connected peers.
            forgetful, other = (second, first) if lost == "one" else (first, second)
            node, peer = forgetful.directory._node, PeerID.from_base58(other.peer_id)
            assert node is not None
            ping, pings = node.protocol.call_ping, 0

            async def broken(peer: PeerID, **options: Any) -> Any:
                nonlocal pings
                pings += 1
                if pings < 3:
                    raise AssertionError("a node id that is none")
                return await ping(peer, **options)

            node.protocol.call_ping = broken
            table = node.protocol.routing_table
            # A ping that began before it was replaced, and still is under way, may bring the other peer back, too.
            while pings < 3:
                if (uid := table.peer_id_to_uid.get(peer)) is not None:
                    del table[uid]
                await trio.sleep(0.01)
            while table.get(peer_id=peer) is None:
                await trio.sleep(0.01)

    run(main)
    # Once for each of the two loops.
    assert 1 <= caplog.text.count("AssertionError: a node id that is none") <= 2


def test_clock_that_differs_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(offset_s: float, word: str) -> None:
        async with open_network(config()) as first:
            monkeypatch.setattr(dht.hivemind, "get_dht_time", lambda: time.time() + offset_s)
            with pytest.raises(ConfigError, match=rf"clock is \d+\.\d s {word} .*{first.peer_id}.*NTP"):
                async with open_network(config(first)):
                    pass

    run(main, 7.0, "ahead of")
    run(main, -7.0, "behind")


def test_peers_that_the_user_did_not_choose_keep_no_peer_from_starting(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remembered peers may report any time, or take no part in a DHT."""

    async def main() -> None:
        async with open_network(config()) as first:
            others = config(remembered_peers=tuple(first.maddrs))
            monkeypatch.setattr(dht.hivemind, "get_dht_time", lambda: time.time() + 7)
            async with open_network(others):
                pass
            monkeypatch.undo()
            async with open_network(others) as second:
                assert await second.directory.announce("run", b"here", 10.0)
                assert await first.directory.lookup("run") == {second.peer_id: b"here"}

            async def nobody_answers(*_: Any, **__: Any) -> None:
                await asyncio.sleep(0)

            monkeypatch.setattr(dht.hivemind.DHTProtocol, "call_ping", nobody_answers)
            with pytest.raises(UnreachableError, match="do not answer as part of a DHT"):
                async with open_network(others):
                    pass
            with pytest.raises(ConfigError, match="do not answer as part of a DHT") as caught:
                async with open_network(config(first)):
                    pass
            assert not isinstance(caught.value, UnreachableError)

    run(main)


def test_initial_peers_that_answer_as_late_as_they_may_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the DHT, and then for their clocks."""
    peers = [PeerID(bytes([18, 32, *[0] * 31, number])).to_base58() for number in range(8)]
    given = config(initial_peers=tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}" for peer_id in peers))

    async def late_node(*_: Any) -> Mock:
        await trio.sleep(dht.FIRST_ANSWER_S)
        return Mock()

    async def late_clock(*_: Any) -> None:
        await trio.sleep(dht.NODE_TIMEOUT_S)

    async def main() -> None:
        async with dht.join_dht(Mock(control_path="/p2pd.sock"), Mock(), given, peers):
            pass

    monkeypatch.setattr(dht, "from_asyncio", lambda coroutine: coroutine)
    monkeypatch.setattr(dht.hivemind.P2P, "replicate", AsyncMock())
    monkeypatch.setattr(dht, "_create_node", late_node)
    monkeypatch.setattr(dht, "clock_ahead_s", late_clock)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_node_has_its_limits_before_it_enters_the_dht(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with open_network(config()) as first:
            tables = []
            ping = dht.hivemind.DHTProtocol.call_ping

            async def observed(self: Any, *args: Any, **options: Any) -> Any:
                tables.append((type(self.storage), type(self.routing_table)))
                return await ping(self, *args, **options)

            async def endless(*_: Any, **__: Any) -> None:
                raise AssertionError("a search without bounds")

            monkeypatch.setattr(dht.hivemind.DHTProtocol, "call_ping", observed)
            monkeypatch.setattr(dht.hivemind.DHTNode, "find_nearest_nodes", endless)
            async with open_network(config(first)) as second:
                assert set(tables) == {(dht_limits.BoundedStorage, dht_limits.BoundedRoutingTable)}
                assert await second.directory.lookup("run") == {}

    run(main)


@pytest.mark.slow
def test_an_initial_peer_may_answer_the_first_ping_late(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pings back first, and on a link that loses packets either way may take as long as an operation may."""

    async def main() -> None:
        async with open_network(config()) as first:
            answer = dht.hivemind.DHTProtocol.rpc_ping

            async def answer_late(self: Any, *args: Any) -> Any:
                answered = await answer(self, *args)
                await asyncio.sleep(2 * dht.NODE_TIMEOUT_S)
                return answered

            monkeypatch.setattr(dht, "NODE_TIMEOUT_S", 0.2)
            monkeypatch.setattr(dht.hivemind.DHTProtocol, "rpc_ping", answer_late)
            async with open_network(config(first)) as second:
                assert second.directory._node is not None
                assert second.directory._node.protocol.wait_timeout == dht.NODE_TIMEOUT_S

    run(main)


KEY = RSAPrivateKey()
VALIDATOR = OwnedRecords(KEY)


SHORT_KEY = RSAPrivateKey()
SHORT_KEY._private_key = rsa.generate_private_key(public_exponent=65537, key_size=1024)


def signed(
    value: Any = b"value", *, subkey: Any = None, expires_in_s: float = 30.0, key: RSAPrivateKey = KEY
) -> DHTRecord:
    """A record as hivemind's nodes exchange it, signed with a key."""
    record = DHTRecord(
        b"k" * 20,
        MSGPackSerializer.dumps(owner_subkey(key.get_public_key()) if subkey is None else subkey),
        MSGPackSerializer.dumps(value),
        time.time() + expires_in_s,
    )
    return dataclasses.replace(record, value=OwnedRecords(key).sign_value(record))


def test_own_record_is_valid_and_names_its_owner() -> None:
    record = signed()
    assert VALIDATOR.validate(record)
    assert OwnedRecords(RSAPrivateKey()).validate(record)
    assert MSGPackSerializer.loads(VALIDATOR.strip_value(record)) == b"value"
    assert owner_of(owner_subkey(KEY.get_public_key())) == peer_id_of(KEY.get_public_key())


def test_records_that_are_dropped() -> None:
    other = owner_subkey(RSAPrivateKey().get_public_key())
    ours = owner_subkey(KEY.get_public_key())
    good = signed()
    nested_value = dataclasses.replace(good, value=nested(0x50, 900))
    nested_value = dataclasses.replace(nested_value, value=OwnedRecords(KEY).sign_value(nested_value))
    bad = {
        "value changed": dataclasses.replace(good, value=good.value.replace(b"value", b"VALUE")),
        "key changed": dataclasses.replace(good, key=b"K" * 20),
        "expiry changed": dataclasses.replace(good, expiration_time=good.expiration_time + 1.0),
        "another's subkey": dataclasses.replace(good, subkey=MSGPackSerializer.dumps(other)),
        "no signature": dataclasses.replace(good, value=VALIDATOR.strip_value(good)),
        "two signatures": dataclasses.replace(good, value=good.value + b"[signature:"),
        "a key that is made fast": signed(key=SHORT_KEY),
        "no owner": signed(subkey=b"anyone"),
        "regular value": dataclasses.replace(good, subkey=MSGPackSerializer.dumps(None)),
        "text subkey": signed(subkey=ours.decode()),
        "more than the owner": signed(subkey=ours + b"2"),
        "list subkey": signed(subkey=[ours]),
        # hivemind's msgpack ends the process when it unpacks these.
        "nested subkey": dataclasses.replace(good, subkey=nested(0x40, 300)),
        "nested value": nested_value,
        "too large": signed(bytes(MAX_VALUE_BYTES + 1)),
        "not bytes": signed("text"),
        "not msgpack": dataclasses.replace(good, value=b"\xc1"),
        "for too long": signed(expires_in_s=150.0),
        "not a time": dataclasses.replace(good, expiration_time=float("nan")),
        "subkey not bytes": dataclasses.replace(good, subkey="text"),
        "value not bytes": dataclasses.replace(good, value=None),
    }
    assert [name for name, record in bad.items() if VALIDATOR.validate(record)] == []
    assert VALIDATOR.validate(signed(bytes(MAX_VALUE_BYTES)))
    assert VALIDATOR.validate(signed(expires_in_s=MAX_EXPIRES_IN_S))
    assert RECORD_TTL_S <= MAX_EXPIRES_IN_S
