"""A buffer of fixed capacity, allocated with its first piece.

A bytearray is moved as it grows, and each move touches new pages: for the means of a round that took a third of the
network thread's CPU (measured at 25M parameters). One of full size is filled with zeros, during which no other thread
can use the interpreter; numpy's memory is not filled.
"""

from __future__ import annotations

import numpy as np

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.averaging import Blob


class BoundedBuffer:
    """At most `most_bytes` bytes; `size_bytes` of them are here."""

    def __init__(self, most_bytes: int) -> None:
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._memory = memoryview(b"")

    @classmethod
    def of(cls, data: Blob) -> BoundedBuffer:
        """Bytes that are all here."""
        whole = cls(len(data))
        whole._memory, whole.size_bytes = memoryview(data), len(data)
        return whole

    @property
    def data(self) -> memoryview:
        """The bytes so far, which do not change."""
        return self._memory[: self.size_bytes]

    def emptied(self) -> BoundedBuffer:
        """An empty buffer of the same capacity."""
        return BoundedBuffer(self._most_bytes)

    def extend(self, data: Blob) -> None:
        """Append bytes. Raises WireError if there are more than `most_bytes` then."""
        start, stop = self.size_bytes, self.size_bytes + len(data)
        if stop > self._most_bytes:
            raise WireError(f"more than {self._most_bytes} bytes of a mean")
        if not self._memory:
            self._memory = np.empty(self._most_bytes, np.uint8).data
        self._memory[start:stop] = data
        self.size_bytes = stop
