"""Asks the members of a run for its settings and their status, as an observer.

An observer sends a Hello with an empty digest. It receives heartbeats and answers, but is not a member.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import (
    ConfigError,
    NotAllowedError,
    P2PTrainError,
    PeerLostError,
    RunKeyError,
    RunMismatchError,
    UnreachableError,
    WireError,
)
from p2ptrain.protocol.links.handshake import OBSERVER, TRAINER, Admission
from p2ptrain.protocol.links.limits import MAX_REASON, Struck
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership.directory import BUCKETS, bucket_of, decode_record, directory_of, member_key
from p2ptrain.protocol.membership.neighbours import DIALLED_AT_ONCE, FIRST_DIAL_S
from p2ptrain.protocol.membership.reachability import Scope, is_public, scope_of
from p2ptrain.protocol.membership.settings_answers import SettingsAnswers
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.messages import MAX_PEER_ID, Beat, Hello, Message
from p2ptrain.protocol.wire.text import shown
from p2ptrain.protocol.wire.transport import Directory, PeerId, Refusal, Transport, no_refusal
from p2ptrain.settings.config import RunConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

# New records are found within about a second; after this long without any, the run is assumed not to exist.
LOOK_S = 2.0
# A linked peer sends its first heartbeat at once.
FIRST_BEAT_S = 3.0
MAX_SETTINGS_BYTES = 64 * 1024
# A member with a full link may take long; its strikes and relayed links are left out then.
LIST_TIMEOUT_S = 2.0
MAX_STRIKES_BYTES = MAX_RELAYED_BYTES = 64 * 1024
# Usually a peer behind NAT, or one that ended before its record expired.
UNREACHABLE = "cannot be reached from here"
# To open a stream to an initial peer, and to exchange two frames. A bootstrap node of an earlier version never answers.
ASK_KEY_S = 2.5
# Initial peers asked whether they have our run key, if no member is found.
MAX_ASKED_KEY = 8
# A joiner gives up after this long if it could not ask all announced peers: there may be thousands of made-up ones.
MAX_LOOK_S = 120.0

# Addresses and role of announced members.
Members = dict[PeerId, tuple[tuple[str, ...], str]]


@dataclass(frozen=True)
class MemberInfo:
    """A member's status, as it reports it, safe to print. `speed` is in inner steps per second.

    `strikes`: whom it has struck, the newest first; empty, too, if it did not answer. `relayed`: the members that its
    bulk bytes reach through a relay, and which one, or ("") through libp2p alone; None if it did not answer.
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


