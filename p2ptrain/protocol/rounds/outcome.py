"""Bringing decided rounds home: fetch a record's bytes, take its step, land it; try again where that fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.exchange.types import Landing, RoundReport
from p2ptrain.protocol.rounds.commit import Committer, check_record
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.fetching import RecordFetcher
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.rounds.part_store import KEEP_ALL_S
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker
from p2ptrain.protocol.wire.messages import Head, Record

logger = logging.getLogger(__name__)

# An outcome that could not be brought home is tried again after this, so many times (guess).
RETRY_S, MAX_RETRIES = 5.0, 5


class RoundEvents(Protocol):
    """What the node is told."""

    def round_ended(self, report: RoundReport) -> None: ...

    def fall_behind(self, reason: str) -> None:
        """This peer cannot follow by records any more: replace the whole state."""
        ...


class Outcomes:
    """Brings home one outcome at a time.

    Args:
        stand_at: called with the new head once the state is that of a record.
        ended: called when an outcome has landed or failed, or the state was replaced.

    Attributes:
        resolving: whether an outcome is being brought home, or the state replaced.
        lacking: a record of which somebody says that it was committed, and whose parts are nowhere to be had.
    """

    def __init__(
        self,
        context: RoundContext,
        taker: SnapshotTaker,
        liveness: Liveness,
        events: RoundEvents,
        stand_at: Callable[[Head], None],
        ended: Callable[[], None],
    ) -> None:
        self.resolving = False
        self.lacking: Record | None = None
        self._context = context
        self._taker = taker
        self._liveness = liveness
        self._events = events
        self._stand_at = stand_at
        self._ended = ended
        self._committer = Committer(context)
        self._fetcher = RecordFetcher(context.parts, context.averaging, context.compute, context.errors)
        self._retries = 0
        self._retry_s = 0.0
        self._stands = False
        self._free = trio.Event()
        self._free.set()
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Run in this nursery from now on."""
        self._nursery = nursery

    def forget(self) -> None:
        """We stand at another head: what was under way for the one before is of no use."""
        self._committer.forget()
        self._fetcher.cancel()
        self._retries, self.lacking = 0, None

    @property
    def interrupted(self) -> bool:
        """Whether the anchor is half-way between two heads, as an outer step failed."""
        return self._committer.interrupted

    @property
    def busy(self) -> bool:
        """Whether the anchor is being replaced, so that it must not be read."""
        return self._committer.stepping

    @property
    def lock(self) -> trio.Lock:
        """Held while the anchor is being replaced; hold it to copy a consistent one."""
        return self._committer.lock

    async def land(self, landing: Landing) -> None:
        """Hand a landing to the training thread and wait until it has taken effect; one at a time."""
        await self._committer.land(landing)

    @asynccontextmanager
    async def held_off(self, begin: Callable[[], None]) -> AsyncIterator[None]:
        """Bring nothing home while the whole state is replaced; waits until an outcome under way has landed."""
        while self.resolving:
            await self._free.wait()
        self.resolving = self._committer.stepping = True
        self._free = trio.Event()
        begin()
        try:
            async with self.lock:
                yield
        finally:
            self._committer.stepping = False
            self._end()

    async def fetch(self, record: Record, parent_sha256: str) -> None:
        """Hold all parts of a record that starts from this state, verified by hash and decodable.

        Raises RoundFailedError, PeerLostError or WireError.
        """
        check_record(record, self._context.state, self._context.averaging)
        if record.parent_sha256 != parent_sha256:
            raise RoundFailedError("the record starts from another state than ours")
        assert self._nursery is not None
        await self._fetcher.fetch(record, self._liveness.peers.trainers(), self._nursery)

    def prefetch(self, record: Record, parent_sha256: str) -> None:
        """Fetch the parts of a record of which it is not shown yet that it was committed, unless others come in."""
        if not self._fetcher.needed and self._nursery is not None:
            self._nursery.start_soon(self._prefetch, record, parent_sha256)

    async def _prefetch(self, record: Record, parent_sha256: str) -> None:
        try:
            await self.fetch(record, parent_sha256)
        except (RoundFailedError, PeerLostError, WireError) as error:
            logger.debug("round %d: %s", record.round, error)
            if isinstance(error, PeerLostError):
                self.lacking = record
                self._ended()
        except Exception as error:
            self._context.errors.note(f"fetching the parts of round {record.round}", error)

    def resolve(self, record: Record, parent_sha256: str) -> None:
        """Bring this outcome home, in a task: what cannot be had any more ends in `fall_behind`."""
        assert self._nursery is not None
        assert not self.resolving
        self.resolving = True
        self._free = trio.Event()
        self._nursery.start_soon(self._resolve, record, parent_sha256)

    def retry(self, record: Record, parent_sha256: str, now: float) -> None:
        """The outcome is known, and could not be brought home: try again, unless the state is replaced before."""
        if not self.resolving and self._retries <= MAX_RETRIES and now >= self._retry_s:
            self.resolve(record, parent_sha256)

    async def _resolve(self, record: Record, parent_sha256: str) -> None:
        try:
            self._stands = False
            await self.fetch(record, parent_sha256)
            await self._commit(record)
        except (RoundFailedError, PeerLostError, WireError) as error:
            self._cannot_adopt(record, str(error))
        except Exception as error:
            # Our bug. The round is decided and stays so: it is tried again, and the whole state replaced if need be.
            self._context.errors.note(f"bringing round {record.round} home", error)
            self._cannot_adopt(record, f"unexpected error: {error!r}")
        finally:
            self._end()

    def _end(self) -> None:
        self.resolving = False
        self._free.set()
        self._ended()

    def _cannot_adopt(self, record: Record, reason: str) -> None:
        if self._stands:
            return  # what failed came after the step
        self._retries += 1
        self._retry_s = trio.current_time() + RETRY_S
        self._events.fall_behind(f"round {record.round} cannot be adopted: {reason}")

    async def _commit(self, record: Record) -> None:
        """Take the outer step, land it, and say so."""
        contributors = ((c.peer_id, c.incarnation) for c in record.contributors)
        included = self._taker.own is not None and self._liveness.own in contributors

        def stand_at(head: Head) -> None:
            if self._taker.own is not None:
                self._context.timeouts.note_round(self._taker.spent().wall_s)
            self._stand_at(head)
            self._stands = True

        report = await self._committer.commit(record, self._taker, included=included, stand_at=stand_at)
        assert self._nursery is not None
        self._nursery.start_soon(self._trim_later, record)
        self._events.round_ended(report)

    async def _trim_later(self, record: Record) -> None:
        await trio.sleep(KEEP_ALL_S)
        # Not while there are parts in the store of a record that may still be committed, or while we average.
        if not self.resolving and not self._fetcher.needed and self._taker.own is None:
            self._context.parts.trim(record, self._context.peer_id)
