"""Watching a run while it trains: who is there, what each is doing, and everything that their event logs tell.

An observer asks every member that it is linked with for its new events, again and again. It works on links of its own,
or on those that a member of the run has anyway. Answers are checked; a peer that answers nonsense is no longer asked,
and everything else goes on without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from p2ptrain.error_log import Containment, ErrorLog
from p2ptrain.errors import P2PTrainError, PeerLostError, WireError
from p2ptrain.protocol.event_log.event_log import EventLog
from p2ptrain.protocol.event_log.events import Event, Page, parse_page
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.links import OBSERVER, Links
from p2ptrain.protocol.membership.lookup import UNREACHABLE, find_members, observer_links
from p2ptrain.protocol.node.incarnation import process_of
from p2ptrain.protocol.wire.transport import Compute, Directory, PeerId, Transport

logger = logging.getLogger(__name__)

# As often as people look; peers fold their steps over two seconds.
ASK_EVERY_S = 1.0
# A peer that says that it is busy, or of a version that keeps no event log.
ASK_AGAIN_S = 5.0
ANSWER_TIMEOUT_S = 15.0
# How soon somebody new is seen. Members announce themselves every 10 s.
LOOK_EVERY_S = 3.0
DIAL_TIMEOUT_S = 15.0
# Between two attempts to reach somebody, at first and at last: behind NAT, or gone and still announced.
DIAL_AGAIN_S = (3.0, 60.0)
# A member that is lost stays in sight for so long, to be seen to have gone.
LOST_IN_SIGHT_S = 30.0
# Members shown at once (the protocol's own limit), and remembered, as they may come back. Anybody may announce himself.
MOST_MEMBERS = 128
MOST_REMEMBERED = 1024
# Events that nobody has taken yet; beyond that nobody is asked.
MOST_WAITING = 50_000
# What a peer says that it is doing is a few words.
MOST_STATUS = 80


@dataclass(frozen=True)
class Sighting:
    """One member as it is now.

    Attributes:
        linked: whether we are in touch. If not, `status` says why, and the rest is as it was last.
        left: whether it said goodbye.
        status: what it is doing, in its own words.
        step, round, lineage: where it stands.
        speed: inner steps per second.
        rtt_s: the round trip between it and us; 0 unknown.
        trouble: why its events are not shown; empty when they are.
    """

    peer_id: PeerId
    linked: bool
    status: str
    left: bool = False
    step: int = 0
    round: int = -1
    lineage: str = ""
    speed: float = 0.0
    rtt_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True)
class Batch:
    """New events of a peer, in their order; `incarnation` is another after its process was restarted."""

    peer_id: PeerId
    incarnation: str
    events: list[Event]


@dataclass(frozen=True)
class View:
    """What is new since the last look: everybody as it stands now, and what was told."""

    members: tuple[Sighting, ...]
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class Own:
    """The observer's own part in the run, where it is a member itself: who it is, what it does and its event log."""

    incarnation: str
    event_log: EventLog
    sight: Callable[[], Sighting]


@dataclass
class _Watched:
    """A member, or one that was: how far its event log was read, and how reaching it went."""

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


