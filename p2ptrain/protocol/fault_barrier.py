"""Keeping an unexpected exception within one turn of a loop that runs for as long as its peer."""

from __future__ import annotations

import logging
from types import TracebackType


class FaultBarrier:
    """A context manager that logs an exception instead of letting it out of the block.

    For work that is done again anyway, such as looking up a key or dialling: a bug, or an unexpected exception of a
    library, costs this one time and nothing else. What is expected is handled inside the block. Each type of exception
    is logged once, with its traceback; more of it would fill the log. Cancellation and KeyboardInterrupt pass.

    Args:
        what: what is being done, for the log; "announcing this peer", for one.
        logger: where it is logged.
    """

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what = what
        self._logger = logger
        self._logged: set[type[BaseException]] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        while isinstance(error, ExceptionGroup):  # of a nursery, whose tasks mostly fail for one reason
            error = error.exceptions[0]
        if type(error) in self._logged:
            self._logger.debug("%s failed again: %r", self._what, error)
        else:
            self._logged.add(type(error))
            self._logger.error("%s failed; it is tried again", self._what, exc_info=error)
        return True
