"""`protocol.transport.Directory` over hivemind's DHT, with records that only their owner can have written.

A record lives under (key, subkey), and its subkey is the owner's RSA public key. hivemind's nodes refuse a record
whose signature does not fit that key; the reader derives the peer id from it, so nobody can sign for another peer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from typing import Any

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import ConfigError, PeerLostError, UnreachableError
from p2ptrain.network._hivemind import (
    P2P,
    DHTNode,
    DHTProtocol,
    DHTRecord,
    MSGPackSerializer,
    Multiaddr,
    PeerID,
    RSAPrivateKey,
    RSAPublicKey,
    RSASignatureValidator,
    dht_pb2,
    get_dht_time,
)
from p2ptrain.network.addresses import by_peer_id
from p2ptrain.network.background import open_background
from p2ptrain.network.bootstrap import DIAL_TIMEOUT_S, connected_peers, dial
from p2ptrain.network.bridge import from_asyncio
from p2ptrain.network.daemon import Daemon
from p2ptrain.network.identity import Identity, peer_id_of

logger = logging.getLogger(__name__)

# A member's addresses and where it stands take a few hundred bytes.
MAX_VALUE_BYTES = 4 * 1024
# The OpenSSH form of an RSA key of 2048 bits has 372 bytes; larger keys only cost us time.
MAX_SUBKEY_BYTES = 1024
# Records are renewed every few seconds to minutes; one that claims to last longer is junk that wants to stay.
MAX_EXPIRES_IN_S = 3600.0
# A node that does not answer holds an operation up for hivemind's 3 s; two in a row, then enough.
OPERATION_TIMEOUT_S = 8.0
NODE_TIMEOUT_S = 3.0
# Half of it is the patience for initial peers that are down; within 25 s everything has to have failed.
JOIN_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 1.0
# hivemind's own bound between two nodes' clocks.
MAX_CLOCK_SKEW_S = 3.0
VERIFIED_RECORDS = 4096
# How soon a split network finds together again, against a dial to a dead address each time.
REJOIN_INTERVAL_S = 15.0
# Whoever has nobody in its DHT asks its own daemon this often whom it is connected with: half a millisecond's work.
ALONE_INTERVAL_S = 1.0


class HivemindDirectory:
    """Announces our record and looks up others', while it works `through` a node of the DHT."""

    def __init__(self, identity: Identity) -> None:
        self._node: DHTNode | None = None
        self._subkey = owner_subkey(identity.key.get_public_key())
        self._last_expiration: dict[str, float] = {}

    @contextlib.contextmanager
    def through(self, node: DHTNode) -> Iterator[None]:
        """Work through a node until the block is left; without one nothing is accepted and nothing found."""
        self._node = node
        try:
            yield
        finally:
            self._node = None

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        """Store our record under `key`, replacing our earlier one.

        Args:
            key: what to find it by.
            value: at most 4 KiB.
            expires_in_s: at most an hour.

        Returns:
            False when no node accepted it within 8 s.
        """
        if self._node is None:
            return False
        assert len(value) <= MAX_VALUE_BYTES
        assert 0 < expires_in_s <= MAX_EXPIRES_IN_S
        # Of two records of one owner, nodes keep the one that expires later.
        expiration = max(get_dht_time() + expires_in_s, self._last_expiration.get(key, 0.0) + 1e-3)
        self._last_expiration[key] = expiration
        with trio.move_on_after(OPERATION_TIMEOUT_S), _unless_it_ends():
            return bool(await from_asyncio(self._node.store(key, value, expiration, subkey=self._subkey)))
        return False

    async def lookup(self, key: str) -> Mapping[str, bytes]:
        """All unexpired records under `key` by the peer that signed them; empty when none is found within 8 s."""
        if self._node is None:
            return {}
        with trio.move_on_after(OPERATION_TIMEOUT_S), _unless_it_ends():
            found = await from_asyncio(self._node.get(key, latest=True))
            if found is not None and isinstance(found.value, dict):
                return _read_records(found.value)
        return {}


@contextlib.contextmanager
def _unless_it_ends() -> Iterator[None]:
    """What hivemind raises when the daemon under it ends is any of half a dozen types; it means: not done."""
    try:
        yield
    except Exception as error:
        logger.debug("an operation of the DHT failed: %r", error)


