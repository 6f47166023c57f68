"""What the training thread and the node hand to each other, through the exchange between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.algorithms.indexspace import Plan


@dataclass(frozen=True, slots=True)
class Epoch:
    """The last resolved round that the weights stand on."""

    lineage: str = ""
    round: int = -1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A received, decoded and planned fragment. `age_s` is its age when it arrived at `arrived_s`."""

    sender: str
    epoch: Epoch
    plan: Plan
    values: torch.Tensor
    age_s: float
    arrived_s: float


@dataclass(frozen=True, slots=True)
class PushPlan:
    """Slots [slot, slot + slot_count) of a cycle, for as many steps; planned off the training thread."""

    selection: str
    cycle: int
    slot: int
    slot_count: int
    num_slots: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Push:
    """The values of a plan's blocks at `gathered_s`, (n, 64) float32, owned by the receiver."""

    plan: PushPlan
    epoch: Epoch
    values: torch.Tensor
    gathered_s: float
    steps: int


@dataclass(slots=True)
class Snapshot:
    """The weights as they were when a round became due; `epoch` is the one that the round follows."""

    epoch: Epoch
    weights: torch.Tensor
    tokens: int
    steps: int
    run_step: int
    at_length: bool
    held_s: float


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """The node wants a snapshot into `buffer` when the round is due here, or at `latest_s` wherever we are."""

    buffer: torch.Tensor
    latest_s: float


@dataclass(frozen=True, slots=True)
class Landing:
    """What a resolved round does to the weights.

    `kind`: "add" adds `buffer` to θ, "write" sets θ to it (both set the inner moments, where rounds average them),
    "keep" leaves θ alone. All arrive at `epoch`. `snapshot_steps` is where the next interval counts from (None: from
    now), `included_tokens` what the round has averaged in, so that it is no longer outstanding.
    """

    kind: str
    buffer: torch.Tensor | None
    epoch: Epoch
    sync_every: int
    run_step: int
    included_tokens: int
    snapshot_steps: int | None
    report: RoundReport | None
    finished: bool


@dataclass(frozen=True)
class RoundReport:
    """How a round ended for this peer. `status` is "committed", "solo" or "skipped"; bytes are this peer's own."""

    round: int
    status: str
    lineage: str
    contributors: tuple[str, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    late: bool = False
    anchor_sha256: str = ""
    state_sha256: str = ""
    parent_sha256: str = ""
    wall_s: float = 0.0
    stall_s: float = 0.0
    tokens_discarded: int = 0
    cosine: float = 0.0
    mean_norm: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class StepReport:
    """What `Peer.step()` did: fragments handed over and merged, what was skipped by reason, and a landed round.

    `exchange_s` is the time that the call held the training thread, in seconds.
    """

    sent: int = 0
    merged: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    exchange_s: float = 0.0
    round: RoundReport | None = None
    finished: bool = False


@dataclass(frozen=True)
class Changes:
    """What the swarm has written to the weights: to all of them, or to `blocks`, (n,) int64, sorted."""

    everything: bool = False
    blocks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
