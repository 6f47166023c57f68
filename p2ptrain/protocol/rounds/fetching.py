"""Bringing a record's parts here, once: a member that is fetching when the Commit comes does not begin anew."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from p2ptrain.algorithms.codec import Codec
from p2ptrain.errors import PeerLostError, RoundFailedError, WireError
from p2ptrain.protocol.parts import PartStore
from p2ptrain.protocol.rounds.ballot import record_sha256
from p2ptrain.protocol.rounds.contribution import check_decodes
from p2ptrain.protocol.wire.messages import Record
from p2ptrain.protocol.wire.transport import Compute, PeerId


class _Fetch:
    """Parts of one record on their way; `error` says how it ended, and that it was cancelled until it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: Exception | None = RoundFailedError("another round came first")


class RecordFetcher:
    """Holds at most one fetch, which outlives those who wait for it."""

    def __init__(self, parts: PartStore, compute: Compute) -> None:
        self._parts = parts
        self._compute = compute
        self._current: _Fetch | None = None

    async def fetch(self, record: Record, codec: Codec, others: Sequence[PeerId], nursery: trio.Nursery) -> None:
        """Hold all parts of a record, verified by hash and decodable. The work is done in `nursery`.

        Raises RoundFailedError, PeerLostError or WireError; the next call then tries again.
        """
        name = record_sha256(record)
        if self._current is None or self._current.name != name:
            self.cancel()
            self._current = _Fetch(name)
            nursery.start_soon(self._run, self._current, record, codec, others)
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

    async def _run(self, fetch: _Fetch, record: Record, codec: Codec, others: Sequence[PeerId]) -> None:
        with fetch.scope:
            try:
                await self._parts.fetch(record, codec, others)
                for part in record.parts:
                    data = self._parts.get(part.sha256)
                    await self._compute(check_decodes, codec, data, (part.start, part.stop))
            except (RoundFailedError, PeerLostError, WireError) as error:
                fetch.error = error
            else:
                fetch.error = None
        fetch.ended.set()
        if fetch.error is not None and self._current is fetch:
            self._current = None
