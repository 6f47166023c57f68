"""The record of a round, from the Joins of its members and the reports of its reducers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from p2ptrain.algorithms.metrics import mean_cosine, mean_norm
from p2ptrain.algorithms.schedules import outer_lr_scale, scaled_interval, scheduled_interval
from p2ptrain.protocol.rounds.averaging.strategy import Conclusion
from p2ptrain.protocol.wire.messages import Contributor, Head, Join, Record
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# Limits of a member's interval, whatever speed it claims, and of counts, which have 64 bits on the wire.
MOST_INTERVALS = 1000
MOST_TOKENS = 2**62


def record_of(
    run: RunConfig, head: Head, members: Mapping[PeerId, Join], contributors: Sequence[Contributor],
    conclusion: Conclusion,
) -> Record:  # fmt: skip
    """The decision of a round: the mean, the outer step, and the next interval of each member.

    Args:
        members: all members on the roster, with their Joins.
        contributors: the members in the mean.
        conclusion: the parts of the mean.
    """
    included = [members[c.peer_id] for c in contributors]
    ends = 2 * sum(join.at_length for join in included) >= len(included) and run.total_steps > 0
    speeds = sorted(join.speed for join in included)
    median_speed = speeds[len(speeds) // 2]
    steps = sorted(join.run_step for join in included)
    run_step = run.total_steps if ends else steps[len(steps) // 2]
    progress = run_step / run.total_steps if run.total_steps else 0.0
    sync_every = scheduled_interval(run.sync_schedule, run.sync_every, progress)
    cosine, norm = measures_of(conclusion.grams, [c.weight for c in contributors])
    return Record(
        genesis=head.genesis,
        lineage=head.lineage,
        round=head.round + 1,
        parent_sha256=head.state_sha256,
        contributors=tuple(contributors),
        parts=conclusion.parts,
        # The last round is a plain average: with few rounds Nesterov overshoots (measured: 2.255 → 2.323).
        outer_optimizer="sgd" if ends else run.outer_optimizer,
        outer_lr=1.0 if ends else run.outer_lr * outer_lr_scale(run.outer_lr_schedule, progress),
        outer_momentum=0.0 if ends else run.outer_momentum,
        run_step=run_step,
        tokens_total=min(MOST_TOKENS, head.tokens_total + sum(join.tokens for join in included)),
        intervals=tuple(
            (peer_id, min(MOST_INTERVALS * run.sync_every, scaled_interval(sync_every, join.speed, median_speed)))
            for peer_id, join in members.items()
        ),
        cosine=cosine,
        mean_norm=norm,
    )


def measures_of(grams: Sequence[tuple[float, ...]], weights: Sequence[float]) -> tuple[float, float]:
    """Average cosine of the outer gradients and norm of their mean, from the parts' Gram matrices; 0 if unknown."""
    size = len(weights)
    if any(len(gram) != size * size for gram in grams):
        return 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum([np.array(gram) for gram in grams], axis=0).reshape(size, size)
        measures = mean_cosine(total) if size > 1 else 0.0, mean_norm(total, weights)
    return measures if all(map(math.isfinite, measures)) else (0.0, 0.0)
