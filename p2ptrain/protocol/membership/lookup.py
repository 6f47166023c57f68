"""Asks a run's members, before joining, for the settings, the tokenizer, and whether this peer may join.

It does so as an observer: one that sends a Hello with an empty digest, and gets heartbeats and answers without being a
member.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import (
    ConfigError,
    NotAllowedError,
    OtherRunError,
    P2PTrainError,
    PeerLostError,
    RunKeyError,
    RunMismatchError,
    UnreachableError,
    WireError,
)
from p2ptrain.protocol.links.handshake import OBSERVER, TRAINER, Admission
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership.directory import Members, directory_of, find_members
from p2ptrain.protocol.membership.neighbours import DIALLED_AT_ONCE, FIRST_DIAL_S
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.messages import Beat, Hello, Message
from p2ptrain.protocol.wire.transport import Directory, PeerId, Refusal, Transport, no_refusal
from p2ptrain.settings.config import RunConfig

logger = logging.getLogger(__name__)

# Seconds between two looks for members, and between two rounds of questions (guess).
ASK_AGAIN_S = 0.3
# New records are found within about a second. After this long without any, the run is assumed not to exist.
LOOK_S = 2.0
MAX_SETTINGS_BYTES = 64 * 1024
# Time to open a stream to an initial peer and exchange two frames. A bootstrap node of an earlier version never
# answers.
ASK_KEY_S = 2.5
# How many initial peers are asked whether they have our run key, if no member is found.
MAX_ASKED_KEY = 8
# A joiner gives up after this long if it could not ask all announced peers: thousands of them may be made up.
MAX_LOOK_S = 120.0
# Largest tokenizer file that peers request and keep. Those of 50,257 ids have 1.4 to 3.6 MB.
MAX_TOKENIZER_BYTES = 8 * 2**20
PIECE_BYTES = 2**20
# Time to find the members, to open a link, for each piece of the file, and for the whole file from one donor: 8 MB at
# half a Mbit/s. After that, another donor is asked.
FIND_S, CONNECT_S, PIECE_S, DONOR_S = 10.0, 10.0, 20.0, 120.0
# How many donors are tried, as most members have the file, and the time for all of them.
MOST_TRIED, ASK_S = 16, 500.0

# Why a peer that the user named is of no use to us.
REFUSALS = (OtherRunError, RunKeyError, NotAllowedError)
RefusalError = OtherRunError | RunKeyError | NotAllowedError


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
        chosen: ids of the user's initial peers. Their answers take precedence.
        closed: the run and its key; None if the user gave no key.
        refusal: why the user refuses a peer. RefusalError peers are not asked.
        ours: the settings of this run as we know them; only a chosen member may change them.
        fits: whether settings agree with those that the user gave. Others are used only if no member has fitting ones.

    Raises:
        ConfigError: this version of p2ptrain cannot use the settings of a chosen member. Those of other members are
            skipped.
        OtherRunError: no member was found, we know no settings of this run, and a chosen peer belongs to another run.
        RunKeyError: no member was found, and a chosen peer has another run key than we do.
        NotAllowedError: no member was found, and a chosen peer refuses us by its user's list.
        UnreachableError: more peers are announced than could be asked within two minutes.
    """
    directory = directory_of(directory, closed, transport.peer_id)
    refused: RefusalError | None = None
    answers = SettingsAnswers(chosen, ours, fits)
    # The network layer has the addresses of initial peers; their records may be missing among too many.
    initial: Members = {peer_id: ((), TRAINER) for peer_id in chosen if peer_id != transport.peer_id}
    found: Members = {}
    asking: set[PeerId] = set()
    first_asked_s: dict[PeerId, float] = {}
    cut_short: set[PeerId] = set()
    errors = ErrorLog(logger)
    started, looked_s = trio.current_time(), -math.inf

    async def ask(peer_id: PeerId, maddrs: tuple[str, ...], dial_s: float) -> None:
        nonlocal refused
        told: RunConfig | ConfigError | None = None
        try:
            with trio.move_on_after(dial_s) as scope:
                link = await links.connect(peer_id, list(maddrs))
            if scope.cancelled_caught:
                cut_short.add(peer_id)
                return
            _, payload = await links.request(link, "settings", timeout_s=timeout_s)
            told = _parse_settings(peer_id, payload)
        except REFUSALS as error:
            # If we know our run, an initial peer that has moved to another one must not keep us out of it.
            if peer_id in chosen and not (ours is not None and isinstance(error, OtherRunError)):
                refused = error
        except (PeerLostError, WireError, RunMismatchError) as error:
            # It has ended since, or is now a member of another run.
            logger.debug("no settings from %s: %s", peer_id, error)
        except ConfigError as error:
            told = error
        except Exception as error:
            errors.note(f"reading the settings of {peer_id}; other members are asked", error)
        finally:
            asking.remove(peer_id)
        if told is None:
            answers.failures[peer_id] += 1
            return
        answers.add(peer_id, told)
        if is_enough():
            nursery.cancel_scope.cancel()

    async def look() -> None:
        """Look for members again and again.

        On the first look `found` is filled while keys answer; later ones replace it when they end.
        """
        nonlocal found, looked_s
        while True:
            heard: Members = {}
            found, is_whole = found or heard, False
            with errors.containing("looking for members"), trio.move_on_after(timeout_s):
                await find_members(directory, run_id, transport.peer_id, heard)
                is_whole = True
            found, looked_s = heard if is_whole else found | heard, trio.current_time()
            await trio.sleep(ASK_AGAIN_S)

    def is_enough() -> bool:
        """Whether to stop: an initial peer has answered, or members were looked up once, or for LOOK_S."""
        has_looked = looked_s >= started or trio.current_time() >= started + LOOK_S
        return answers.is_enough(found) and (has_looked or not answers.answered.isdisjoint(initial))

    def nobody_is_there() -> bool:
        """Whether nobody was found for LOOK_S, and each initial peer has answered, failed, or had as long."""
        soon = trio.current_time() - LOOK_S
        heard = answers.answered | answers.failures.keys()
        are_heard = all(first_asked_s.get(peer_id, math.inf) < soon for peer_id in initial.keys() - heard)
        return not found and not asking - initial.keys() and looked_s > started + LOOK_S and are_heard

    async with observer_links(transport, run_id, closed, refusal) as links, trio.open_nursery() as nursery:
        nursery.start_soon(look)
        while True:
            members, waited_s = initial | found, trio.current_time() - started
            if is_enough() or nobody_is_there():
                break
            if waited_s >= timeout_s and (answers.best or not answers.untried(found) or waited_s > MAX_LOOK_S):
                break
            idle = list(members.keys() - asking - answers.answered)
            rng.shuffle(idle)
            idle.sort(key=lambda peer_id: (answers.failures[peer_id], peer_id not in chosen, peer_id in cut_short))
            crowded = len(idle) > DIALLED_AT_ONCE
            for peer_id in idle[: DIALLED_AT_ONCE - len(asking)]:
                asking.add(peer_id)
                first_asked_s.setdefault(peer_id, trio.current_time())
                is_first = not (peer_id in chosen or peer_id in cut_short or answers.failures[peer_id])
                dial_s = FIRST_DIAL_S if crowded and is_first else math.inf
                nursery.start_soon(ask, peer_id, members[peer_id][0], dial_s)
            await trio.sleep(ASK_AGAIN_S)
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


