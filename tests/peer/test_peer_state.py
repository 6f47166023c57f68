"""A peer's state as a dictionary: what is read back is what was written, or a clear refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.peer.peer_state import from_dict, to_dict
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.rounds.deciding.history import History
from p2ptrain.protocol.wire.messages import Head, SavedHistory, pack
from tests.integrations.peer import Peer
from tests.protocol.signing import Past

BLOCKS = 5
PAST = Past("digest")
for _ in range(4):
    PAST.commit("a")
HISTORY = History(PAST.genesis, PAST.entries)


def head_of(state: AnchorState) -> Head:
    """The head of round 3."""
    hashes = state.hashes
    return Head(
        PAST.genesis_id,
        PAST.lineage,
        3,
        hashes.state,
        hashes.anchor,
        (("a", "a.1"),),
        80,
        1000,
        PAST.entries[-1].commit,
    )


def some_state() -> tuple[AnchorState, dict[str, Any]]:
    state, rng = AnchorState(BLOCKS, 1), np.random.default_rng(0)
    for vector in state.vectors:
        vector[:] = rng.standard_normal(vector.shape, np.float32)
    state.rehash()
    return state, to_dict(head_of(state), HISTORY, 84, 672, state.vectors)


def test_what_is_read_back_is_what_was_written() -> None:
    state, saved = some_state()
    restored = from_dict(saved, AnchorState(BLOCKS, 1))
    assert (restored.run_step, restored.tokens) == (84, 672)
    assert (restored.head.round, restored.head.lineage) == (3, PAST.lineage)
    assert restored.state.hashes == state.hashes
    assert (restored.history.genesis, restored.history.entries) == (PAST.genesis, PAST.entries)
    assert all(np.array_equal(*pair) for pair in zip(restored.state.vectors, state.vectors, strict=True))


def test_the_fake_peer_of_other_tests_has_a_state_of_this_form() -> None:
    assert Peer(1).state_dict().keys() == some_state()[1].keys()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"anchor": torch.zeros(BLOCKS, 64)}, "is damaged: its hash is wrong"),
        ({"anchor": torch.zeros(BLOCKS - 1, 64)}, "not of this model and run"),
        ({"moments": []}, "not of this model and run"),
        ({"moments": None}, "cannot be read"),
        ({"anchor": None}, "cannot be read"),
        ({"head": "beef"}, "cannot be read"),
        ({"head": "no hex"}, "cannot be read"),
        ({"head": None}, "cannot be read"),
        ({"head": pack(Head("0-G", "abc-def", 3, "", "", (), 80, 1000, None)).hex()}, "cannot be read"),
        ({"history": "beef"}, "cannot be read"),
        ({"history": pack(SavedHistory(None, ())).hex()}, "cannot be read"),
        ({"history": pack(SavedHistory(PAST.genesis, tuple(PAST.entries[:-1]))).hex()}, "cannot be read"),
        ({"run_step": "ten"}, "cannot be read"),
        ({"run_step": -1}, "cannot be read"),
        ({"run_step": 2**60}, "cannot be read"),
        ({"run_step": math.inf}, "cannot be read"),
        ({"anchor": torch.zeros(BLOCKS, 64, device="meta")}, "cannot be read"),
        ({"anchor": torch.zeros(())}, "not of this model and run"),
    ],
)
def test_a_damaged_one_is_refused(change: dict[str, Any], reason: str) -> None:
    _, saved = some_state()
    with pytest.raises(ConfigError, match=reason):
        from_dict({**saved, **change}, AnchorState(BLOCKS, 1))


def test_tensors_that_a_user_has_converted_are_read_too() -> None:
    state = AnchorState(BLOCKS, 1)
    state.rehash()
    saved = to_dict(head_of(state), HISTORY, 84, 672, state.vectors)
    converted = {
        "anchor": saved["anchor"].clone().requires_grad_(),
        "moments": [moment.to(torch.bfloat16) for moment in saved["moments"]],
    }
    assert from_dict({**saved, **converted}, AnchorState(BLOCKS, 1)).state.hashes == state.hashes


@pytest.mark.parametrize("vector", [0, 1])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_one_that_is_not_finite_is_refused(vector: int, value: float) -> None:
    state, _ = some_state()
    state.vectors[vector][2, 3] = value
    state.rehash()
    with pytest.raises(ConfigError, match="holds NaN or infinity; use an earlier checkpoint"):
        from_dict(to_dict(head_of(state), HISTORY, 84, 672, state.vectors), AnchorState(BLOCKS, 1))


def test_one_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="give the result of a peer's state_dict"):
        from_dict({"model": {}}, AnchorState(BLOCKS, 1))
