"""How many bytes all links together may hold of frames that are not handled yet.

Whoever wants a share waits for it, first come, first served. A sender that never finishes its frame would keep its
share: once somebody has waited for a while, the oldest unfinished frame is given up, and its link with it.
"""

from __future__ import annotations

import trio

# Sixteen frames of the largest size, or 512 chunks of a round (guess).
MAX_RECEIVE_BYTES = 64 * 1024 * 1024
# So long a frame may stay unfinished while others wait for its share. 4 MiB take as long at 11 Mbit/s, and all of 128
# streams that never finish theirs have had their turn within the 30 s after which a partner gives up (guess).
GIVE_UP_AFTER_S = 3.0


class Share:
    """Bytes of the budget that one frame holds.

    Attributes:
        since_s: when it was taken.
        receiving: cancelled to give the frame up while it is incomplete; None once it is complete.
    """

    def __init__(self, size_bytes: int, since_s: float) -> None:
        self.size_bytes = size_bytes
        self.since_s = since_s
        self.receiving: trio.CancelScope | None = trio.CancelScope()


class ReceiveBudget:
    """Owns the bytes. One for all links of a peer."""

    def __init__(self, limit_bytes: int = MAX_RECEIVE_BYTES) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._shares: dict[Share, None] = {}  # oldest first
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.Event()

    async def take(self, size_bytes: int) -> Share:
        """Wait until these bytes fit, and take them; `release` the share when the frame has been handled.

        One frame always fits, however large.
        """
        if self._turn.locked() or not self._fits(size_bytes):
            async with self._turn:
                while not self._fits(size_bytes):
                    freed = self._freed = trio.Event()
                    with trio.move_on_at(self._give_up_oldest()):
                        await freed.wait()
                return self._grant(size_bytes)
        return self._grant(size_bytes)

    def release(self, share: Share) -> None:
        """Give a share back."""
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
        """Give up the oldest unfinished frame if it is old enough. Returns when to look again."""
        now = trio.current_time()
        for share in self._shares:
            if share.receiving is not None and not share.receiving.cancel_called:
                if now < share.since_s + GIVE_UP_AFTER_S:
                    return share.since_s + GIVE_UP_AFTER_S
                share.receiving.cancel()
                break
        return now + GIVE_UP_AFTER_S
