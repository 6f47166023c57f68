"""Fetching a record's parts, once: a member that is fetching when the Commit comes does not begin anew."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.rounds.averaging.strategy import Averaging
from p2ptrain.protocol.rounds.commit import check_decodes
from p2ptrain.protocol.rounds.part_store import PartStore
from p2ptrain.protocol.rounds.quorum import record_sha256
from p2ptrain.protocol.wire.messages import Record
from p2ptrain.protocol.wire.transport import Compute, PeerId

logger = logging.getLogger(__name__)


class _Fetch:
    """Parts of one record on their way; `error` says how it ended, and that it was cancelled until it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: Exception | None = RoundFailedError("another round came first")


class RecordFetcher:
    """Holds at most one fetch, which outlives those who wait for it."""

    def __init__(self, parts: PartStore, averaging: Averaging, compute: Compute) -> None:
        self._parts = parts
        self._averaging = averaging
        self._compute = compute
        self._current: _Fetch | None = None

    async def fetch(self, record: Record, others: Sequence[PeerId], nursery: trio.Nursery) -> None:
        """Hold all parts of a record, verified by hash and decodable. The work is done in `nursery`.

        Raises RoundFailedError, PeerLostError or WireError (whatever else goes wrong is a RoundFailedError too); the
        next call then tries again.
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
        """Whether parts that are here must be kept: of a record that is being fetched, or was for an attempt that ended
        since, and whose Commit may still come."""
        return self._current is not None

    def cancel(self) -> None:
        """The parts are not needed any more."""
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
                # Our bug; it is for those who wait to see what it costs.
                logger.exception("the parts of round %d could not be fetched", record.round)
                fetch.error = RoundFailedError(f"unexpected error: {error!r}")
            else:
                fetch.error = None
        fetch.ended.set()
        if fetch.error is not None and self._current is fetch:
            self._current = None
