"""`protocol.wire.transport.Directory` over hivemind's DHT, with signed records.

A record is stored under (key, subkey); the subkey is the owner's RSA public key. hivemind's nodes reject records whose
signature does not match that key. Readers derive the peer id from the key, so a peer cannot write for another one.
`OwnedRecords` checks what our node stores for others, and `dht_limits` limits how much, and what other nodes may send.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Collection, Iterator, Mapping

import msgspec
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import ConfigError, PeerLostError, UnreachableError
from p2ptrain.network import _hivemind as hivemind
from p2ptrain.network.addresses import by_peer_id, ways_in
from p2ptrain.network.daemon import DIAL_TIMEOUT_S, Daemon, connections, dial
from p2ptrain.network.dht_limits import (
    MAX_EXPIRES_IN_S,
    MAX_SUBKEY_BYTES,
    MAX_VALUE_BYTES,
    BoundedP2P,
    BoundedRoutingTable,
    BoundedStorage,
)
from p2ptrain.network.dht_search import search, store, unless_it_ends
from p2ptrain.network.identity import Identity, is_allowed, peer_id_of
from p2ptrain.network.thread import from_asyncio, open_background
from p2ptrain.settings.peer_config import NetworkConfig

logger = logging.getLogger(__name__)

NODE_TIMEOUT_S = 3.0
# A search uses what has arrived by then: a silent node leaves others 2 s. Storing a record takes NODE_TIMEOUT_S more.
SEARCH_TIMEOUT_S = 5.0
# An initial peer answers our first ping after it has pinged us back, which may take it NODE_TIMEOUT_S. 8 s is a guess.
FIRST_ANSWER_S = 8.0
# After the first answer come a search of LATE_SEARCH_S and the clocks of initial peers; the rest is for a busy machine.
# Dialling takes up to 10 s before this, and an error is due within 25 s.
JOIN_TIMEOUT_S = FIRST_ANSWER_S + 2 * NODE_TIMEOUT_S
LEAVE_TIMEOUT_S = 1.0
# How long we look for the nodes nearest to ours if initial peers answer late; the first lookup finds more of them.
LATE_SEARCH_S = 1.0
# hivemind's own bound between two nodes' clocks.
MAX_CLOCK_SKEW_S = 3.0
VERIFIED_RECORDS = 4096
# How often lost initial peers are dialled, so that a split network reconnects; their addresses may be dead.
# Each dead one takes DIAL_TIMEOUT_S, and a peer that was restarted remembers up to 64.
REJOIN_INTERVAL_S, REJOINED_AT_ONCE = 15.0, 16
# How often a node with an empty routing table asks its daemon for connected peers, which takes half a millisecond.
ALONE_INTERVAL_S = 1.0


class HivemindDirectory:
    """Announces our record, and looks up those of other peers, through the present DHT node."""

    def __init__(self, identity: Identity) -> None:
        self._node: hivemind.DHTNode | None = None
        self._may_be_alone = False
        self._subkey = owner_subkey(identity.key.get_public_key())
        self._last_expiration: dict[str, float] = {}

    @contextlib.contextmanager
    def through(self, node: hivemind.DHTNode, *, may_be_alone: bool) -> Iterator[None]:
        """Use a node until the block ends. Without a node, announcing fails and lookups raise.

        `may_be_alone`: whether our node may be the only one. Else its own answer counts only beside another's: our line
        may be down.
        """
        self._node, self._may_be_alone = node, may_be_alone
        try:
            yield
        finally:
            self._node = None

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        """Store our record under `key`, replacing our earlier one; False if no node accepts it within 8 s.

        `value` has at most 4 KiB, and `expires_in_s` is at most 120.
        """
        node, may_be_alone = self._node, self._may_be_alone
        if node is None:
            return False
        assert len(value) <= MAX_VALUE_BYTES
        assert 0 < expires_in_s <= MAX_EXPIRES_IN_S
        # Of two records of one owner, nodes keep the one that expires later.
        now, last = hivemind.get_dht_time(), self._last_expiration.get(key, 0.0)
        if last > now + MAX_EXPIRES_IN_S:
            last = 0.0  # our clock was ahead, and other nodes have refused that record
        expires = max(now + expires_in_s, last + 1e-3)
        self._last_expiration[key] = expires
        key_id = hivemind.DHTID.generate(key)
        found = await search(node, key_id, SEARCH_TIMEOUT_S)
        accepted = await store(node, key_id, self._subkey, value, expires, found.nodes)
        return any(is_stored for node_id, is_stored in accepted.items() if may_be_alone or node_id != node.node_id)

    async def lookup(self, key: str) -> Mapping[str, bytes]:
        """Unexpired records under `key`, by signing peer: those that arrive within 5 s.

        Raises PeerLostError if no other node answers, unless our node may be alone.
        """
        node, may_be_alone = self._node, self._may_be_alone
        if node is None:
            raise PeerLostError("there is no DHT node now")
        key_id = hivemind.DHTID.generate(key)
        found = await search(node, key_id, SEARCH_TIMEOUT_S)
        if not found.nodes and not may_be_alone:
            raise PeerLostError("no other node of the DHT answers")
        now, values = hivemind.get_dht_time(), dict[str, bytes]()
        for subkey, (signed, expires) in found.records.items():
            record = hivemind.DHTRecord(key_id.to_bytes(), hivemind.MSGPackSerializer.dumps(subkey), signed, expires)
            value = node.protocol.record_validator.strip_value(record)
            if (owner := owner_of(subkey)) is not None and expires > now:
                values[owner] = msgspec.msgpack.decode(value, type=bytes)
        return values


class OwnedRecords:
    """Record validator for hivemind's nodes: records must be small, short-lived and signed by the key in their subkey.

    Stricter than hivemind's `RSASignatureValidator`, whose interface it has: that one accepts records without an owner
    and values that are not msgpack, which break every lookup of their key.
    """

    def __init__(self, key: hivemind.RSAPrivateKey) -> None:
        self._signatures = hivemind.RSASignatureValidator(key)
        # Lookups return the same records again, from several nodes.
        self._is_signed = functools.lru_cache(maxsize=VERIFIED_RECORDS)(self._signatures.validate)

    def validate(self, record: hivemind.DHTRecord) -> bool:
        try:
            return (
                math.isfinite(record.expiration_time)
                and record.expiration_time <= hivemind.get_dht_time() + MAX_EXPIRES_IN_S + MAX_CLOCK_SKEW_S
                and len(record.subkey) <= MAX_SUBKEY_BYTES
                and len(record.value) <= 2 * MAX_VALUE_BYTES
                # hivemind searches for the end of each to the end of the value.
                and record.value.count(b"[signature:") == 1
                and owner_of(msgspec.msgpack.decode(record.subkey, type=bytes)) is not None
                and len(msgspec.msgpack.decode(self.strip_value(record), type=bytes)) <= MAX_VALUE_BYTES
                and self._is_signed(record)
            )
        except Exception as error:  # untrusted bytes, parsed by three libraries
            logger.debug("malformed record: %r", error)
            return False

    def sign_value(self, record: hivemind.DHTRecord) -> bytes:
        return bytes(self._signatures.sign_value(record))

    def strip_value(self, record: hivemind.DHTRecord) -> bytes:
        return bytes(self._signatures.strip_value(record))


def owner_subkey(key: hivemind.RSAPublicKey) -> bytes:
    """The subkey under which the owner of `key` stores its records."""
    return b"[owner:" + bytes(key.to_bytes()) + b"]"


@functools.lru_cache(maxsize=VERIFIED_RECORDS)
def owner_of(subkey: bytes) -> str | None:
    """The peer id of a subkey's owner; None if it is not the `owner_subkey` of an allowed key."""
    if not subkey.startswith(b"[owner:"):
        return None
    key = hivemind.RSAPublicKey.from_bytes(subkey[len(b"[owner:") : -1])
    if not is_allowed(key._public_key):
        return None
    return peer_id_of(key) if owner_subkey(key) == subkey else None


