"""Values passed between the training thread and the node.

An exchange sends its node the events of `ExchangeEvent`, which `Node.receive` matches. The node sets at most one
`PushPlan`, one `SnapshotWanted` and one `Landing` at a time for the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.indexspace import BlockPlan

LandingKind = Literal["add", "write", "keep"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """The last resolved round in the weights."""

    lineage: str = ""
    round: int = -1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received and decoded fragment. `age_s` is its age at `arrived_s`."""

    sender: str
    epoch: Epoch
    plan: BlockPlan
    values: torch.Tensor
    age_s: float
    arrived_s: float


@dataclass(frozen=True, slots=True)
class PushPlan:
    """Slots [slot, slot + slot_count) of a cycle, planned off the training thread, gathered at `due_s` or later."""

    cycle: int
    slot: int
    slot_count: int
    plan: BlockPlan
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Push:
    """The values of a plan's blocks at `gathered_s`, (n, 64) float32, owned by the receiver.

    `cpu_s`: CPU seconds of gathering them.
    """

    plan: PushPlan
    epoch: Epoch
    values: torch.Tensor
    gathered_s: float
    steps: int
    cpu_s: float


@dataclass(slots=True)
class Snapshot:
    """The weights when a round became due, or those of one section. `epoch` is that before the round.

    Position and tokens are those of the step that began to copy the weights. If that took several steps (`slices.py`),
    each block is of one of these, and so may have learned from a few steps more.
    """

    epoch: Epoch
    weights: torch.Tensor
    tokens: int
    steps: int
    run_step: int
    at_length: bool
    held_s: float


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """A request to copy the weights into `buffer` when the round is due, or at the first step after `latest_s`.

    The copy should be complete at `whole_by_s`. `section`: the number of the section to copy; None: all weights.
    `for_pair`: for a step with a partner, not for a round.
    """

    buffer: torch.Tensor
    latest_s: float
    whole_by_s: float = math.inf
    section: int | None = None
    for_pair: bool = False


@dataclass(frozen=True, slots=True)
class Landing:
    """The effect of a resolved round on the weights.

    `kind`: "add" adds `buffer` to θ, "write" sets θ to it (both set the inner moments, if rounds average them), "keep"
    leaves θ unchanged. With a `section`, `buffer` is of that section alone, and the others stay. The next interval
    begins at step `snapshot_steps` (None: now). `included_tokens`: how many of our tokens the round's mean includes;
    negative to count those of a checkpoint.

    The node owns `buffer`. The training thread, or a GPU, reads it until `LandingDone`. Once an "add" has landed, the
    pages of its buffer are returned to the system unless they are pinned, so it may not be read again. The buffer of a
    "write" is the live anchor.
    """

    kind: LandingKind
    buffer: torch.Tensor | None
    epoch: Epoch
    sync_every: int
    run_step: int
    included_tokens: int = 0
    snapshot_steps: int | None = None
    report: RoundReport | None = None
    finished: bool = False
    section: int | None = None


@dataclass(frozen=True, slots=True)
class RoundDue:
    """A round is due."""


@dataclass(frozen=True, slots=True)
class PushBegun:
    """Gathering the offered plan began at `began_s`. Its `Push` came just before, or follows after a later step."""

    began_s: float


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The snapshot that `wanted` requests."""

    wanted: SnapshotWanted
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class LandingDone:
    """A round has landed, which blocked training for `held_s` seconds."""

    landing: Landing
    held_s: float


@dataclass(frozen=True, slots=True)
class OutlierFound:
    """Fragments of `sender` were refused 100 times in a row."""

    sender: str


ExchangeEvent = RoundDue | PushBegun | Push | SnapshotTaken | LandingDone | OutlierFound


class ExchangeListener(Protocol):
    """Receives the events of an exchange: a node."""

    def receive(self, event: ExchangeEvent) -> None: ...


@dataclass(frozen=True, slots=True)
class Drops:
    """Simulated loss: whether to drop a received fragment, or the outer gradient of an interval (DiLoCo, figure 8)."""

    fragment: Callable[[], bool] = lambda: False
    gradient: Callable[[], bool] = lambda: False


NO_DROPS = Drops()


@dataclass(frozen=True)
class RoundReport:
    """The result of a round for this peer. Bytes are those that this peer sent and received.

    In a `StepReport` the hashes and `reason` are empty: they are known later, and are in the `round` event.
    """

    round: int
    status: Literal["committed", "solo", "skipped"]
    lineage: str
    contributors: tuple[str, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    late: bool = False
    anchor_hash: str = ""
    state_hash: str = ""
    parent_hash: str = ""
    record_sha256: str = ""
    wall_s: float = 0.0
    stall_s: float = 0.0
    tokens_discarded: int = 0
    cosine: float = 0.0
    mean_norm: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class StepReport:
    """The result of `Peer.step()`: fragments sent, merged, and skipped by reason, and a round that landed.

    `exchange_s` is the duration of the call.
    """

    sent: int = 0
    merged: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    exchange_s: float = 0.0
    round: RoundReport | None = None
    finished: bool = False


@dataclass(frozen=True)
class Changes:
    """The weights that the swarm changed: all of them, or `blocks`, (n,) int64, sorted."""

    everything: bool = False
    blocks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