async def ask_settings(
    transport: Transport,
    directory: Directory,
    run_id: str,
    *,
    timeout_s: float,
    rng: random.Random,
    chosen: Collection[PeerId] = (),
    closed: ClosedRun | None = None,
    refusal: Refusal = no_refusal,
    ours: RunConfig | None = None,
    fits: Callable[[RunConfig], bool] = lambda run: True,
) -> RunConfig | None:
    """The settings of a live run, from its members; None if no member can be reached in time.

    The initial peers are asked first, then all others in random order. The time is extended while members have not been
    asked yet: a peer that gave up would start a run of its own beside theirs.

    Args:
        rng: draws the order.
        chosen: ids of the initial peers that the user gave. Their answers take precedence.
        closed: the run and its key; None if the user gave no key.
        refusal: why the user refuses a peer; such peers are not asked.
        ours: known settings of this run; only a chosen member may change them.
        fits: whether settings agree with those that the user gave. Others are used only if no member has fitting ones.

    Raises:
        ConfigError: this version of p2ptrain cannot use the settings of a chosen member. Those of other members are
            skipped.
        RunKeyError: no member was found, and a chosen peer has another run key than we do.
        NotAllowedError: no member was found, and a chosen peer refuses us by its user's list.
        UnreachableError: more peers are announced than could be asked within two minutes.
    """
    directory = directory_of(directory, closed, transport.peer_id)
    refused: RunKeyError | NotAllowedError | None = None
    answers = SettingsAnswers(chosen, ours, fits)
    # The network layer has the addresses of initial peers; their records may be missing among too many.
    initial: Members = {peer_id: ((), TRAINER) for peer_id in chosen if peer_id != transport.peer_id}
    found: Members = {}
    members: Members = initial
    asking: set[PeerId] = set()
    cut_short: set[PeerId] = set()
    errors = ErrorLog(logger)

    async def ask(peer_id: PeerId, maddrs: tuple[str, ...], dial_s: float) -> None:
        nonlocal refused
        try:
            with trio.move_on_after(dial_s) as scope:
                link = await links.connect(peer_id, list(maddrs))
            if scope.cancelled_caught:
                cut_short.add(peer_id)
                return
            _, payload = await links.request(link, "settings", timeout_s=timeout_s)
            told: RunConfig | ConfigError = _parse_settings(peer_id, payload)
        except (RunKeyError, NotAllowedError) as error:
            refused = error if peer_id in chosen else refused
            answers.failures[peer_id] += 1
            return
        except (PeerLostError, WireError, RunMismatchError) as error:
            # It has ended since, or is now a member of another run.
            logger.debug("no settings from %s: %s", peer_id, error)
            answers.failures[peer_id] += 1
            return
        except ConfigError as error:
            told = error
        except Exception as error:
            errors.note(f"reading the settings of {peer_id}; other members are asked", error)
            answers.failures[peer_id] += 1
            return
        finally:
            asking.remove(peer_id)
        answers.add(peer_id, told)
        if answers.is_enough(found):
            nursery.cancel_scope.cancel()

    async with observer_links(transport, run_id, closed, refusal) as links:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            while True:
                with errors.containing("looking for members"), trio.move_on_after(timeout_s):
                    found = await find_members(directory, run_id, transport.peer_id)
                    members = initial | found
                waited_s = trio.current_time() - started
                if answers.is_enough(found) or (not found and not asking - initial.keys() and waited_s > LOOK_S):
                    break
                if waited_s >= timeout_s and (answers.best or not answers.untried(found) or waited_s > MAX_LOOK_S):
                    break
                idle = list(members.keys() - asking - answers.answered)
                rng.shuffle(idle)
                idle.sort(key=lambda peer_id: (answers.failures[peer_id], peer_id not in chosen, peer_id in cut_short))
                crowded = len(idle) > DIALLED_AT_ONCE
                for peer_id in idle[: DIALLED_AT_ONCE - len(asking)]:
                    asking.add(peer_id)
                    hurried = (
                        crowded and peer_id not in chosen and peer_id not in cut_short and not answers.failures[peer_id]
                    )
                    nursery.start_soon(ask, peer_id, members[peer_id][0], FIRST_DIAL_S if hurried else math.inf)
                await trio.sleep(0.3)
            nursery.cancel_scope.cancel()
    best, untried = answers.best, len(answers.untried(found))
    if refused is None and best is None and untried:
        raise UnreachableError(
            f"run {run_id!r}: {len(found)} peers are announced, none of them answers, and {untried} could not be "
            f"asked within {MAX_LOOK_S:.0f} s; try again, or give a member of the run as an initial peer"
        )
    if isinstance(best, ConfigError):
        raise best
    if best is None and refused is not None:
        raise refused
    return best


async def check_key(
    transport: Transport, run_id: str, *, chosen: Collection[PeerId], closed: ClosedRun | None = None
) -> None:
    """Raise RunKeyError or NotAllowedError if a chosen peer refuses us. Silent peers are skipped."""
    async with observer_links(transport, run_id, closed) as links:
        refused = await _refused_by(links, chosen)
    if refused is not None:
        raise refused


async def _refused_by(links: Links, chosen: Collection[PeerId]) -> RunKeyError | NotAllowedError | None:
    """Dial chosen peers without a record: those of a run with another key have no record that we can find."""
    refused: list[RunKeyError | NotAllowedError] = []

    async def ask(peer_id: PeerId) -> None:
        try:
            await links.connect(peer_id, [])
        except (RunKeyError, NotAllowedError) as error:
            refused.append(error)
        except P2PTrainError as error:
            logger.debug("whether %s refuses us is not known: %s", peer_id, error)

    with trio.move_on_after(ASK_KEY_S):
        async with trio.open_nursery() as nursery:
            for peer_id in sorted(chosen)[:MAX_ASKED_KEY]:
                nursery.start_soon(ask, peer_id)
    return refused[0] if refused else None


async def list_members(
    transport: Transport,
    directory: Directory,
    run_id: str,
    *,
    chosen: Collection[PeerId] = (),
    closed: ClosedRun | None = None,
) -> list[MemberInfo]:
    """Members of a run that can be reached from here, and members behind NAT that cannot.

    Raises RunKeyError or NotAllowedError if there is none, and a chosen peer refuses us.
    """
    directory = directory_of(directory, closed, transport.peer_id)
    refused: RunKeyError | NotAllowedError | None = None
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
            refused = await _refused_by(links, chosen)
    if refused is not None:
        raise refused
    return sorted(infos, key=lambda info: info.peer_id)


