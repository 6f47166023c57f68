"""Logs contained exceptions: each bug once with its traceback."""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

# Bugs remembered; beyond it one may be logged again.
MAX_REMEMBERED = 256

Bug = tuple[type[BaseException], str, int]


class ErrorLog:
    """Logs to `logger`. Any thread may call it; it never raises."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[Bug] = set()

    def note(self, where: str, error: BaseException) -> None:
        """Log an exception with its traceback; if that bug was logged before, one line at DEBUG.

        Args:
            where: the failed action and the consequence: "handling Fragment of QmX; its link is closed".
        """
        bug = _bug(error)
        if bug in self._seen:
            self._logger.debug("%s: %r", where, error)
            return
        if len(self._seen) >= MAX_REMEMBERED:
            self._seen.clear()
        self._seen.add(bug)
        self._logger.error("%s: %r; please report this", where, error, exc_info=error)

    def containing(self, what: str) -> Containment:
        """A reusable context manager for work that is repeated anyway: logs and suppresses any `Exception`.

        Args:
            what: the action in the block: "announcing this peer".
        """
        return Containment(self, what)


class Containment:
    """See `ErrorLog.containing`."""

    def __init__(self, errors: ErrorLog, what: str) -> None:
        self._errors = errors
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._errors.note(f"{self._what} failed; it is tried again", error)
        return True


def innermost(error: BaseException) -> BaseException:
    """The first exception within nested groups, or the exception itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _bug(error: BaseException) -> Bug:
    """Its type and the line that raised it."""
    error = innermost(error)
    frames = traceback.extract_tb(error.__traceback__)
    return (type(error), frames[-1].filename, frames[-1].lineno or 0) if frames else (type(error), str(error), 0)
