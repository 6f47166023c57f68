"""The status of a run's members: those linked with this peer (`describe`), or all that an observer finds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import trio

from p2ptrain.errors import NotAllowedError, P2PTrainError, PeerLostError, WireError
from p2ptrain.protocol.links.limits import MAX_REASON, Struck
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership.directory import directory_of, find_members
from p2ptrain.protocol.membership.lookup import RefusalError, observer_links, refused_by
from p2ptrain.protocol.membership.reachability import Scope, is_public, scope_of
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.messages import MAX_PEER_ID
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import Directory, PeerId, Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A linked peer sends its first heartbeat at once.
FIRST_BEAT_S = 3.0
# A member with a full link may take longer. Its strikes and relayed links are then left out.
LIST_TIMEOUT_S = 2.0
# Usually a peer behind NAT, or one that ended before its record expired.
UNREACHABLE = "cannot be reached from here"
MAX_STRIKES_BYTES = MAX_RELAYED_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another live peer.

    Attributes:
        status: its current activity; "" before its first heartbeat. Safe to print.
        step: its position, in steps of the run.
        round: number of its next round.
        speed: inner steps per second; 0 if unknown.
        rtt_s: round-trip time; 0 if unknown.
    """

    peer_id: PeerId
    status: str
    step: int
    round: int
    speed: float
    rtt_s: float


def describe(links: Iterable[Link]) -> list[PeerStatus]:
    """The status of linked peers, sorted by peer id. Any thread may call it."""

    def status(link: Link) -> PeerStatus:
        if (beat := link.beat) is None:
            return PeerStatus(link.peer_id, "", 0, 0, 0.0, 0.0)
        return PeerStatus(link.peer_id, shown(beat.status), beat.step, beat.round + 1, beat.speed, link.flow.rtt_s)

    return sorted(map(status, links), key=lambda peer: peer.peer_id)


@dataclass(frozen=True)
class MemberInfo:
    """A member's status, as the member reports it. Safe to print.

    Attributes:
        speed: inner steps per second.
        strikes: the peers that it has given strikes, the newest first. Also empty if it did not answer.
        relayed: the members that its bulk bytes reach through a relay (and which), or only through libp2p (""). None if
            it did not answer.
    """

    peer_id: PeerId
    maddrs: tuple[str, ...]
    role: str
    status: str
    step: int
    round: int
    lineage: str
    speed: float
    strikes: tuple[Struck, ...] = ()
    relayed: Mapping[PeerId, PeerId] | None = None


async def list_members(
    transport: Transport,
    directory: Directory,
    run_id: str,
    *,
    chosen: Collection[PeerId] = (),
    closed: ClosedRun | None = None,
) -> list[MemberInfo]:
    """The members of a run that can be reached from here, and those behind NAT that cannot.

    Raises OtherRunError, RunKeyError or NotAllowedError if there are none, and a chosen peer refuses us.
    """
    directory = directory_of(directory, closed, transport.peer_id)
    refused: RefusalError | None = None
    infos: list[MemberInfo] = []

    async def visit(peer_id: PeerId, maddrs: tuple[str, ...], role: str) -> None:
        with trio.move_on_after(2 * FIRST_BEAT_S + LIST_TIMEOUT_S):
            try:
                link = await links.connect(peer_id, list(maddrs))
            except NotAllowedError:
                return
            except P2PTrainError:
                if any(scope_of(maddr) is Scope.NETWORK for maddr in maddrs) and not is_public(maddrs):
                    infos.append(MemberInfo(peer_id, maddrs, role, UNREACHABLE, 0, -1, "", 0.0))
                return
            while link.beat is None and not link.lost.is_set():
                await trio.sleep(0.02)
            if (beat := link.beat) is not None:
                state = shown(beat.status), beat.step, beat.round, shown(beat.lineage), beat.speed
                strikes = await _ask_list(links, link, "strikes", parse_strikes) or ()
                infos.append(MemberInfo(peer_id, maddrs, role, *state, strikes, await ask_relayed(links, link)))

    async with observer_links(transport, run_id, closed) as links:
        members = await find_members(directory, run_id, transport.peer_id)
        if not members:
            await trio.sleep(1.0)
            members = await find_members(directory, run_id, transport.peer_id)
        async with trio.open_nursery() as nursery:
            for peer_id, (maddrs, role) in members.items():
                nursery.start_soon(visit, peer_id, maddrs, role)
        if not infos:
            refused = await refused_by(links, chosen)
    if refused is not None:
        raise refused
    return sorted(infos, key=lambda info: info.peer_id)


async def ask_relayed(links: Links, link: Link) -> dict[PeerId, PeerId] | None:
    """Ask a member for its relayed links (see `MemberInfo.relayed`). None if it does not answer within seconds."""
    return await _ask_list(links, link, "relayed", parse_relayed)


async def _ask_list(links: Links, link: Link, what: str, parse: Callable[[bytes], T]) -> T | None:
    """Ask a member for one of the lists that observers may request. None if it does not answer."""
    try:
        answer, payload = await links.request(link, what, timeout_s=LIST_TIMEOUT_S)
        return parse(payload) if answer.found else None
    except (PeerLostError, WireError) as error:
        logger.debug("no %s from %s: %s", what, link.peer_id, error)
        return None


def parse_strikes(payload: bytes) -> tuple[Struck, ...]:
    """Parse an answer to a request for strikes, and make its texts safe to print. Raises WireError."""
    told = _list_of(payload, list[Struck], "strikes", MAX_STRIKES_BYTES)
    if not all(0 < struck.count < 2**31 and 0 <= struck.age_s < math.inf for struck in told):
        raise WireError("impossible counts or ages of strikes")
    return tuple(
        Struck(shown(struck.peer_id, 128), struck.count, shown(struck.reason, MAX_REASON), struck.age_s)
        for struck in told
    )


def parse_relayed(payload: bytes) -> dict[PeerId, PeerId]:
    """Parse an answer to a request for relayed links, and make it safe to print. Raises WireError."""
    told = _list_of(payload, dict[str, str], "relayed links", MAX_RELAYED_BYTES)
    return {shown(peer_id, MAX_PEER_ID): shown(relay, MAX_PEER_ID) for peer_id, relay in told.items()}


def _list_of(payload: bytes, kind: type[T], what: str, most_bytes: int) -> T:
    if len(payload) > most_bytes:
        raise WireError(f"list of {what} too large")
    try:
        return msgspec.json.decode(payload, type=kind)
    except (ValueError, RecursionError) as error:
        raise WireError(f"bad list of {what}: {error}") from None