@dataclass
class Observer:
    """Follows the members of one run.

    Args:
        run_id: the run.
        compute: runs the checking of what peers answer.
        clock: seconds since the epoch.
        own: where it is a member itself.
    """

    run_id: str
    compute: Compute
    clock: Callable[[], float]
    own: Own | None = None
    _watched: dict[PeerId, _Watched] = field(default_factory=dict)
    _batches: list[Batch] = field(default_factory=list)
    _waiting: int = 0
    _own_last: int = 0
    _links: Links | None = None
    _followed: dict[PeerId, Link] = field(default_factory=dict)
    _looking: Containment = field(default_factory=lambda: ErrorLog(logger).containing("looking for members"))
    _dialling: Containment = field(default_factory=lambda: ErrorLog(logger).containing("dialling members"))

    async def watch_as_observer(self, transport: Transport, directory: Directory) -> None:
        """Look for members, link to them and ask them, until cancelled."""
        async with observer_links(transport, self.run_id) as links, trio.open_nursery() as nursery:
            nursery.start_soon(self._find_members, transport, directory, links)
            await self.watch(links)

    async def watch(self, links: Links) -> None:
        """Ask the members that these links lead to, until cancelled. Who is linked is somebody else's business.

        May be called again with other links, after the first call was cancelled.
        """
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
        """Everybody as it stands now, and the events that came since the last call."""
        members = [self._read_own(self.own)] if self.own is not None else []
        batches, self._batches, self._waiting = tuple(self._batches), [], 0
        here = (known for known in sorted(self._watched.items()) if self._is_here(*known))
        return View((*members, *(self._sight(*known) for known in here)), batches)

    def _is_here(self, peer_id: PeerId, watched: _Watched) -> bool:
        recently = trio.current_time() - watched.lost_s < LOST_IN_SIGHT_S
        return watched.announced or peer_id in self._followed or recently

    def _sight(self, peer_id: PeerId, watched: _Watched) -> Sighting:
        link = self._links.get(peer_id) if self._links is not None else None
        if link is not None and link.beat is not None:
            beat = link.beat
            watched.seen = Sighting(
                peer_id, True, beat.status[:MOST_STATUS], False, beat.step, beat.round, beat.lineage, beat.speed,
                link.rtt_s, watched.trouble,
            )  # fmt: skip
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
            page = parse_page(own.event_log.page(self._own_last), now_s=self.clock())
            self._own_last, more = page.last, page.more
            self._batches.append(Batch(sighting.peer_id, own.incarnation, page.events))
        return sighting

    # --- members --------------------------------------------------------------------------------------------------

    async def _find_members(self, transport: Transport, directory: Directory, links: Links) -> None:
        async with trio.open_nursery() as nursery:
            members: dict[PeerId, tuple[tuple[str, ...], str]] = {}
            while True:
                with self._looking:
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
        """What we know of a member; None where there are too many already."""
        watched = self._watched.get(peer_id)
        if watched is not None and self._is_here(peer_id, watched):
            return watched
        if sum(self._is_here(*known) for known in self._watched.items()) >= MOST_MEMBERS:
            return None
        if watched is None:
            if len(self._watched) >= MOST_REMEMBERED:
                del self._watched[next(p for p, known in self._watched.items() if not self._is_here(p, known))]
            watched = self._watched[peer_id] = _Watched()
        return watched

    async def _dial(self, links: Links, peer_id: PeerId, maddrs: tuple[str, ...], watched: _Watched) -> None:
        reached = False
        with self._dialling:
            try:
                with trio.fail_after(DIAL_TIMEOUT_S):
                    await links.connect(peer_id, list(maddrs))
                reached = True
            except (P2PTrainError, trio.TooSlowError) as error:
                logger.debug("%s is not reached: %s", peer_id, error)
        watched.dialling = False
        if reached:
            watched.failures = 0
        else:
            first_s, last_s = DIAL_AGAIN_S
            watched.dial_at_s = trio.current_time() + min(last_s, first_s * 2 ** min(watched.failures, 10))
            watched.failures += 1

    # --- events ---------------------------------------------------------------------------------------------------

    async def _follow(self, links: Links, link: Link, watched: _Watched) -> None:
        """Ask one member for its events until the link is lost."""
        process = process_of(link.hello.incarnation)
        if watched.incarnation != process:
            watched.incarnation, watched.last, watched.refused, watched.trouble = process, 0, False, ""
        watched.left = False
        while not link.lost.is_set() and not watched.refused:
            wait_s = ASK_EVERY_S
            if self._waiting < MOST_WAITING:
                wait_s = await self._ask(links, link, watched)
            with trio.move_on_after(wait_s):
                await link.lost.wait()
        await link.lost.wait()
        if self._followed.get(link.peer_id) is link:
            watched.left, watched.lost_s = link.left, trio.current_time()
            del self._followed[link.peer_id]

    async def _ask(self, links: Links, link: Link, watched: _Watched) -> float:
        """Ask once. Returns how long to wait before the next time."""
        try:
            answer, payload = await links.request(link, "events", index=watched.last, timeout_s=ANSWER_TIMEOUT_S)
            if not answer.found:
                watched.trouble = f"it gives no events ({answer.note[:MOST_STATUS]})"
                return ASK_AGAIN_S
            page: Page = await self.compute(self._check, link.peer_id, watched.last, payload)
        except PeerLostError as error:
            watched.trouble = str(error)
            return ASK_AGAIN_S
        except WireError as error:
            logger.warning("the events of %s are not shown: %s", link.peer_id, error)
            watched.trouble, watched.refused = f"its events make no sense: {error}", True
            return ASK_AGAIN_S
        except Exception:
            logger.exception("the events of %s are not shown", link.peer_id)
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
            raise WireError("events of somebody else")
        return page
