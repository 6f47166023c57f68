"""Limits the bytes of received frames that all links together hold, compressed and decompressed.

Shares are granted first come, first served. While a reader waits, the oldest incomplete frame is cancelled after
`GIVE_UP_AFTER_S` and its link closed, so that a sender that never completes its frame cannot keep its share.
"""

from __future__ import annotations

import trio

# Sixteen frames of the largest size, or 512 chunks of a round (guess).
MAX_RECEIVE_BYTES = 64 * 1024 * 1024
# How long a frame may stay incomplete while others wait. 4 MiB take this long at 11 Mbit/s, and 128 streams that never
# complete theirs are all closed within the 30 s after which a peer gives up (guess).
GIVE_UP_AFTER_S = 3.0


class Share:
    """Bytes of the budget that one frame holds. `receiving`: cancels an incomplete frame; None once it is complete."""

    def __init__(self, size_bytes: int, since_s: float) -> None:
        self.size_bytes = size_bytes
        self.since_s = since_s
        self.receiving: trio.CancelScope | None = trio.CancelScope()


class ReceiveBudget:
    """One for all links of a peer."""

    def __init__(self, limit_bytes: int = MAX_RECEIVE_BYTES) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._shares: dict[Share, None] = {}  # oldest first
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.Event()

    async def take(self, size_bytes: int) -> Share:
        """Wait until these bytes fit, and take them; one frame always fits. `release` the share afterwards."""
        if self._turn.locked() or not self._fits(size_bytes):
            async with self._turn:
                while not self._fits(size_bytes):
                    freed = self._freed = trio.Event()
                    with trio.move_on_at(self._give_up_oldest()):
                        await freed.wait()
                return self._grant(size_bytes)
        return self._grant(size_bytes)

    def release(self, share: Share) -> None:
        """Return a share."""
        del self._shares[share]
        self.held_bytes -= share.size_bytes
        self._freed.set()

    def _fits(self, size_bytes: int) -> bool:
        return not self._shares or self.held_bytes + size_bytes <= self._limit_bytes

    def _grant(self, size_bytes: int) -> Share:
        share = Share(size_bytes, trio.current_time())
        self._shares[share] = None
        self.held_bytes += size_bytes
        return share

    def _give_up_oldest(self) -> float:
        """Cancel the oldest incomplete frame if it is old enough. Returns when to check again."""
        now = trio.current_time()
        for share in self._shares:
            if share.receiving is not None and not share.receiving.cancel_called:
                if now < share.since_s + GIVE_UP_AFTER_S:
                    return share.since_s + GIVE_UP_AFTER_S
                share.receiving.cancel()
                break
        return now + GIVE_UP_AFTER_S
