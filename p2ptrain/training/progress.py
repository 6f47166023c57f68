"""The progress of a peer's training, summed up every few seconds: loss, speed, time left.

The speed is that of training alone: evaluations, checkpoints and waits are left out, so that it changes only when
training does. The time left adds the evaluations that are still to come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from p2ptrain.protocol.exchange.types import StepReport
from p2ptrain.training.trainer import Trainer

if TYPE_CHECKING:
    from p2ptrain.peer.group_peer import GroupPeer
    from p2ptrain.peer.peer import Peer

# Guess. The position of a slow peer jumps ahead at each round, so that less than an interval says little.
REMEMBERED_INTERVALS = 2


@dataclass(frozen=True)
class Evaluation:
    """The loss on held-out text in nats, and the seconds that it took."""

    loss: float
    seconds: float


@dataclass(frozen=True)
class StepDone:
    """One local step and its exchange: the run's step after it, and the training loss in nats.

    `seconds`: of the step with its exchange, without the evaluation; `exchange_s`: those in which the exchange held
    training. `evaluation`: only if the loss was measured after it.
    """

    run_step: int
    loss: float
    tokens: int
    report: StepReport
    seconds: float
    exchange_s: float
    evaluation: Evaluation | None


@dataclass(frozen=True)
class TrainingProgress:
    """Summary of the steps since the last progress line.

    Attributes:
        total_steps: length of the run; 0 if it has no end.
        round: rounds resolved so far.
        peers: live peers, including this one.
        loss, eval_loss: this peer's mean training loss and its newest loss on held-out text, in nats.
        bits_per_byte: the latter for a byte of text, which compares tokenizers; None if the text is not known.
        tokens_per_s: of training alone, as are the next two.
        mfu: share of the GPU's peak that the model's arithmetic took; None if it is not known, as on a CPU.
        exchange: share of the time for which the exchange held training.
        left_s: seconds to the end of the run, with its evaluations; None if it has no end.
        sent, merged, skipped: fragments; the skipped ones by reason.
    """

    run_step: int
    total_steps: int
    round: int
    peers: int
    loss: float
    eval_loss: float
    bits_per_byte: float | None
    tokens_per_s: float
    mfu: float | None
    exchange: float
    left_s: float | None
    sent: int
    merged: int
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Pace:
    """How fast the run's position moves: a decaying mean in which what is `memory` steps ago counts 1/e."""

    memory: float
    steps: float = 0.0
    seconds: float = 0.0

    def after(self, steps: int, seconds: float) -> Pace:
        """The pace after some steps more; negative if a round has set this peer back."""
        kept = math.exp(-max(0, steps) / self.memory)
        return replace(self, steps=kept * self.steps + steps, seconds=kept * self.seconds + seconds)

    @property
    def step_s(self) -> float | None:
        """Seconds of training for each step of the run; None if it has not moved ahead."""
        return self.seconds / self.steps if self.steps > 0 else None


def time_left_s(pace: Pace, run_step: int, total_steps: int, *, eval_every: int, eval_s: float) -> float | None:
    """Seconds to the end of the run: its steps, and evaluations of `eval_s`, the last one after them.

    None if the run has no end, or the pace is not known.
    """
    if total_steps == 0 or pace.step_s is None:
        return None
    evaluations = total_steps // eval_every - run_step // eval_every + 1
    return max(0, total_steps - run_step) * pace.step_s + evaluations * eval_s


class ProgressMeter:
    """Collects the steps of a peer, and sums them up. All ranks have one."""

    def __init__(self, peer: Peer | GroupPeer, trainer: Trainer, eval_every: int) -> None:
        self._peer, self._trainer, self._eval_every = peer, trainer, eval_every
        self._pace = Pace(REMEMBERED_INTERVALS * peer.run.sync_every)
        self._run_step = peer.run_step
        self._evaluation = Evaluation(math.nan, 0.0)
        self._recent: list[StepDone] = []

    @property
    def has_news(self) -> bool:
        """Whether there were steps since the last summary."""
        return bool(self._recent)

    def add(self, done: StepDone) -> None:
        self._recent.append(done)
        self.add_evaluation(done.evaluation)

    def add_evaluation(self, evaluation: Evaluation | None) -> None:
        self._evaluation = evaluation or self._evaluation

    def summary(self) -> TrainingProgress:
        """All ranks: sum up the steps since the last summary; there must be one. The next begins anew."""
        peer, trainer, recent, eval_loss = self._peer, self._trainer, self._recent, self._evaluation.loss
        seconds = max(sum(done.seconds for done in recent), 1e-9)
        # The pace counts the run's steps, not ours, which are fewer on a slow peer.
        moved = peer.run_step - self._run_step
        if moved < -peer.run.sync_every:  # no round: another state was adopted
            self._pace = Pace(self._pace.memory)
        else:
            self._pace = self._pace.after(moved, seconds)
        self._recent, self._run_step = [], peer.run_step
        # Each rank trains on its own text.
        loss, tokens = trainer.ranks.total(sum(done.loss for done in recent), sum(done.tokens for done in recent))
        total, eval_s = peer.run.total_steps, self._evaluation.seconds
        return TrainingProgress(
            run_step=peer.run_step,
            total_steps=total,
            round=peer.round,
            peers=1 + len(peer.alive),
            loss=loss / len(recent) / trainer.ranks.size,
            eval_loss=eval_loss,
            bits_per_byte=trainer.bytes_per_token and eval_loss / math.log(2) / trainer.bytes_per_token,
            tokens_per_s=tokens / seconds,
            mfu=trainer.utilisation and trainer.utilisation * tokens / seconds / trainer.ranks.size,
            exchange=sum(done.exchange_s for done in recent) / seconds,
            left_s=time_left_s(self._pace, peer.run_step, total, eval_every=self._eval_every, eval_s=eval_s),
            sent=sum(done.report.sent for done in recent),
            merged=sum(done.report.merged for done in recent),
            skipped=sum((Counter(done.report.skipped) for done in recent), Counter()),
        )
