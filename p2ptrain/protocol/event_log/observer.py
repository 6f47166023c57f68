"""Observes a live run: its members, their status, and the events in their logs.

An observer polls every linked member for new events, over links of its own or over those of its peer if that is a
member. Answers are checked, and a peer that sends malformed events is not asked again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import P2PTrainError, PeerLostError, WireError
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.event_log.events import KINDS, Event, Page, parse_page
from p2ptrain.protocol.links.handshake import OBSERVER
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import Links
from p2ptrain.protocol.membership.directory import directory_of, find_members
from p2ptrain.protocol.membership.lookup import observer_links
from p2ptrain.protocol.membership.status import UNREACHABLE, ask_relayed
from p2ptrain.protocol.restarts import process_of
from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.transport import Directory, PeerId, Transport

logger = logging.getLogger(__name__)

# Interval of requests for events. Peers aggregate steps over two seconds.
ASK_EVERY_S = 1.0
# The same for a peer that is busy, or whose version has no event log.
ASK_AGAIN_S = 5.0
ANSWER_TIMEOUT_S = 15.0
# Interval of requests for relayed links, which change when connections break or are opened (guess).
ASK_RELAYED_EVERY_S = 20.0
# Interval of lookups. Members announce themselves every 10 s.
LOOK_EVERY_S = 3.0
DIAL_TIMEOUT_S = 15.0
# First and longest delay between dials of a peer, which may be behind NAT or gone.
DIAL_AGAIN_S = (3.0, 60.0)
# How long a lost member is still shown.
LOST_IN_SIGHT_S = 30.0
# Members shown at once (the protocol's limit), and members remembered. Bounded because any peer may announce itself.
MOST_MEMBERS = 128
MOST_REMEMBERED = 1024
# While more events than this wait for `take`, no peer is asked.
MOST_WAITING = 50_000
# Length of a status, which is a few words.
MOST_STATUS = 80


@dataclass(frozen=True)
class Sighting:
    """The current state of a member.

    Attributes:
        linked: whether we have a link. If not, `status` says why, and the position is the last known one.
        left: whether the member left the run on purpose.
        status: its activity, as it reports it.
        step, round, lineage: its position.
        rtt_s: round-trip time; 0 if unknown.
        trouble: why its events are not shown; empty if they are.
        relayed: as `MemberInfo.relayed`.
    """

    peer_id: PeerId
    linked: bool
    status: str
    left: bool = False
    step: int = 0
    round: int = -1
    lineage: str = ""
    rtt_s: float = 0.0
    trouble: str = ""
    relayed: Mapping[PeerId, PeerId] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """New events of a peer, in their order. `incarnation` is that of its process, and changes when that restarts."""

    peer_id: PeerId
    incarnation: str
    events: list[Event]


@dataclass(frozen=True)
class View:
    """All members now, and the events since the last `take`."""

    members: tuple[Sighting, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class Own:
    """The observer's own peer, if it is a member of the run."""

    incarnation: str
    event_log: EventLog
    sight: Callable[[], Sighting]


@dataclass
class _Watched:
    """A present or past member: what we have read of its event log, and our dials of it."""

    announced: bool = False
    left: bool = False
    lost_s: float = -math.inf
    incarnation: str = ""
    last: int = 0
    trouble: str = ""
    refused: bool = False
    dialling: bool = False
    failures: int = 0
    dial_at_s: float = 0.0
    seen: Sighting | None = None
    relayed: Mapping[PeerId, PeerId] = field(default_factory=dict)
    ask_relayed_s: float = -math.inf


