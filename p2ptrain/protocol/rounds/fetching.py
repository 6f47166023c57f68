"""Fetching a record's parts once, for the attempt and for the Commit."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.rounds.averaging.strategy import Averaging
from p2ptrain.protocol.rounds.commit import check_decodes
from p2ptrain.protocol.rounds.part_store import PartStore
from p2ptrain.protocol.rounds.quorum import record_sha256
from p2ptrain.protocol.wire.messages import Record
from p2ptrain.protocol.wire.transport import Compute, PeerId


class _Fetch:
    """The fetch of one record's parts. `error` is its result; before the end, that it was cancelled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: Exception | None = RoundFailedError("another round came first")


class RecordFetcher:
    """Runs at most one fetch, which continues when its waiters are cancelled."""

    def __init__(self, parts: PartStore, averaging: Averaging, compute: Compute, errors: ErrorLog) -> None:
        self._parts = parts
        self._averaging = averaging
        self._compute = compute
        self._errors = errors
        self._current: _Fetch | None = None

    async def fetch(self, record: Record, others: Sequence[PeerId], nursery: trio.Nursery) -> None:
        """Fetch all parts of a record, verified by hash and decodable; in a task of `nursery`.

        Raises RoundFailedError (also for unexpected errors), PeerLostError or WireError; the next call tries again.
        """
        name = record_sha256(record)
        if self._current is None or self._current.name != name:
            self.cancel()
            self._current = _Fetch(name)
            nursery.start_soon(self._run, self._current, record, others)
        fetch = self._current
        await fetch.ended.wait()
        if fetch.error is not None:
            raise fetch.error

    @property
    def needed(self) -> bool:
        """Whether parts must be kept: of a record that is being fetched, or was fetched and may still be committed."""
        return self._current is not None

    def cancel(self) -> None:
        """Stop fetching: the parts are no longer needed."""
        if self._current is not None:
            self._current.scope.cancel()
            self._current = None

    async def _run(self, fetch: _Fetch, record: Record, others: Sequence[PeerId]) -> None:
        with fetch.scope:
            try:
                await self._parts.fetch(record, others)
                for span in self._averaging.spans(record):
                    await self._compute(check_decodes, self._averaging, record, self._parts.get, span)
            except (RoundFailedError, PeerLostError, WireError) as error:
                fetch.error = error
            except Exception as error:
                self._errors.note(f"fetching the parts of round {record.round}", error)
                fetch.error = RoundFailedError(f"unexpected error: {error!r}")
            else:
                fetch.error = None
        fetch.ended.set()
        if fetch.error is not None and self._current is fetch:
            self._current = None