class OwnedRecords:
    """Tells hivemind's nodes which records to keep: small, soon to expire, and signed by the key in their subkey.

    It is hivemind's `RSASignatureValidator` (whose interface it has), made strict: that one lets pass all records
    without an owner, and a value that is not msgpack would break every lookup of its key.
    """

    def __init__(self, key: RSAPrivateKey) -> None:
        self._signatures = RSASignatureValidator(key)
        # Every lookup meets the same records again, from several nodes; a signature takes 50 µs to check.
        self._is_signed = functools.lru_cache(maxsize=VERIFIED_RECORDS)(self._signatures.validate)

    def validate(self, record: DHTRecord) -> bool:
        try:
            return (
                math.isfinite(record.expiration_time)
                and record.expiration_time <= get_dht_time() + MAX_EXPIRES_IN_S + MAX_CLOCK_SKEW_S
                and len(record.subkey) <= MAX_SUBKEY_BYTES
                and len(record.value) <= 2 * MAX_VALUE_BYTES
                and owner_of(MSGPackSerializer.loads(record.subkey)) is not None
                and _is_value(MSGPackSerializer.loads(self.strip_value(record)))
                and self._is_signed(record)
            )
        except Exception as error:  # bytes from strangers go through parsers of three libraries
            logger.debug("malformed record: %r", error)
            return False

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(self._signatures.sign_value(record))

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(self._signatures.strip_value(record))


def owner_subkey(key: RSAPublicKey) -> bytes:
    """The subkey under which the owner of `key` stores its records."""
    return b"[owner:" + bytes(key.to_bytes()) + b"]"


@functools.lru_cache(maxsize=VERIFIED_RECORDS)
def owner_of(subkey: Any) -> str | None:
    """The peer id of the owner that a subkey names; None when it is anything but `owner_subkey` of some key."""
    if not isinstance(subkey, bytes) or not subkey.startswith(b"[owner:"):
        return None
    key = RSAPublicKey.from_bytes(subkey[len(b"[owner:") : -1])
    return peer_id_of(key) if owner_subkey(key) == subkey else None


@contextlib.asynccontextmanager
async def join_dht(
    daemon: Daemon,
    identity: Identity,
    initial_peers: tuple[str, ...],
    connected: Collection[str],
    chosen: Collection[str],
) -> AsyncIterator[DHTNode]:
    """Take part in the DHT through a running daemon until the block is left. The daemon ends with it.

    Args:
        daemon: ended by our leaving.
        identity: whose key the daemon was started with.
        initial_peers: multiaddrs to come back to when they are lost.
        connected: ids of those initial peers that the daemon is connected with; empty to be the first, or to come
            back through whoever connects with us.
        chosen: ids of the peers that the user chose to join through; those of the others are only remembered.

    Raises:
        ConfigError: no peer that the user chose takes part in the DHT, or our clock differs too much from theirs.
        UnreachableError: none of those that are remembered takes part in the DHT.
        PeerLostError: the daemon does not answer.
    """
    control_path = daemon.control_path
    p2p: P2P | None = None
    node: DHTNode | None = None
    try:
        try:
            with trio.fail_after(JOIN_TIMEOUT_S):
                p2p = await from_asyncio(P2P.replicate(Multiaddr(f"/unix{control_path}")))
                node = await from_asyncio(_create_node(p2p, identity, connected, chosen))
                await _check_clock(node, [peer_id for peer_id in connected if peer_id in chosen])
        except (trio.TooSlowError, OSError, EOFError) as error:
            raise PeerLostError(f"the libp2p daemon does not answer: {error!r}") from None
        async with open_background() as background:
            background.start_soon(_keep_initial_peers, node, control_path, by_peer_id(initial_peers))
            background.start_soon(_stay_joined, node, control_path)
            yield node
    finally:
        with trio.CancelScope(shield=True):
            # A dead one would be waited for in vain.
            if node is not None and not daemon.exited.is_set():
                with trio.move_on_after(LEAVE_TIMEOUT_S), _unless_it_ends():
                    await from_asyncio(node.shutdown())
            if node is not None:
                node.is_alive = False
            if p2p is not None:
                await from_asyncio(p2p.shutdown())


