"""Merkle trees: a range of leaves and its proof give the root; anything else gives another one, or an error."""

from __future__ import annotations

import itertools

import pytest
from blake3 import blake3

from p2ptrain.algorithms.merkle import MAX_PROOF, Tree, leaf_hash, root_of
from p2ptrain.errors import WireError


def leaves_of(count: int) -> list[bytes]:
    return [leaf_hash(bytes([number])) for number in range(count)]


def test_the_root_is_that_of_the_definition() -> None:
    a, b, c = (blake3(b"\0" + bytes([number])).digest() for number in range(3))
    inner = blake3(b"\1" + b + c).digest()
    assert Tree(leaves_of(1)).root == a
    assert Tree(leaves_of(3)).root == blake3(b"\1" + a + inner).digest()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_every_range_is_proved_and_no_other_leaves_are(count: int) -> None:
    leaves = leaves_of(count)
    tree = Tree(leaves)
    for start, stop in itertools.combinations(range(count + 1), 2):
        proof = tree.proof(start, stop)
        assert len(proof) <= 2 * count.bit_length() <= MAX_PROOF
        assert root_of(leaves[start:stop], start, count, proof) == tree.root
        for place in range(stop - start):
            changed = list(leaves[start:stop])
            changed[place] = leaf_hash(b"another")
            assert root_of(changed, start, count, proof) != tree.root
        with pytest.raises(WireError, match="too long"):
            root_of(leaves[start:stop], start, count, (*proof, bytes(32)))
        if proof:
            with pytest.raises(WireError, match="too short"):
                root_of(leaves[start:stop], start, count, proof[:-1])
            with pytest.raises(WireError, match="32 bytes"):
                root_of(leaves[start:stop], start, count, (*proof[:-1], bytes(31)))


def test_an_inner_node_is_no_leaf() -> None:
    leaves = leaves_of(4)
    halves = [blake3(b"\1" + leaves[i] + leaves[i + 1]).digest() for i in (0, 2)]
    assert Tree(halves).root == Tree(leaves).root  # of hashes; of chunks it cannot be:
    assert leaf_hash(leaves[0] + leaves[1]) != halves[0]
