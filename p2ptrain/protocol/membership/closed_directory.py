"""The directory of a closed run: names derived from the run key, and encrypted values.

A stranger cannot compute the names, so it cannot list the run. A node that stores the records sees the names, which
peers store records under one name, how large the records are, and when. What others write there is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2ptrain.protocol.wire.closed_run import ClosedRun
from p2ptrain.protocol.wire.transport import Directory, PeerId


class ClosedDirectory:
    """Implements `Directory` over another one, for the peer `me`. Ignores values that no member has sealed."""

    def __init__(self, directory: Directory, closed: ClosedRun, me: PeerId) -> None:
        self._directory = directory
        self._closed = closed
        self._me = me

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        name = self._closed.hidden_name(key)
        return await self._directory.announce(name, self._closed.seal(value, name, self._me), expires_in_s)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        name = self._closed.hidden_name(key)
        found = await self._directory.lookup(name)
        values = {owner: self._closed.unseal(value, name, owner) for owner, value in found.items()}
        return {owner: value for owner, value in values.items() if value is not None}


def directory_of(directory: Directory, closed: ClosedRun | None, me: PeerId) -> Directory:
    """The directory as members of a run use it."""
    return directory if closed is None else ClosedDirectory(directory, closed, me)
