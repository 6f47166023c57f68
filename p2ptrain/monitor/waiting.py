"""Logs what a command waits for, if that takes more than a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# Most waits are shorter, and need no message (guess).
SAY_AFTER_S = 1.0


@contextmanager
def saying_what_for(what: str, at_most_s: float) -> Iterator[None]:
    """Log `what` and the time limit if the block takes longer than SAY_AFTER_S."""
    timer = threading.Timer(SAY_AFTER_S, logger.info, ("%s; this takes up to %.0f s", what, at_most_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
