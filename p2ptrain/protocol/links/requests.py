"""Sends requests on all links, and gives each answer to the task that waits for it. Untaken answers are bounded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import trio

from p2ptrain.errors import PeerLostError, WireError
from p2ptrain.protocol.links.link import Link
from p2ptrain.protocol.wire.messages import Answer, Request
from p2ptrain.protocol.wire.transport import PeerId

# Answers that no task has taken yet. The link whose answer exceeds this is closed.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
# Each answer on a link restarts the time-outs of the requests that wait there. In all, a request waits for at most this
# many time-outs (guess).
MAX_TIMEOUTS = 8


@dataclass(slots=True)
class _Asked:
    """A request that a peer may answer once."""

    peer_id: PeerId
    answer: tuple[Answer, bytes] | None = None
    answered: trio.Event = field(default_factory=trio.Event)


class Requests:
    """The requests that wait for an answer."""

    def __init__(self) -> None:
        self._answer_bytes = 0
        self._waiting: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)

    async def ask(self, link: Link, what: str, subject: str, index: int, timeout_s: float) -> tuple[Answer, bytes]:
        """See `Links.request`."""
        number = next(self._numbers)
        asked = self._waiting[number] = _Asked(link.peer_id)
        try:
            link.send(Request(number, what, subject, index))

            async def watch() -> None:
                with link.in_use():
                    await link.lost.wait()
                nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                deadline = trio.current_time() + timeout_s
                latest = trio.current_time() + MAX_TIMEOUTS * timeout_s
                while not asked.answered.is_set() and trio.current_time() < deadline:
                    with trio.move_on_at(deadline):
                        await asked.answered.wait()
                    deadline = min(latest, max(deadline, link.answered_s + timeout_s))
                nursery.cancel_scope.cancel()
            if asked.answer is None:
                waited_s = MAX_TIMEOUTS * timeout_s if deadline >= latest else timeout_s
                raise PeerLostError(f"{link.peer_id}: {link.lost_reason or f'no answer within {waited_s:.0f} s'}")
            return asked.answer
        finally:
            del self._waiting[number]
            if asked.answer is not None:
                self._answer_bytes -= len(asked.answer[1])

    def take(self, link: Link, answer: Answer, payload: bytes) -> None:
        """Give an answer to the task that waits for it.

        Raises WireError if the peer sends too many answers without a request, or two for one, and PeerLostError if too
        many bytes of answers wait.
        """
        asked = self._waiting.get(answer.request)
        if asked is None or asked.peer_id != link.peer_id:
            link.rates.check_unasked(len(payload), trio.current_time())
            return
        if asked.answer is not None:
            raise WireError("answered one request twice")
        asked.answer = (answer, payload)
        asked.answered.set()
        link.answered_s = trio.current_time()
        self._answer_bytes += len(payload)
        if self._answer_bytes > MAX_ANSWER_BYTES:
            raise PeerLostError("more answers arrived than were taken")
