"""Answers the requests of other peers, with a bound on the memory of all answers together."""

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

# Requests of one peer served at once; more are answered with "busy". A joiner has 24 in flight, and requests of rounds
# beside them. Observers send one after the other.
MAX_SERVED_AT_ONCE = 32
MAX_SERVED_TO_OBSERVER = 2
# Answers that are made and sent at once, to all peers together; more wait. Pages of events have 256 KiB, pieces of a
# part 128 KiB, other answers at most 1 MiB. Each kind has its own limit: rounds do not wait for slow joiners.
MAX_PAGES = 128
MAX_PIECES = 512
MAX_STATE_ANSWERS = 128
# Rounds wait for a joiner that may ask for more of the state within this time. Chunks take seconds (guess).
PROGRESS_S = 30.0
# Rounds wait this long for a peer that asked only for our head or history; it may not want our state (guess).
LOOKING_S = 5.0
# Larger claims are cut to this; rounds wait no longer after the fourth.
MAX_OVERTAKEN = 16
# What observers may ask for.
FOR_OBSERVERS = ("settings", "tokenizer", "events", "strikes", "relayed")
# Peers in an answer about strikes: 64 of 400 bytes.
MAX_STRUCK_TOLD = 64


class RequestServer:
    """Serves this peer's state, parts of the last round, settings, tokenizer, events, strikes and relayed links.

    `buffers` serializes the model's buffers, and `tokenizer` is the content of the run's tokenizer file.
    """

    def __init__(
        self,
        engine: RoundDriver,
        pairwise: Pairwise | None,
        buffers: Callable[[], bytes],
        event_log: EventLog,
        tokenizer: bytes,
    ) -> None:
        self._engine = engine
        self._pairwise = pairwise
        self._context = engine.context
        self._state = StateServer(engine, buffers)
        self._event_log = event_log
        self._tokenizer = tokenizer
        self._pace = RateLimit(RATE_BYTES_S)
        self._serving: Counter[PeerId] = Counter()
        self._pages = trio.CapacityLimiter(MAX_PAGES)
        self._pieces = trio.CapacityLimiter(MAX_PIECES)
        self._state_answers = trio.CapacityLimiter(MAX_STATE_ANSWERS)

    def take(self, nursery: trio.Nursery, link: Link, request: messages.Request) -> None:
        """Answer a request in a task; an error there closes the link. Refuses requests beyond the limits."""
        member = link.hello.role == TRAINER
        if self._serving[link.peer_id] >= (MAX_SERVED_AT_ONCE if member else MAX_SERVED_TO_OBSERVER):
            link.send(messages.Answer(request.request, False, "busy"))
        elif not member and request.what not in FOR_OBSERVERS:
            link.send(messages.Answer(request.request, False, "for members of the run"))
        else:
            self._serving[link.peer_id] += 1
            nursery.start_soon(self._serve, link, request)

    async def _serve(self, link: Link, request: messages.Request) -> None:
        limiter = {"events": self._pages, **dict.fromkeys(("part", "record", "contribution"), self._pieces)}.get(
            request.what, self._state_answers
        )
        try:
            what = f"answering a request for {request.what[:40]!r}"
            with link.in_use(), self._context.links.containing(link, what):
                async with limiter:
                    await self._answer(link, request)
        finally:
            self._serving[link.peer_id] -= 1
            if not self._serving[link.peer_id]:
                del self._serving[link.peer_id]

    async def _answer(self, link: Link, request: messages.Request) -> None:
        match request.what:
            case "settings":
                settings = json.dumps(self._context.run.stated()).encode()
                await link.send_bulk(messages.Answer(request.request, True, "settings"), settings, Traffic.STATE)
            case "tokenizer":
                piece = None
                if request.subject == self._context.run.tokenizer:
                    piece = tokenizer_piece(self._tokenizer, request.index)
                answer = messages.Answer(request.request, piece is not None, "tokenizer")
                await link.send_bulk(answer, piece or b"", Traffic.STATE)
            case "events":
                page = await self._pace.make(lambda: self._context.compute(self._event_log.page, request.index))
                answer = messages.Answer(request.request, True, "events")
                await link.send_bulk(answer, page, Traffic.STATE, compress=True)
            case "strikes":
                struck = json.dumps([dataclasses.asdict(s) for s in self._context.links.struck(MAX_STRUCK_TOLD)])
                await link.send_bulk(messages.Answer(request.request, True, "strikes"), struck.encode(), Traffic.STATE)
            case "relayed":
                relayed = json.dumps(self._context.links.relayed()).encode()
                await link.send_bulk(messages.Answer(request.request, True, "relayed"), relayed, Traffic.STATE)
            case "anchor" if self._pairwise is not None:
                await self._pairwise.serve(link, request)
            case "part":
                _delay_rounds_for(link, request)
                await self._context.parts.serve(link, request)
            case "contribution":
                await self._engine.committer.audits.serve(link, request)
            case "record":
                _delay_rounds_for(link, request)
                commit = self._engine.last_commit(request.subject, request.index)
                answer = messages.Answer(request.request, commit is not None, "record")
                await link.send_bulk(answer, messages.pack(commit) if commit else b"", Traffic.STATE)
            case _:
                if request.what == "head":
                    link.times_overtaken = max(0, min(request.index, MAX_OVERTAKEN))
                _delay_rounds_for(link, request)
                await self._state.serve(link, request)
                _delay_rounds_for(link, request)


def _delay_rounds_for(link: Link, request: messages.Request) -> None:
    """Let rounds wait for this peer's next request for our state or the last mean (`Schedule.waits`)."""
    # One that was overtaken wants the state; another one with a lineage may only look at our head.
    looks = request.what in ("head", "history", "record") and not link.times_overtaken
    may_not_want = looks and link.beat is not None and bool(link.beat.lineage)
    until_s = trio.current_time() + (LOOKING_S if may_not_want else PROGRESS_S)
    link.joining_until_s = max(link.joining_until_s, until_s)
