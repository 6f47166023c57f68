"""A peer's part of a checkpoint: converts its agreed state to a dictionary and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.errors import ConfigError, WireError
from p2ptrain.protocol.anchor import AnchorState
from p2ptrain.protocol.rounds.deciding.history import RECENT_ENTRIES, History, ends_at
from p2ptrain.protocol.rounds.deciding.lineage import check_head
from p2ptrain.protocol.rounds.deciding.record import MOST_COUNT
from p2ptrain.protocol.state_sync.checkpoint import Restored
from p2ptrain.protocol.wire.messages import Head, SavedHistory, pack, unpack
from p2ptrain.settings.config import RunConfig

Array = npt.NDArray[np.float32]


def to_dict(head: Head, history: History, run_step: int, tokens: int, vectors: Sequence[Array]) -> dict[str, Any]:
    """`Peer.state_dict` without its `run`. Its tensors share the memory of `vectors`: anchor, then moments."""
    anchor, *moments = map(torch.from_numpy, vectors)
    past = SavedHistory(history.genesis, tuple(history.entries[-RECENT_ENTRIES:]))
    return {
        "genesis": head.genesis,
        "head": pack(head).hex(),
        "history": pack(past).hex(),
        "run_step": run_step,
        "tokens": tokens,
        "anchor": anchor,
        "moments": moments,
    }


def saved_run(state: dict[str, Any]) -> RunConfig | None:
    """The settings of the run in which a `Peer.state_dict()` was saved; None if an older version saved it.

    Raises ConfigError if this version cannot read them.
    """
    if "run" not in state:
        return None
    try:
        return RunConfig.from_stated(json.loads(state["run"]))
    except (TypeError, ValueError, RecursionError) as error:  # a ConfigError is a ValueError
        raise ConfigError(
            f"the state to resume from holds settings that this version of p2ptrain cannot use: {error}"
        ) from None


def from_dict(state: dict[str, Any], into: AnchorState) -> Restored:
    """Copy a result of `to_dict` `into` a state of this run.

    Raises ConfigError if it is damaged, does not fit, or is not finite.
    """
    try:
        tensors, run_step = [state["anchor"], *state["moments"]], int(state["run_step"])
        tokens = int(state.get("tokens", 0))  # none in checkpoints of older versions
        vectors = [tensor.detach().to("cpu", torch.float32).numpy() for tensor in tensors]
        head = unpack(Head, bytes.fromhex(state["head"]))
        check_head(head)
        past = unpack(SavedHistory, bytes.fromhex(state["history"]))
        history = History(past.genesis, past.entries)
        if not ends_at(history.entries, head):
            raise ValueError("a history that does not lead to its head")
        for name, count in (("run_step", run_step), ("tokens", tokens)):
            if not 0 <= count <= MOST_COUNT:
                raise ValueError(f"{name} = {count}")
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, WireError) as error:
        raise ConfigError(
            f"the state to resume from cannot be read ({error!r}); give the result of a peer's state_dict()"
        ) from None
    if [vector.shape for vector in vectors] != [vector.shape for vector in into.vectors]:
        raise ConfigError(
            f"the state to resume from has {len(vectors)} vectors of {vectors[0].size // BLOCK} blocks, "
            f"this run needs {len(into.vectors)} of {into.num_blocks}: not of this model and run"
        )
    for own, saved in zip(into.vectors, vectors, strict=True):
        own[:] = saved
    into.rehash()
    if into.hashes.state != head.state_hash:
        raise ConfigError("the state to resume from is damaged: its hash is wrong; use an earlier checkpoint")
    if not into.is_finite():
        raise ConfigError("the state to resume from holds NaN or infinity; use an earlier checkpoint")
    return Restored(into, head, run_step, history, tokens)
