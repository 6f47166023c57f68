"""A member's outer gradient in a round, encoded once for all attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from p2ptrain.algorithms.averaging import MAX_GRADIENT
from p2ptrain.algorithms.codec import Codec, Encoded, difference, is_within
from p2ptrain.algorithms.merkle import Tree, leaf_hash
from p2ptrain.protocol.exchange.types import Snapshot
from p2ptrain.protocol.os_memory import release_pages

# Chunks that a worker thread encodes at a time: 1 to 4 MiB of int8. With a quarter a round of 25M takes a tenth more.
CHUNKS_PER_VISIT = 16


@dataclass(slots=True)
class OwnContribution:
    """A snapshot and its encoded chunks.

    `snapshot.weights` holds the weights until a chunk is encoded, then its bytes at the start of its place, and at the
    end (after `land`) the change to add to the live weights. So a chunk takes no memory of its own. With an error
    buffer the place holds anchor − weights in between, so that the live weights become the new anchor: unsent values
    are then in `next_error`, not in the weights.

    Chunks share no memory, so worker threads may encode or land different ones at the same time. Others may read a
    chunk once it is in `chunks`, and until it lands.

    Attributes:
        num_chunks: of the whole vector.
        chunks: the encoded chunks by first block; those that have landed are empty.
        error: values that earlier rounds did not send, (num_blocks, 64); only read. None if the weights keep them.
        tree: commits to all chunks, once `seal` made it.
        digest: of all chunks in order, as hexadecimal text, once `make_digest` made it, where records name it.
        next_error: values that this round does not send; replaces `error` if the round commits with this contribution.
    """

    snapshot: Snapshot
    num_chunks: int
    chunks: dict[int, Encoded] = field(default_factory=dict)
    tree: Tree | None = None
    digest: bytes = b""
    error: np.ndarray | None = None
    next_error: np.ndarray | None = None

    def encode(self, anchor: np.ndarray, codec: Codec, bounds: tuple[int, int]) -> None:
        """Encode a chunk of anchor − weights, unless already encoded. Call it in a worker thread.

        Raises ValueError with the reason if the weights are not finite or too far from the anchor.
        """
        start, stop = bounds
        if start in self.chunks:
            return
        weights = self.snapshot.weights.numpy()[start:stop]
        try:
            self.chunks[start] = self._encoded(anchor[start:stop], weights, codec, start)
        except ValueError:
            finite = np.isfinite(weights).all()
            why = f"farther than {MAX_GRADIENT:g} from the anchor" if finite else "not finite"
            raise ValueError(f"its weights are {why}") from None

    def _encoded(self, anchor: np.ndarray, weights: np.ndarray, codec: Codec, start: int) -> Encoded:
        """One encoded chunk, which lies in `weights` if there is no error buffer. If it raises, nothing has changed."""
        if self.error is None or self.next_error is None:
            encoded = codec.encode_difference(anchor, weights, MAX_GRADIENT)
            place = weights.reshape(-1).view(np.uint8)
            place[: len(encoded)] = np.frombuffer(encoded, np.uint8)
            release_pages(place[len(encoded) :])
            return place[: len(encoded)].data.toreadonly()
        stop = start + len(weights)
        gradient = difference(anchor, weights, MAX_GRADIENT)
        known = gradient.copy()
        known += np.float32(codec.error_decay) * self.error[start:stop]
        if not is_within(known, MAX_GRADIENT):
            raise ValueError("a value is too large")
        encoded = codec.encode(known)
        self.next_error[start:stop] = np.subtract(known, codec.decode(encoded, stop - start))
        weights[:] = gradient
        return encoded

    def land(self, codec: Codec, start: int, change: np.ndarray, averaged: np.ndarray) -> None:
        """Write what this chunk's landing adds to the live weights over its bytes. Call it in a worker thread.

        If it raises, the chunk is as before: only decoding can fail.

        Args:
            start: its first block.
            change: of the anchor in all its blocks; overwritten.
            averaged: the new values of its last blocks, if these are only averaged; `change` does not count there.
        """
        weights, stop = self.snapshot.weights.numpy(), start + len(change)
        if self.error is None:
            codec.add(self.chunks[start], len(change), np.float32(1), change)
            weights[start:stop] = change
        else:
            weights[start:stop] += change
        weights[stop - len(averaged) : stop] = averaged
        self.chunks[start] = b""

    @property
    def is_whole(self) -> bool:
        """Whether all chunks are encoded."""
        return len(self.chunks) == self.num_chunks

    @property
    def name(self) -> bytes:
        """What names it in a record (`record.name_of`), once all chunks are encoded."""
        return self.tree.root if self.tree is not None else self.digest

    def squared_norm(self, codec: Codec, bounds: list[tuple[int, int]], num_stepped: int) -> float:
        """The squared norm of the chunks among these that are encoded. Call it in a worker thread.

        Args:
            num_stepped: the number of the vector's blocks, from the first, that are outer gradients.
        """
        return sum(
            codec.squared_norm(self.chunks[start], stop - start, max(0, num_stepped - start))
            for start, stop in bounds
            if start in self.chunks
        )

    def leaf(self, bounds: tuple[int, int]) -> bytes:
        """The leaf hash of an encoded chunk. Call it in a worker thread."""
        return leaf_hash(self.chunks[bounds[0]])

    def seal(self, leaves: list[bytes]) -> None:
        """Commit to all chunks, by their leaf hashes in order, with a Merkle tree. Call it in a worker thread."""
        self.tree = Tree(leaves)

    def make_digest(self) -> None:
        """Hash all chunks, which are encoded. Call it in a worker thread."""
        if not self.digest:
            hashed = blake3()
            for start in sorted(self.chunks):
                hashed.update(self.chunks[start])
            self.digest = hashed.hexdigest().encode()
