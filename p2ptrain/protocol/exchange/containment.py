"""An error of a transfer costs that transfer, and neither the step nor the peer.

A GPU may have less memory than it seems: training takes more than it ever did, another process takes it, or what is
free is in pieces. Training goes on, and what was left out or is late is said in the log.
"""

from __future__ import annotations

import logging

import torch

from p2ptrain.error_log import ErrorLog
from p2ptrain.errors import PeerLostError

logger = logging.getLogger(__name__)

# Kinds of transfers remembered, rounds among them; beyond it one may be told again.
MAX_REMEMBERED = 256


class Containment:
    """Logs contained errors: each bug once, and once for each kind of transfer that the memory of a device is short."""

    def __init__(self) -> None:
        self._errors = ErrorLog(logger)
        self._short: set[str] = set()

    def note(self, what: str, then: str, error: Exception) -> None:
        """Log an error of a transfer, such as "gathering a fragment", and the consequence: "it is not sent".

        Raises it if a process of our own group is lost: no later step can do without it.
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