class SettingsAnswers:
    """The settings that a joiner received; `ask_settings` explains the arguments.

    Attributes:
        answered: the peers that sent settings, whether or not we can use them.
        failures: how often each peer could not be asked.
    """

    def __init__(self, chosen: Collection[PeerId], ours: RunConfig | None, fits: Callable[[RunConfig], bool]) -> None:
        self.answered: set[PeerId] = set()
        self.failures: Counter[PeerId] = Counter()
        self._chosen = chosen
        self._ours = ours
        self._fits = fits
        self._answer: RunConfig | ConfigError | None = None
        self._hearsay: RunConfig | None = None
        self._misfit: RunConfig | None = None

    def add(self, peer_id: PeerId, told: RunConfig | ConfigError) -> None:
        """Take a peer's settings, or the reason why this version of p2ptrain cannot use them."""
        self.answered.add(peer_id)
        if peer_id in self._chosen:
            self._answer = told
        elif isinstance(told, ConfigError):
            logger.warning("%s", told)
        elif self._ours is not None and told != self._ours:
            logger.warning("peer %s trains run %r with different settings", peer_id, told.run_id)
        elif not self._fits(told):
            self._misfit = self._misfit or told
        else:
            self._hearsay = self._hearsay or told

    @property
    def best(self) -> RunConfig | ConfigError | None:
        """The answer with precedence: of a chosen peer, else one that fits, else any."""
        return self._answer or self._hearsay or self._misfit

    def is_enough(self, found: Collection[PeerId]) -> bool:
        """Whether there is an answer, and no announced peer that has not answered could send a better one."""
        # An initial peer without a record may be a bootstrap node, which answers no Hello.
        waiting = any(peer_id in self._chosen for peer_id in self.untried(found))
        all_answered = self.answered.issuperset(found)
        return (
            self._answer is not None
            or (self._hearsay is not None and not waiting)
            or (self._misfit is not None and all_answered)
        )

    def untried(self, found: Collection[PeerId]) -> set[PeerId]:
        """The announced peers that have neither answered nor failed."""
        return {peer_id for peer_id in found if peer_id not in self.answered and not self.failures[peer_id]}


async def check_key(
    transport: Transport, run_id: str, *, chosen: Collection[PeerId], closed: ClosedRun | None = None
) -> None:
    """Raise RunKeyError or NotAllowedError if a chosen peer refuses us. Silent ones, and other runs', are skipped."""
    async with observer_links(transport, run_id, closed) as links:
        refused = await refused_by(links, chosen)
    if refused is not None and not isinstance(refused, OtherRunError):
        raise refused


