"""One part of one attempt at its reducer: collect encoded outer gradients, then average exactly who was named.

Chunks are kept encoded until the leader names the contributors, because only then is it known whose are counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.algorithms.averaging import disjoint_mean, weighted_mean
from p2ptrain.algorithms.codec import Codec
from p2ptrain.algorithms.metrics import encoded_gram
from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.contribution import chunk_bounds
from p2ptrain.protocol.rounds.pace import Pace
from p2ptrain.protocol.wire.transport import PeerId

# Outer gradients are compared in pairs where there are at most so many, in about so many chunks of each part.
MAX_COMPARED = 16
SAMPLED_CHUNKS = 8


@dataclass(frozen=True)
class Reduced:
    """The encoded mean of one part, its SHA-256, and the inner products of the outer gradients there, row by row."""

    data: bytearray
    sha256: str
    gram: tuple[float, ...]


class Reduction:
    """Collects the chunks of part number `part`, blocks [start, stop), from `members`."""

    def __init__(
        self, part: int, start: int, stop: int, members: Sequence[PeerId], codec: Codec, pace: Pace, now: float
    ) -> None:
        self.part, self.start, self.stop = part, start, stop
        self.complete: set[PeerId] = set()
        self.failed: set[PeerId] = set()
        self._codec = codec
        self._pace = pace
        self._bounds = chunk_bounds(start, stop)
        self._stop_of = dict(self._bounds)
        self._chunks: dict[PeerId, dict[int, bytes]] = {member: {} for member in members}
        self._progress_at = dict.fromkeys(members, now)

    def add(self, sender: PeerId, start: int, stop: int, data: bytes, now: float) -> bool:
        """Take one chunk. True when its sender has become complete. Raises WireError on a chunk off the plan."""
        if sender not in self._chunks or sender in self.failed:
            return False
        if self._stop_of.get(start) != stop:
            raise WireError(f"chunk [{start}, {stop}) is not of part [{self.start}, {self.stop})")
        if len(data) != self._codec.size_bytes(stop - start):
            raise WireError(f"chunk [{start}, {stop}) has {len(data)} bytes")
        chunks = self._chunks[sender]
        chunks[start] = data
        self._pace.note_wait(sender, now - self._progress_at[sender])
        self._progress_at[sender] = now
        if len(chunks) == len(self._bounds) and sender not in self.complete:
            self.complete.add(sender)
            return True
        return False

    def fail(self, sender: PeerId) -> bool:
        """Give up on a sender; True when it was still awaited."""
        if sender not in self._chunks or sender in self.complete or sender in self.failed:
            return False
        self.failed.add(sender)
        self._chunks[sender] = {}
        return True

    def give_up_stalled(self, now: float, rtt_s: dict[PeerId, float]) -> bool:
        """Leave out those still awaited who have made no progress for too long; True when there were any."""
        stalled = [
            sender
            for sender, at in self._progress_at.items()
            if sender not in self.complete | self.failed
            and now - at > self._pace.stall_s(sender, rtt_s.get(sender, 0.0), first=not self._chunks[sender])
        ]
        for sender in stalled:
            self._pace.note_wait(sender, now - self._progress_at[sender])
            self.fail(sender)
        return bool(stalled)

    def reduce(
        self, contributors: Sequence[tuple[PeerId, float]], mean_codec: Codec, *, disjoint: bool, num_compared: int
    ) -> Reduced:
        """Average exactly these contributors over this part. Raises WireError on values that do not decode.

        The first `num_compared` blocks of the whole vector are outer gradients that are compared with each other.

        Heavy: call it in a worker thread. Chunks are dropped as they are averaged.
        """
        merge = disjoint_mean if disjoint else weighted_mean
        averaged = bytearray()
        products = np.zeros((len(contributors), len(contributors)))
        comparable = {start: min(stop, num_compared) - start for start, stop in self._bounds if start < num_compared}
        sampled = dict(list(comparable.items())[:: max(1, len(comparable) // SAMPLED_CHUNKS)])
        for start, stop in self._bounds:
            encoded = [(self._chunks[peer].pop(start), weight) for peer, weight in contributors]
            if len(contributors) <= MAX_COMPARED and start in sampled:
                products += encoded_gram([data for data, _ in encoded], self._codec, stop - start, sampled[start])
            averaged += mean_codec.encode(merge(encoded, self._codec, stop - start))
        products *= sum(comparable.values()) / max(1, sum(sampled.values()))
        gram = tuple(products.ravel().tolist()) if len(contributors) <= MAX_COMPARED else ()
        return Reduced(averaged, hashlib.sha256(averaged).hexdigest(), gram)
