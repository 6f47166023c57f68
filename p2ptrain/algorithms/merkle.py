"""A Merkle tree over the chunks of a vector: one hash that commits to all of them, and short proofs for ranges.

Leaves and inner nodes are hashed with different prefixes, as in RFC 6962 (Certificate Transparency), so that no inner
node can be passed off as a leaf. The tree over leaves [low, high) splits at the middle. BLAKE3 throughout.

A proof is for a range of leaves, not for one: it has the roots of the subtrees beside the range, in order. For a part
of a round that is about 2 log2 n hashes in all, instead of log2 n with each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blake3 import blake3

from p2ptrain.errors import WireError

HASH_BYTES = 32
# A tree of 2^64 leaves has no longer proofs.
MAX_PROOF = 128
_LEAF, _NODE = b"\x00", b"\x01"


def leaf_hash(data: bytes | memoryview) -> bytes:
    """The hash of one chunk."""
    hashed = blake3(_LEAF)
    hashed.update(data)
    return hashed.digest()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return blake3(_NODE + left + right).digest()


class Tree:
    """The tree over leaf hashes, at least one. Only read after it is made."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._count = len(leaves)
        self._nodes: dict[tuple[int, int], bytes] = {}
        self._build(leaves, 0, len(leaves))

    @property
    def root(self) -> bytes:
        return self._nodes[0, self._count]

    def proof(self, start: int, stop: int) -> tuple[bytes, ...]:
        """Proves leaves [start, stop), not empty, with `root_of`."""
        return tuple(self._beside(0, self._count, start, stop))

    def _build(self, leaves: Sequence[bytes], low: int, high: int) -> bytes:
        if high - low == 1:
            node = leaves[low]
        else:
            middle = (low + high) // 2
            node = _node_hash(self._build(leaves, low, middle), self._build(leaves, middle, high))
        self._nodes[low, high] = node
        return node

    def _beside(self, low: int, high: int, start: int, stop: int) -> Iterator[bytes]:
        if high <= start or stop <= low:
            yield self._nodes[low, high]
        elif not (start <= low and high <= stop):
            middle = (low + high) // 2
            yield from self._beside(low, middle, start, stop)
            yield from self._beside(middle, high, start, stop)


def root_of(leaves: Sequence[bytes], start: int, count: int, proof: Sequence[bytes]) -> bytes:
    """The root of the tree of `count` leaves whose leaves from `start` on are these, by their proof.

    Raises WireError if the proof has not the length that such a proof has, or a hash in it not 32 bytes.
    """
    stop, beside = start + len(leaves), iter(proof)
    assert 0 <= start < stop <= count

    def root(low: int, high: int) -> bytes:
        if high <= start or stop <= low:
            node = next(beside, b"")
            if len(node) != HASH_BYTES:
                raise WireError("a Merkle proof that is too short, or whose hashes have not 32 bytes")
            return node
        if high - low == 1:
            return leaves[low - start]
        middle = (low + high) // 2
        return _node_hash(root(low, middle), root(middle, high))

    whole = root(0, count)
    if next(beside, None) is not None:
        raise WireError("a Merkle proof that is too long")
    return whole