async def refused_by(links: Links, chosen: Collection[PeerId]) -> RefusalError | None:
    """The error of a chosen peer that refuses us; None if none does.

    We dial chosen peers without looking up their records: under another key we could not find these.
    """
    refused: list[RefusalError] = []

    async def ask(peer_id: PeerId) -> None:
        try:
            await links.connect(peer_id, [])
        except REFUSALS as error:
            refused.append(error)
        except P2PTrainError as error:
            logger.debug("%s may refuse us: %s", peer_id, error)

    with trio.move_on_after(ASK_KEY_S):
        async with trio.open_nursery() as nursery:
            for peer_id in sorted(chosen)[:MAX_ASKED_KEY]:
                nursery.start_soon(ask, peer_id)
    # Another run is the weakest reason.
    return min(refused, key=lambda error: isinstance(error, OtherRunError), default=None)


async def ask_tokenizer(
    transport: Transport,
    directory: Directory,
    run_id: str,
    sha256: str,
    *,
    rng: random.Random,
    chosen: Collection[PeerId] = (),
    closed: ClosedRun | None = None,
    refusal: Refusal = no_refusal,
) -> bytes | None:
    """Download the file with this hex SHA-256 from one of the run's members; None if that fails.

    The user's initial peers (`chosen`) are asked first, then others at random: MOST_TRIED in all, for at most ASK_S.
    """
    directory = directory_of(directory, closed, transport.peer_id)
    errors = ErrorLog(logger)
    found: Members = {}
    async with observer_links(transport, run_id, closed, refusal) as links:
        with trio.move_on_after(FIND_S):
            found = await find_members(directory, run_id, transport.peer_id)
        members: dict[PeerId, tuple[str, ...]] = {peer_id: () for peer_id in chosen if peer_id != transport.peer_id}
        members |= {peer_id: maddrs for peer_id, (maddrs, _) in found.items()}
        order = sorted(members)
        rng.shuffle(order)
        order.sort(key=lambda peer_id: peer_id not in chosen)
        with trio.move_on_after(ASK_S):
            for peer_id in order[:MOST_TRIED]:
                with errors.containing(f"asking {peer_id} for the tokenizer"), trio.move_on_after(DONOR_S):
                    try:
                        if (file := await _download(links, peer_id, members[peer_id], sha256)) is not None:
                            return file
                    except P2PTrainError as error:
                        logger.debug("no tokenizer from %s: %s", peer_id, error)
    return None


async def _download(links: Links, peer_id: PeerId, maddrs: tuple[str, ...], sha256: str) -> bytes | None:
    """Download the file from one member; None if it does not have the file, or cannot be dialled in time.

    Raises WireError if it sends another file, and PeerLostError if it stops answering.
    """
    link: Link | None = None
    with trio.move_on_after(CONNECT_S):
        link = await links.connect(peer_id, list(maddrs))
    if link is None:
        return None
    file = bytearray()
    for index in range(1 + MAX_TOKENIZER_BYTES // PIECE_BYTES):
        answer, piece = await links.request(link, "tokenizer", subject=sha256, index=index, timeout_s=PIECE_S)
        if not answer.found:
            return None
        file += piece
        if len(piece) != PIECE_BYTES:
            break
    if hashlib.sha256(file).hexdigest() != sha256:
        raise WireError(f"{peer_id}: its tokenizer is not that of the run")
    return bytes(file)


def tokenizer_piece(file: bytes, index: int) -> bytes | None:
    """Piece `index` of a file, PIECE_BYTES of it or the rest; None if it has no such piece, or is empty."""
    if not file or not 0 <= index <= len(file) // PIECE_BYTES:
        return None
    return file[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]


class _ObserverEvents:
    """Link events of an observer, which ignores all messages. Each link keeps the last heartbeat itself."""

    async def on_message(self, link: Link, message: Message, payload: bytes) -> None: ...

    def on_link(self, link: Link) -> None: ...

    def on_lost(self, link: Link) -> None: ...

    def make_beat(self, sent_s: float, echo_s: float, held_s: float) -> Beat:
        return Beat(sent_s, echo_s, held_s, "", "", -1, 0, 0, OBSERVER, 0.0, (), 0)


@asynccontextmanager
async def observer_links(
    transport: Transport, run_id: str, closed: ClosedRun | None = None, refusal: Refusal = no_refusal
) -> AsyncIterator[Links]:
    """Accept and open links as an observer."""
    # The time distinguishes several observers with one identity.
    hello = Hello(run_id, "", f"observer at {trio.current_time()}", OBSERVER, (), b"")
    links = Links(transport, lambda: hello, _ObserverEvents(), admission=Admission(closed=closed, refusal=refusal))
    async with trio.open_nursery() as nursery:
        await nursery.start(links.run)
        yield links
        links.close_all("done looking")
        nursery.cancel_scope.cancel()