@contextlib.asynccontextmanager
async def join_dht(
    daemon: Daemon, identity: Identity, config: NetworkConfig, connected: Collection[str]
) -> AsyncIterator[hivemind.DHTNode]:
    """Take part in the DHT through a running daemon until the block ends. This also ends the daemon.

    Args:
        identity: signs our records; the daemon's too.
        config: its initial and remembered peers are dialled again when they are lost.
        connected: ids of the peers to join through, which the daemon is connected to. Empty for the first peer of a
            network, or to wait until a peer connects.

    Raises:
        ConfigError: no peer that the user gave answers in the DHT, or our clock differs too much from theirs.
        UnreachableError: no remembered peer answers in the DHT.
        PeerLostError: the daemon does not answer.
    """
    control_path, chosen = daemon.control_path, by_peer_id(config.initial_peers)
    p2p: BoundedP2P | None = None
    node: hivemind.DHTNode | None = None
    try:
        try:
            with trio.fail_after(JOIN_TIMEOUT_S):
                p2p = await from_asyncio(BoundedP2P.replicate(hivemind.Multiaddr(f"/unix{control_path}")))
                node = await _create_node(p2p, identity, connected, chosen)
                await _check_clock(node, [peer_id for peer_id in connected if peer_id in chosen])
        except (trio.TooSlowError, OSError, EOFError) as error:
            raise PeerLostError(f"the libp2p daemon does not answer: {error!r}") from None
        async with open_background() as background:
            background.start_soon(_keep_initial_peers, node, control_path, by_peer_id(ways_in(config)))
            background.start_soon(_stay_joined, node, control_path)
            yield node
    finally:
        with trio.CancelScope(shield=True):
            # A node on a dead daemon would not answer.
            if node is not None and not daemon.exited.is_set():
                with trio.move_on_after(LEAVE_TIMEOUT_S), unless_it_ends():
                    await from_asyncio(node.shutdown())
            if node is not None:
                node.is_alive = False
            if p2p is not None:
                await from_asyncio(p2p.shutdown())


