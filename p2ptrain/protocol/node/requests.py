"""Answers the requests of other peers, and bounds the memory of all answers together."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable

import trio

from p2ptrain.protocol.event_log.event_log import RATE_BYTES_S, EventLog, RateLimit
from p2ptrain.protocol.links.handshake import TRAINER
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.links.outbox import Traffic
from p2ptrain.protocol.membership.lookup import tokenizer_piece
from p2ptrain.protocol.pairwise.pairwise import Pairwise
from p2ptrain.protocol.rounds.driver import RoundDriver
from p2ptrain.protocol.state_sync.transfer import StateServer
from p2ptrain.protocol.wire import messages
from p2ptrain.protocol.wire.transport import PeerId

# Requests of one peer that are served at once; others are answered with "busy". A joiner has 24 in flight, besides
# those of its rounds. Observers send one after the other.
MAX_SERVED_AT_ONCE = 32
MAX_SERVED_TO_OBSERVER = 2
# Answers of a kind that are made, or wait for room in the queue of their link, at once for one peer. So it takes 64
# peers that read slowly until others wait for state or events, and 256 for pieces of parts.
MAX_TURNS_OF_PEER = 2
# The same for all peers together. A page of events has 256 KiB, a piece of a part 128 KiB, any other answer at most
# 1 MiB. Each kind has its own limit, so that rounds do not wait for slow joiners.
MAX_PAGES = 128
MAX_PIECES = 512
MAX_STATE_ANSWERS = 128
# How long rounds wait for the next request of a joiner. Its chunks take seconds (guess).
PROGRESS_S = 30.0
# The same for a peer that asked only for our head or history, and may not want our state (guess).
LOOKING_S = 5.0
# Larger claims are cut to this; rounds wait no longer after the fourth.
MAX_OVERTAKEN = 16
# What observers may ask for.
FOR_OBSERVERS = ("settings", "tokenizer", "events", "strikes", "relayed")
# Peers in an answer about strikes, each with up to 400 bytes.
MAX_STRUCK_TOLD = 64


class RequestServer:
    """Serves this peer's state, parts of the last round, settings, tokenizer, events, strikes and relayed links.

    `buffers` serializes the model's buffers. `tokenizer` is the content of the run's tokenizer file.
    """

    def __init__(
        self,
        driver: RoundDriver,
        pairwise: Pairwise | None,
        buffers: Callable[[], bytes],
        event_log: EventLog,
        tokenizer: bytes,
    ) -> None:
        self._driver = driver
        self._pairwise = pairwise
        self._context = driver.context
        self._state = StateServer(driver, buffers)
        self._event_log = event_log
        self._tokenizer = tokenizer
        self._pace = RateLimit(RATE_BYTES_S)
        self._serving: Counter[PeerId] = Counter()
        self._turns: dict[PeerId, dict[trio.CapacityLimiter, trio.CapacityLimiter]] = {}
        self._pages = trio.CapacityLimiter(MAX_PAGES)
        self._pieces = trio.CapacityLimiter(MAX_PIECES)
        self._state_answers = trio.CapacityLimiter(MAX_STATE_ANSWERS)
        self._limiters = {"events": self._pages, **dict.fromkeys(("part", "record", "contribution"), self._pieces)}

    def take(self, nursery: trio.Nursery, link: Link, request: messages.Request) -> None:
        """Answer a request in a task, in which an error closes the link. Refuses requests beyond the limits."""
        member = link.hello.role == TRAINER
        if self._serving[link.peer_id] >= (MAX_SERVED_AT_ONCE if member else MAX_SERVED_TO_OBSERVER):
            link.send(messages.Answer(request.request, False, "busy"))
        elif not member and request.what not in FOR_OBSERVERS:
            link.send(messages.Answer(request.request, False, "for members of the run"))
        else:
            self._serving[link.peer_id] += 1
            nursery.start_soon(self._serve, link, request)

    async def _serve(self, link: Link, request: messages.Request) -> None:
        try:
            what = f"answering a request for {request.what[:40]!r}"
            limiter = self._limiters.get(request.what, self._state_answers)
            turns = self._turns.setdefault(link.peer_id, {}).setdefault(
                limiter, trio.CapacityLimiter(MAX_TURNS_OF_PEER)
            )
            with link.in_use(), self._context.links.containing(link, what):
                async with turns, limiter:
                    await self._answer(link, request)
        finally:
            self._serving[link.peer_id] -= 1
            if not self._serving[link.peer_id]:
                del self._serving[link.peer_id]
                self._turns.pop(link.peer_id, None)

    async def _answer(self, link: Link, request: messages.Request) -> None:
        match request.what:
            case what if what in FOR_OBSERVERS:
                await self._send(link, request, await self._payload(request))
            case "anchor" if self._pairwise is not None:
                await self._pairwise.serve(link, request)
            case "part":
                _delay_rounds_for(link, request)
                await self._context.parts.serve(link, request)
            case "contribution":
                await self._driver.committer.audits.serve(link, request)
            case "record":
                _delay_rounds_for(link, request)
                commit = self._driver.last_commit(request.subject, request.index)
                await self._send(link, request, messages.pack(commit) if commit else None)
            case _:
                if request.what == "head":
                    link.times_overtaken = max(0, min(request.index, MAX_OVERTAKEN))
                _delay_rounds_for(link, request)
                await self._state.serve(link, request)
                _delay_rounds_for(link, request)

    async def _payload(self, request: messages.Request) -> bytes | None:
        """The answer to a request that observers may send; None if we do not have it."""
        run, links = self._context.run, self._context.links
        match request.what:
            case "settings":
                return json.dumps(run.stated()).encode()
            case "tokenizer" if request.subject == run.tokenizer:
                return tokenizer_piece(self._tokenizer, request.index)
            case "events":
                return await self._pace.make(lambda: self._context.compute(self._event_log.page, request.index))
            case "strikes":
                return json.dumps([dataclasses.asdict(struck) for struck in links.struck(MAX_STRUCK_TOLD)]).encode()
            case "relayed":
                return json.dumps(links.relayed()).encode()
        return None

    async def _send(self, link: Link, request: messages.Request, payload: bytes | None) -> None:
        answer = messages.Answer(request.request, payload is not None, request.what)
        await link.send_bulk(answer, payload or b"", Traffic.STATE, compress=request.what == "events")


def _delay_rounds_for(link: Link, request: messages.Request) -> None:
    """Let rounds wait for this peer's next request for our state or the last mean (`Schedule.waits`)."""
    # A peer that was overtaken wants the state. Another peer that has a lineage may only look at our head.
    looks = request.what in ("head", "history", "record") and not link.times_overtaken
    may_not_want = looks and link.beat is not None and bool(link.beat.lineage)
    until_s = trio.current_time() + (LOOKING_S if may_not_want else PROGRESS_S)
    link.joining_until_s = max(link.joining_until_s, until_s)