async def _create_node(p2p: P2P, identity: Identity, connected: Collection[str], chosen: Collection[str]) -> DHTNode:
    try:
        return await DHTNode.create(
            p2p,
            initial_peers=[f"/p2p/{peer_id}" for peer_id in connected],
            wait_timeout=NODE_TIMEOUT_S,
            record_validator=OwnedRecords(identity.key),
            # Whether others can reach us is not for the DHT to refuse, and clocks are checked below.
            strict=False,
            # No caches: a new member is to be seen at once, and a key holds all members, not one value.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            # A node that did not answer is asked again after 5 s, not after twice as long each time.
            blacklist_time=5.0,
            backoff_rate=1.0,
        )
    except RuntimeError:  # hivemind's way to say that no initial peer answered
        kind = ConfigError if set(connected) & set(chosen) else UnreachableError
        raise kind(
            f"initial peers {', '.join(connected)} can be reached, but do not answer as part of a DHT; "
            "check that these are addresses that a p2ptrain peer printed"
        ) from None


async def _check_clock(node: DHTNode, connected: Collection[str]) -> None:
    """Compare our clock with that of each initial peer that answers. Raises ConfigError when one differs too much."""
    for peer_id in connected:
        ahead_s = await clock_ahead_s(node.protocol.p2p, peer_id)
        if ahead_s is not None and abs(ahead_s) > MAX_CLOCK_SKEW_S:
            raise ConfigError(
                f"this machine's clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} that of "
                f"initial peer {peer_id}; they may differ by {MAX_CLOCK_SKEW_S:g} s: set the time of both, best by NTP"
            )


async def clock_ahead_s(p2p: P2P, peer_id: str) -> float | None:
    """How many seconds our clock is at least ahead of a peer's (below 0: behind); None when it does not answer."""
    asked = get_dht_time()
    try:
        # The class's own method, below the one of that name that needs a node.
        stub = super(DHTProtocol, DHTProtocol).get_stub(p2p, PeerID.from_base58(peer_id))
        ping = await from_asyncio(stub.rpc_ping(dht_pb2.PingRequest(), timeout=NODE_TIMEOUT_S))
    except Exception as error:  # what hivemind raises is any of half a dozen types
        logger.debug("%s did not answer a ping: %r", peer_id, error)
        return None
    return float(max(asked - ping.dht_time, 0.0) - max(ping.dht_time - get_dht_time(), 0.0))


async def _keep_initial_peers(node: DHTNode, control_path: str, initial_peers: Mapping[str, list[str]]) -> None:
    """Bring lost initial peers back.

    hivemind's node forgets whoever does not answer, and has no way back: after an outage it would stay alone, and the
    halves of a split network would never meet again.
    """
    barrier = ErrorLog(logger).containing("bringing initial peers back")
    while True:
        for peer_id, maddrs in initial_peers.items():
            with barrier, contextlib.suppress(PeerLostError):
                peer = PeerID.from_base58(peer_id)
                if node.protocol.routing_table.get(peer_id=peer) is None:
                    await dial(control_path, peer_id, maddrs, DIAL_TIMEOUT_S)
                    await from_asyncio(node.protocol.call_ping(peer))
        await trio.sleep(REJOIN_INTERVAL_S)


async def _stay_joined(node: DHTNode, control_path: str) -> None:
    """Come back through anyone at all when all are lost: whoever trains with us has linked to us, or we to it."""
    barrier = ErrorLog(logger).containing("coming back into the DHT")
    while True:
        alone = not node.protocol.routing_table.uid_to_peer_id
        if alone:
            with barrier, contextlib.suppress(PeerLostError):
                for peer_id in await connected_peers(control_path):
                    with barrier:
                        await from_asyncio(node.protocol.call_ping(PeerID.from_base58(peer_id)))
        await trio.sleep(ALONE_INTERVAL_S if alone else REJOIN_INTERVAL_S)


def _is_value(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) <= MAX_VALUE_BYTES


def _read_records(found: Mapping[Any, Any]) -> dict[str, bytes]:
    now = get_dht_time()
    records = {}
    for subkey, (value, expiration) in found.items():
        owner = owner_of(subkey)
        if owner is not None and _is_value(value) and expiration > now:
            records[owner] = value
    return records