@dataclass
class Observer:
    """Follows the members of one run.

    Args:
        run_id: the run.
        compute: runs the checks of answers in a worker thread.
        clock: seconds since the epoch.
        own: our own peer, if it is a member.
    """

    run_id: str
    compute: Callable[..., Awaitable[Any]]
    clock: Callable[[], float]
    own: Own | None = None
    _watched: dict[PeerId, _Watched] = field(default_factory=dict)
    _batches: list[Batch] = field(default_factory=list)
    _waiting: int = 0
    _own_last: int = 0
    _links: Links | None = None
    _followed: dict[PeerId, Link] = field(default_factory=dict)
    _errors: ErrorLog = field(default_factory=lambda: ErrorLog(logger))

    async def watch_as_observer(
        self, transport: Transport, directory: Directory, closed: ClosedRun | None = None
    ) -> None:
        """Find members, link to them and poll them, until cancelled. `closed`: the run and its key, if it has one."""
        directory = directory_of(directory, closed, transport.peer_id)
        async with observer_links(transport, self.run_id, closed) as links, trio.open_nursery() as nursery:
            nursery.start_soon(self._find_members, transport, directory, links)
            await self.watch(links)

    async def watch(self, links: Links) -> None:
        """Poll the members at these links, until cancelled. Afterwards it may be called with other links."""
        self._links = links
        self._followed.clear()
        async with trio.open_nursery() as nursery:
            while True:
                for peer_id, link in list(links.live.items()):
                    if link.hello.role == OBSERVER or self._followed.get(peer_id) is link:
                        continue
                    if (watched := self._know(peer_id)) is not None:
                        self._followed[peer_id] = link
                        nursery.start_soon(self._follow, links, link, watched)
                await trio.sleep(ASK_EVERY_S / 4)

    def take(self) -> View:
        """All members now, and the events since the last call."""
        members = [self._read_own(self.own)] if self.own is not None else []
        batches, self._batches, self._waiting = tuple(self._batches), [], 0
        shown = (known for known in sorted(self._watched.items()) if self._is_shown(*known))
        return View((*members, *(self._sight(*known) for known in shown)), batches)

    def _is_shown(self, peer_id: PeerId, watched: _Watched) -> bool:
        recently = trio.current_time() - watched.lost_s < LOST_IN_SIGHT_S
        return watched.announced or peer_id in self._followed or recently

    def _sight(self, peer_id: PeerId, watched: _Watched) -> Sighting:
        link = self._links.get(peer_id) if self._links is not None else None
        if link is not None and link.beat is not None:
            beat = link.beat
            watched.seen = Sighting(
                peer_id,
                True,
                beat.status[:MOST_STATUS],
                False,
                beat.step,
                beat.round,
                beat.lineage,
                link.flow.rtt_s,
                watched.trouble,
                watched.relayed,
            )
            return watched.seen
        status = "connecting" if link is not None or watched.failures == 0 else UNREACHABLE
        if watched.left:
            status = "left the run"
        if (seen := watched.seen) is None:
            return Sighting(peer_id, False, status, watched.left)
        return Sighting(peer_id, False, status, watched.left, seen.step, seen.round, seen.lineage)

    def _read_own(self, own: Own) -> Sighting:
        sighting, more = own.sight(), True
        while more:
            page = msgspec.json.decode(own.event_log.page(self._own_last), type=Page)
            self._own_last, more = page.last, page.more
            events = [event for event in page.events if event["event"] in KINDS]
            self._batches.append(Batch(sighting.peer_id, own.incarnation, events))
        return sighting

    # Members.

    async def _find_members(self, transport: Transport, directory: Directory, links: Links) -> None:
        async with trio.open_nursery() as nursery:
            members: dict[PeerId, tuple[tuple[str, ...], str]] = {}
            while True:
                with self._errors.containing("looking for members"):
                    members = await find_members(directory, self.run_id, transport.peer_id)
                for peer_id, watched in self._watched.items():
                    watched.announced = peer_id in members
                for peer_id, (maddrs, _) in sorted(members.items()):
                    known = self._know(peer_id)
                    if known is None or known.dialling or peer_id in links.live:
                        continue
                    known.announced = True
                    if trio.current_time() >= known.dial_at_s:
                        known.dialling = True
                        nursery.start_soon(self._dial, links, peer_id, maddrs, known)
                await trio.sleep(LOOK_EVERY_S)

    def _know(self, peer_id: PeerId) -> _Watched | None:
        """The entry of a member, made if needed; None if there are too many members."""
        watched = self._watched.get(peer_id)
        if watched is not None and self._is_shown(peer_id, watched):
            return watched
        if sum(self._is_shown(*known) for known in self._watched.items()) >= MOST_MEMBERS:
            return None
        if watched is None:
            if len(self._watched) >= MOST_REMEMBERED:
                del self._watched[next(p for p, known in self._watched.items() if not self._is_shown(p, known))]
            watched = self._watched[peer_id] = _Watched()
        return watched

    async def _dial(self, links: Links, peer_id: PeerId, maddrs: tuple[str, ...], watched: _Watched) -> None:
        reached = False
        with self._errors.containing("dialling members"):
            try:
                with trio.fail_after(DIAL_TIMEOUT_S):
                    await links.connect(peer_id, list(maddrs))
                reached = True
            except (P2PTrainError, trio.TooSlowError) as error:
                logger.debug("cannot reach %s: %s", peer_id, error)
        watched.dialling = False
        if reached:
            watched.failures = 0
        else:
            first_s, last_s = DIAL_AGAIN_S
            watched.dial_at_s = trio.current_time() + min(last_s, first_s * 2 ** min(watched.failures, 10))
            watched.failures += 1

    # Events.

    async def _follow(self, links: Links, link: Link, watched: _Watched) -> None:
        """Poll one member for its events until the link is lost."""
        process = process_of(link.hello.incarnation)
        if watched.incarnation != process:
            watched.incarnation, watched.last, watched.refused, watched.trouble = process, 0, False, ""
        watched.left = False
        while not link.lost.is_set() and not watched.refused:
            wait_s = ASK_EVERY_S
            if self._waiting < MOST_WAITING:
                wait_s = await self._ask(links, link, watched)
            if trio.current_time() >= watched.ask_relayed_s:
                watched.ask_relayed_s = trio.current_time() + ASK_RELAYED_EVERY_S
                if (relayed := await ask_relayed(links, link)) is not None:
                    watched.relayed = relayed
            with trio.move_on_after(wait_s):
                await link.lost.wait()
        await link.lost.wait()
        if self._followed.get(link.peer_id) is link:
            watched.left, watched.lost_s = link.left, trio.current_time()
            del self._followed[link.peer_id]

    async def _ask(self, links: Links, link: Link, watched: _Watched) -> float:
        """Request events once. Returns the seconds until the next request."""
        try:
            answer, payload = await links.request(link, "events", index=watched.last, timeout_s=ANSWER_TIMEOUT_S)
            if not answer.found:
                raise PeerLostError(f"it sends no events ({answer.note[:MOST_STATUS]})")
            page: Page = await self.compute(self._check, link.peer_id, watched.last, payload)
        except PeerLostError as error:
            watched.trouble = str(error)
            return ASK_AGAIN_S
        except WireError as error:
            logger.warning("events of %s are not shown: %s", link.peer_id, error)
            watched.trouble, watched.refused = f"its events are malformed: {error}", True
            return ASK_AGAIN_S
        except Exception:
            logger.exception("events of %s are not shown", link.peer_id)
            watched.trouble, watched.refused = "its events could not be read", True
            return ASK_AGAIN_S
        watched.trouble, watched.last = "", page.last
        if page.events:
            self._batches.append(Batch(link.peer_id, watched.incarnation, page.events))
            self._waiting += len(page.events)
        return 0.0 if page.more else ASK_EVERY_S

    def _check(self, peer_id: PeerId, last: int, payload: bytes) -> Page:
        page = parse_page(payload, now_s=self.clock())
        if page.last < last or (page.events and page.last == last):
            raise WireError(f"events up to {page.last} after those up to {last}")
        if any(event["event"] == "start" and event["peer_id"] != peer_id for event in page.events):
            raise WireError("events of another peer")
        return page