async def _create_node(
    p2p: BoundedP2P, identity: Identity, connected: Collection[str], chosen: Collection[str]
) -> hivemind.DHTNode:
    # hivemind would enter the DHT by a search without bounds, and before there are limits on what the node stores.
    creating = hivemind.DHTNode.create(
        p2p,
        wait_timeout=FIRST_ANSWER_S,
        record_validator=OwnedRecords(identity.key),
        # No caches: new members must be visible at once, and a key holds all members, not one value.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        reuse_get_requests=False,
        # Ask a silent node again every 5 s, without exponential backoff.
        blacklist_time=5.0,
        backoff_rate=1.0,
    )
    node = await from_asyncio(creating)
    _bound(node)
    entered_by_s = trio.current_time() + NODE_TIMEOUT_S
    if connected and not await _is_answered(node, connected, entered_by_s):
        kind = ConfigError if set(connected) & set(chosen) else UnreachableError
        raise kind(
            f"initial peers {', '.join(connected)} can be reached, but do not answer as part of a DHT; "
            "check that a p2ptrain peer printed these addresses"
        )
    node.protocol.wait_timeout = NODE_TIMEOUT_S
    await search(node, node.node_id, max(LATE_SEARCH_S, entered_by_s - trio.current_time()))
    return node


async def _is_answered(node: hivemind.DHTNode, connected: Collection[str], until_s: float) -> bool:
    """Ping the connected peers, and return whether one answers. Once one has, wait for others until `until_s`.

    They add our node to their routing tables if they can ping it, too.
    """
    is_answered = False

    async def ping(peer_id: str) -> None:
        nonlocal is_answered
        with unless_it_ends():
            peer = hivemind.PeerID.from_base58(peer_id)
            # Not strict: peers that cannot be dialled may take part too, and clocks are checked later.
            if await from_asyncio(node.protocol.call_ping(peer, validate=True, strict=False)) is not None:
                is_answered = True
                nursery.cancel_scope.deadline = max(trio.current_time(), until_s)

    async with trio.open_nursery() as nursery:
        for peer_id in connected:
            nursery.start_soon(ping, peer_id)
    return is_answered


