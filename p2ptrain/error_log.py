"""Logs exceptions that were contained: each bug once with its traceback, however often it strikes again."""

from __future__ import annotations

import logging
import traceback

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