class _ObserverEvents:
    """Link events of an observer, which ignores all messages. Links keep heartbeats themselves."""

    async def on_message(self, link: Link, message: Message, payload: bytes) -> None: ...

    def on_link(self, link: Link) -> None: ...

    def on_lost(self, link: Link) -> None: ...

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> Beat:
        return Beat(sent_s, echo_s, held_s, "", "", -1, 0, 0, OBSERVER, 0.0, (), 0)


@asynccontextmanager
async def observer_links(
    transport: Transport, run_id: str, closed: ClosedRun | None = None, refusal: Refusal = no_refusal
) -> AsyncIterator[Links]:
    """Links of an observer."""
    # The time distinguishes several observers with one identity.
    hello = Hello(run_id, "", f"observer at {trio.current_time()}", OBSERVER, (), b"")
    links = Links(transport, lambda: hello, _ObserverEvents(), admission=Admission(closed=closed, refusal=refusal))
    async with trio.open_nursery() as nursery:
        await nursery.start(links.run)
        yield links
        links.close_all("done looking")
        nursery.cancel_scope.cancel()


async def find_members(directory: Directory, run_id: str, me: PeerId) -> Members:
    """Addresses and role of all other members in the directory."""
    found: Members = {}

    async def look(bucket: int) -> None:
        for peer_id, value in (await directory.lookup(member_key(run_id, bucket))).items():
            record = decode_record(value)
            if record is not None and peer_id != me and bucket_of(peer_id) == bucket:
                found[peer_id] = record

    async with trio.open_nursery() as nursery:
        for bucket in range(BUCKETS):
            nursery.start_soon(look, bucket)
    return found


async def ask_relayed(links: Links, link: Link) -> dict[PeerId, PeerId] | None:
    """What a member says of its links, as `MemberInfo.relayed`; None if it does not answer within seconds."""
    return await _ask_list(links, link, "relayed", parse_relayed)


async def _ask_list(links: Links, link: Link, what: str, parse: Callable[[bytes], T]) -> T | None:
    """What a member tells observers about itself; None if it does not answer."""
    try:
        answer, payload = await links.request(link, what, timeout_s=LIST_TIMEOUT_S)
        return parse(payload) if answer.found else None
    except (PeerLostError, WireError) as error:
        logger.debug("no %s from %s: %s", what, link.peer_id, error)
        return None


def parse_strikes(payload: bytes) -> tuple[Struck, ...]:
    """The answer to a request for strikes, its texts made safe to print. Raises WireError."""
    told = _list_of(payload, list[Struck], "strikes", MAX_STRIKES_BYTES)
    if not all(0 < struck.count < 2**31 and 0 <= struck.age_s < math.inf for struck in told):
        raise WireError("impossible counts or ages of strikes")
    return tuple(
        Struck(shown(struck.peer_id, 128), struck.count, shown(struck.reason, MAX_REASON), struck.age_s)
        for struck in told
    )


def parse_relayed(payload: bytes) -> dict[PeerId, PeerId]:
    """The answer to a request for relayed links, made safe to print. Raises WireError."""
    told = _list_of(payload, dict[str, str], "relayed links", MAX_RELAYED_BYTES)
    return {shown(peer_id, MAX_PEER_ID): shown(relay, MAX_PEER_ID) for peer_id, relay in told.items()}


def _list_of(payload: bytes, kind: type[T], what: str, most_bytes: int) -> T:
    if len(payload) > most_bytes:
        raise WireError(f"list of {what} too large")
    try:
        return msgspec.json.decode(payload, type=kind)
    except (ValueError, RecursionError) as error:
        raise WireError(f"bad list of {what}: {error}") from None


def _parse_settings(peer_id: PeerId, payload: bytes) -> RunConfig:
    if len(payload) > MAX_SETTINGS_BYTES:
        raise WireError("settings too large")
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise WireError(f"settings are not JSON: {error}") from None
    if not isinstance(values, dict):
        raise WireError("settings are not an object")
    try:
        return RunConfig.from_stated(values)
    except ConfigError as error:
        raise ConfigError(
            f"this version of p2ptrain cannot use the run's settings from peer {peer_id}: {error}"
        ) from None
