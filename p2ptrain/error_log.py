"""Logs contained exceptions: each bug once with its traceback."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def containing(self, what: str, then: str = "it is tried again") -> Iterator[None]:
        """A block of work whose failure costs little: logs and suppresses any `Exception`.

        Args:
            what: the action in the block: "announcing this peer".
            then: the consequence if it fails.
        """
        try:
            yield
        except Exception as error:
            self.note(f"{what} failed; {then}", error)


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
