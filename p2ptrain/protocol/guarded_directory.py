"""A directory whose errors mean what an unreachable one means: nothing was stored, nothing is found."""

from __future__ import annotations

from collections.abc import Mapping

from p2ptrain.error_log import ErrorLog
from p2ptrain.protocol.wire.transport import Directory, PeerId


class GuardedDirectory:
    """Implements `protocol.transport.Directory` over another one, and never raises.

    The owner announces and looks up again and again, so a failed call costs no more than the time until the next.
    """

    def __init__(self, directory: Directory, errors: ErrorLog) -> None:
        self._directory = directory
        self._errors = errors

    async def announce(self, key: str, value: bytes, expires_in_s: float) -> bool:
        try:
            return await self._directory.announce(key, value, expires_in_s)
        except Exception as error:
            self._errors.note("announcing this peer; it will be tried again", error)
            return False

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        try:
            return await self._directory.lookup(key)
        except Exception as error:
            self._errors.note("looking for other peers; it will be tried again", error)
            return {}
