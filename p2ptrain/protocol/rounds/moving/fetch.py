"""Fetches the parts of a record, once: for the attempt that is READY with them, and for the Commit."""

from __future__ import annotations

import functools

import trio

from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.parallel import in_parallel
from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.deciding.averaging import check_decodes
from p2ptrain.protocol.rounds.deciding.guard import SpanNorms
from p2ptrain.protocol.rounds.deciding.policy import rank
from p2ptrain.protocol.rounds.deciding.record import check_advance, check_record
from p2ptrain.protocol.wire.messages import Head, Record
from p2ptrain.protocol.wire.transport import PeerId


class UnusableMeanError(WireError):
    """A part of the mean, beginning at block `start`, does not decode, or has values that no honest mean has."""

    def __init__(self, start: int, reason: str) -> None:
        super().__init__(reason)
        self.start = start


class _Fetch:
    """The fetch of one record's parts. `error` is its result; before the end, that it was cancelled."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: Exception | None = RoundFailedError("another round came first")
        self.norms: list[tuple[tuple[int, int], float]] = []


class RecordFetcher:
    """Runs at most one fetch, which continues when its waiters are cancelled.

    Attributes:
        head: the head that records must follow; `begin` changes it.
    """

    def __init__(self, context: RoundContext, head: Head) -> None:
        self.head = head
        self._context = context
        self._current: _Fetch | None = None

    def begin(self, head: Head) -> None:
        """After a new head: stop fetching, as the parts are no longer needed."""
        self.head = head
        self._cancel()

    def _cancel(self) -> None:
        if self._current is not None:
            self._current.scope.cancel()
            self._current = None

    async def fetch(self, record: Record) -> SpanNorms:
        """Fetch all parts of a record that follows the head, verified by hash and decodable.

        Returns the squared norm of the mean in each span of the record.

        Raises RoundFailedError (also for unexpected errors), PeerLostError, UnusableMeanError, or another WireError;
        the next call tries again.
        """
        context, head = self._context, self.head
        check_record(record, context.run, context.averaging, context.grid)
        if record.parent_hash != head.state_hash:
            raise RoundFailedError("the record starts from another state than ours")
        check_advance(record, context.run, head)
        if self._current is None or self._current.record != record:
            self._cancel()
            self._current = _Fetch(record)
            context.start_soon(self._run, self._current)
        fetch = self._current
        await fetch.ended.wait()
        if fetch.error is not None:
            raise fetch.error
        return fetch.norms

    def _partners(self, record: Record) -> tuple[list[PeerId], list[PeerId]]:
        """The live peers, and those of them that say that they have the parts of a record, in an order of our own.

        So peers that did not take part in a round do not all ask the same ones.
        """
        context, beats = self._context, self._context.liveness.beats()
        partners = sorted(
            context.host.lineage_peers(), key=lambda peer: rank(context.peer_id + record.parent_hash, peer)
        )
        return partners, [peer for peer in partners if peer in beats and beats[peer].round >= record.round]

    async def _run(self, fetch: _Fetch) -> None:
        context, record = self._context, fetch.record
        with fetch.scope:
            try:
                await context.parts.fetch(record, *self._partners(record))
                check = functools.partial(
                    check_decodes, context.averaging, record, context.parts.get, context.state.num_stepped
                )
                for span in context.averaging.spans(record):
                    try:
                        norms = await in_parallel(context.compute, check, context.grid.bounds(*span))
                    except WireError as error:
                        raise UnusableMeanError(span[0], str(error)) from error
                    fetch.norms.append((span, sum(norms)))
            except (RoundFailedError, PeerLostError, WireError) as error:
                fetch.error = error
            except Exception as error:
                context.errors.note(f"fetching the parts of round {record.round}", error)
                fetch.error = RoundFailedError(f"unexpected error: {error!r}")
            else:
                fetch.error = None
        fetch.ended.set()
        if fetch.error is not None and self._current is fetch:
            self._current = None
