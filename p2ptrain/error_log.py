"""Logs exceptions that were contained: each bug once with its traceback, however often it strikes again."""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

# Bugs remembered. Beyond that one may be logged again, which does no harm.
MAX_REMEMBERED = 256

Bug = tuple[type[BaseException], str, int]


class ErrorLog:
    """Takes exceptions that must not spread. Any thread may call it; it never raises.

    Args:
        logger: where they are logged.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[Bug] = set()

    def note(self, where: str, error: BaseException) -> None:
        """Log an exception as an error with its traceback; one line at DEBUG when that bug was logged before.

        Args:
            where: what failed, and what it cost: "handling Fragment of QmX; its link is closed".
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
        """A context manager for work that is done again anyway, such as a look-up: an exception costs this one time.

        It may be used again and again. Handle what is expected inside the block. Cancellation and KeyboardInterrupt
        pass.

        Args:
            what: what is done in the block: "announcing this peer".
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
    """Its type, and the line that raised it."""
    error = innermost(error)
    frames = traceback.extract_tb(error.__traceback__)
    return (type(error), frames[-1].filename, frames[-1].lineno or 0) if frames else (type(error), str(error), 0)