def _bound(node: hivemind.DHTNode) -> None:
    """Replace the storage and the routing table of a new node by bounded ones."""
    table = node.protocol.routing_table
    node.protocol.routing_table = BoundedRoutingTable(table.node_id, table.bucket_size, table.depth_modulo)
    node.protocol.storage = BoundedStorage()


async def _check_clock(node: hivemind.DHTNode, connected: Collection[str]) -> None:
    """Compare our clock with those of the initial peers. Raises ConfigError if one differs too much."""
    found: dict[str, float | None] = {}

    async def compare(peer_id: str) -> None:
        found[peer_id] = await clock_ahead_s(node.protocol.p2p, peer_id)

    async with trio.open_nursery() as nursery:
        for peer_id in connected:
            nursery.start_soon(compare, peer_id)
    for peer_id, ahead_s in found.items():
        if ahead_s is not None and abs(ahead_s) > MAX_CLOCK_SKEW_S:
            raise ConfigError(
                f"this machine's clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} that of "
                f"initial peer {peer_id}; at most {MAX_CLOCK_SKEW_S:g} s are allowed: set both clocks, best by NTP"
            )


async def clock_ahead_s(p2p: hivemind.P2P, peer_id: str) -> float | None:
    """Seconds that our clock is at least ahead of a peer's (negative: behind); None without an answer."""
    asked = hivemind.get_dht_time()
    try:
        # The base class's method: the override needs a node.
        stub = super(hivemind.DHTProtocol, hivemind.DHTProtocol).get_stub(p2p, hivemind.PeerID.from_base58(peer_id))
        ping = await from_asyncio(stub.rpc_ping(hivemind.dht_pb2.PingRequest(), timeout=NODE_TIMEOUT_S))
    except Exception as error:  # hivemind raises one of many types
        logger.debug("%s did not answer a ping: %r", peer_id, error)
        return None
    return float(max(asked - ping.dht_time, 0.0) - max(ping.dht_time - hivemind.get_dht_time(), 0.0))


async def _keep_initial_peers(
    node: hivemind.DHTNode, control_path: str, initial_peers: Mapping[str, list[str]]
) -> None:
    """Reconnect lost initial peers.

    hivemind's node forgets peers that do not answer, and never dials them again. It would stay alone after an outage,
    and a split network would never become one again.
    """
    errors, limit = ErrorLog(logger), trio.CapacityLimiter(REJOINED_AT_ONCE)

    async def reconnect(peer_id: str, maddrs: list[str]) -> None:
        async with limit:
            with errors.containing("reconnecting initial peers"), contextlib.suppress(PeerLostError):
                peer = hivemind.PeerID.from_base58(peer_id)
                if node.protocol.routing_table.get(peer_id=peer) is None:
                    await dial(control_path, peer_id, maddrs, DIAL_TIMEOUT_S)
                    await from_asyncio(node.protocol.call_ping(peer))

    while True:
        async with trio.open_nursery() as nursery:
            for peer_id, maddrs in initial_peers.items():
                nursery.start_soon(reconnect, peer_id, maddrs)
        await trio.sleep(REJOIN_INTERVAL_S)


async def _stay_joined(node: hivemind.DHTNode, control_path: str) -> None:
    """When the routing table is empty, rejoin through any connected peer."""
    errors = ErrorLog(logger)
    while True:
        alone = not node.protocol.routing_table.uid_to_peer_id
        if alone:
            with errors.containing("rejoining the DHT"), contextlib.suppress(PeerLostError):
                for peer_id in dict(await connections(control_path, DIAL_TIMEOUT_S)):
                    with errors.containing("rejoining the DHT"):
                        await from_asyncio(node.protocol.call_ping(hivemind.PeerID.from_base58(peer_id)))
        await trio.sleep(ALONE_INTERVAL_S if alone else REJOIN_INTERVAL_S)
