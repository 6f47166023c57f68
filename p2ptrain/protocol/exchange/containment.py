"""Contains errors of transfers: such an error costs that transfer, and neither the step nor the peer.

A GPU may run out of memory at any time: training may need more than before, another process may take it, or the free
memory may be in pieces. Training goes on, and the log tells what was left out or is late.
"""

from __future__ import annotations

import logging

import torch

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError

logger = logging.getLogger(__name__)

# Kinds of transfers that are remembered, each round being one. If there are more, one may be logged again.
MAX_REMEMBERED = 256


class Containment:
    """Logs contained errors: each bug once, and too little memory on a GPU once for each kind of transfer."""

    def __init__(self) -> None:
        self._errors = ErrorLog(logger)
        self._short: set[str] = set()

    def note(self, what: str, then: str, error: Exception) -> None:
        """Log an error of a transfer, such as "gathering a fragment", and the consequence: "it is not sent".

        Raises the error if a process of our own group is lost, as no step can do without it.
        """
        if isinstance(error, PeerLostError):
            raise error
        if not isinstance(error, torch.cuda.OutOfMemoryError):
            self._errors.note(f"{what} failed; {then}", error)
            return
        level = logging.DEBUG if what in self._short else logging.WARNING
        if len(self._short) >= MAX_REMEMBERED:
            self._short.clear()
        self._short.add(what)
        text = str(error).partition("\n")[0]
        logger.log(level, "too little memory on the GPU for %s; %s. Use a smaller micro-batch (%s)", what, then, text)
