"""The record of a round: how its leader makes it, how the others check it, and the limits on the claims in it. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from blake3 import blake3

from p2ptrain.algorithms.averaging import MAX_MEAN
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.merkle import HASH_BYTES
from p2ptrain.algorithms.metrics import mean_cosine, mean_norm
from p2ptrain.algorithms.schedules import outer_lr_scale, scaled_interval, scheduled_interval
from p2ptrain.errors import RoundFailedError, WireError
from p2ptrain.protocol.rounds.deciding.averaging import Averaging, Blob, Conclusion, is_audited
from p2ptrain.protocol.rounds.deciding.grid import Grid, averages_all
from p2ptrain.protocol.rounds.deciding.policy import may_be_drawn, rank
from p2ptrain.protocol.rounds.deciding.voters import Voter, next_voters
from p2ptrain.protocol.wire.messages import MAX_COUNT, Arrived, Contributor, Head, Join, Proposal, Record, Roster, pack
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# Contributors per round; further members are left out (guess).
MAX_CONTRIBUTORS = 64
# The largest integer that floats represent exactly.
MOST_COUNT = 2**53
# A member's interval is at most so many times H, whatever speed it claims (guess).
MOST_INTERVAL = 16
# A committed round advances the run by at most so many times H: without a quorum, peers train on for long (guess).
MOST_INTERVALS = 1000
# A member is not READY for a record more than so many times H ahead of its training. Members are few intervals apart.
MOST_AHEAD = 4
# A record should name those of lowest rank that we see, this share of the most that it can name, whatever the swarm's
# size is. Those that are drawn are linked with each other, so leaders call most of them (guess).
FEWEST_EXPECTED = 0.25
# A weight is at most so many times the median of the positive ones, as tokens count at most twice the median's; with
# room for rounding.
MOST_WEIGHT = 2.001


def check_join(join: Join) -> None:
    """Raises WireError on impossible claims."""
    for name in ("tokens", "shard_tokens", "run_step"):
        if not 0 <= getattr(join, name) <= MOST_COUNT:
            raise WireError(f"a Join with {name} = {getattr(join, name)}: must be between 0 and 2^53")
    if join.rate < 0:
        raise WireError(f"a Join with rate = {join.rate}: must be 0 or more")


def most_square(num_blocks: int) -> float:
    """The largest squared norm of so many blocks of an encoded outer gradient."""
    return MAX_MEAN**2 * BLOCK * num_blocks


def root_bytes(*, audited: bool) -> int:
    """The size of each member's Merkle root: members give one exactly if they commit to their chunks."""
    return HASH_BYTES if audited else 0


def check_arrived(arrived: Arrived, *, audited: bool, num_blocks: int) -> None:
    """Raises WireError unless each complete member has a possible norm, and a Merkle root exactly if `audited`.

    Args:
        audited: whether members of this run commit to their chunks.
        num_blocks: of the whole model.
    """
    size, counts = root_bytes(audited=audited), {len(arrived.complete), len(arrived.norms), len(arrived.roots)}
    if len(counts) > 1 or any(len(root) != size for root in arrived.roots):
        raise WireError("an Arrived whose members have not one norm and one root each")
    most = most_square(num_blocks)
    for norm in arrived.norms:
        if not 0 <= norm <= most:
            raise WireError(f"an Arrived with squared norm {norm:.3g}: must be between 0 and {most:.3g}")


def check_size(record: Record) -> None:
    """Raises WireError if a record has more contributors, members or parts than a round can have."""
    if max(map(len, (record.contributors, record.intervals, record.parts))) > MAX_CONTRIBUTORS:
        raise WireError(f"a record of more than {MAX_CONTRIBUTORS} contributors, members or parts")


def check_roster(roster: Roster) -> None:
    """Raises WireError unless these are possible members, who reduce at most one part each."""
    members, reducers = roster.members, [part.reducer for part in roster.parts]
    if len(members) > MAX_CONTRIBUTORS or list(members) != sorted(set(members)):
        raise WireError(f"a roster of {len(members)} members: at most {MAX_CONTRIBUTORS}, sorted and distinct")
    if len(set(reducers)) < len(reducers) or not set(reducers) <= set(members):
        raise WireError("a roster whose parts are not each for another member")
    if roster.expected and tuple(c.peer_id for c in roster.expected) != members:
        raise WireError("a roster that expects others than its members")
    if roster.expected and not any(c.weight > 0 for c in roster.expected):
        raise WireError("a roster whose expected contributors have no weight")
    if any(c.root or not 0 <= c.weight <= MOST_COUNT for c in roster.expected):
        raise WireError("a roster whose expected contributors have Merkle roots, or a weight out of 0 to 2^53")
    for senders in {part.senders for part in roster.parts}:
        if list(senders) != sorted(set(senders)) or not set(senders) <= set(members):
            raise WireError("a roster part whose senders are not distinct members, sorted")


def name_of(record: Record, member: Voter, averaging: Averaging) -> bytes | None:
    """The hash by which a record names a member's contribution; None if it is not in the record.

    It is the Merkle root, empty in runs without audits; or, where the parts are contributions, the hash of all bytes.
    The record may be malformed.
    """
    root = next((c.root for c in record.contributors if (c.peer_id, c.incarnation) == member), None)
    if root is None or averaging.reduces:
        return root
    return next((part.digest.encode() for part in record.parts if part.holder == member[0]), b"")


def proposal_of(
    run: RunConfig,
    head: Head,
    joins: Mapping[PeerId, Join],
    members: Sequence[PeerId],
    contributors: Sequence[Contributor],
    conclusion: Conclusion,
) -> Proposal:
    """What to propose: the mean, the outer step, each member's next interval, the next voters, and their proof.

    Args:
        joins: of all peers that joined the attempt.
        members: those of them that are on the roster.
        contributors: the members in the mean.
        conclusion: the parts of the mean.
    """
    included = [joins[c.peer_id] for c in contributors]
    is_at_length = 2 * sum(join.at_length for join in included) >= len(included) and run.total_steps > 0
    # If this round averages one section only, the next one ends the run.
    ends = is_at_length and averages_all(run, head)
    # A member that has not finished a step yet does not know its speed.
    speeds = sorted(join.speed for join in included if join.speed > 0)
    median_speed = speeds[len(speeds) // 2] if speeds else 0.0
    steps = sorted(join.run_step for join in included)
    run_step = run.total_steps if ends else steps[len(steps) // 2]
    run_step = min(max(head.run_step, run_step), most_run_step(run, head), _most_accepted(run, head, joins))
    optimizer, lr, momentum = outer_settings(run, run_step)
    progress = run_step / run.total_steps if run.total_steps else 0.0
    sync_every = scheduled_interval(run.sync_schedule, run.sync_every, progress)
    cosine, norm = measures_of(conclusion.grams, [c.weight for c in contributors])
    views = tuple(j.view for p, j in joins.items() if j.view is not None and (p, j.incarnation) in head.voters)
    record = Record(
        genesis=head.genesis,
        lineage=head.lineage,
        round=head.round + 1,
        parent_hash=head.state_hash,
        contributors=tuple(contributors),
        parts=conclusion.parts,
        outer_optimizer=optimizer,
        outer_lr=lr,
        outer_momentum=momentum,
        run_step=run_step,
        tokens_total=min(MAX_COUNT, head.tokens_total + sum(join.tokens for join in included)),
        intervals=tuple(
            (
                peer_id,
                min(MOST_INTERVAL * run.sync_every, scaled_interval(sync_every, joins[peer_id].speed, median_speed)),
            )
            for peer_id in members
        ),
        cosine=cosine,
        mean_norm=norm,
        voters=next_voters(head, contributors, views),
    )
    return Proposal(record, views)


def most_run_step(run: RunConfig, head: Head) -> int:
    """The furthest that the round after `head` may bring the run, whatever steps its members claim."""
    if run.is_pairwise and run.total_steps:
        return run.total_steps
    furthest, last = head.run_step + MOST_INTERVALS * run.sync_every, run.total_steps
    if not last:
        return furthest
    return min(furthest, last if averages_all(run, head) else last - 1)


def _most_accepted(run: RunConfig, head: Head, joins: Mapping[PeerId, Join]) -> int:
    """The furthest step of the run that a quorum of the voters accepts, by the positions in their Joins.

    A slow founder, the only voter of the first round, may be many intervals behind those who joined it.
    """
    positions = {(peer_id, join.incarnation): join.run_step for peer_id, join in joins.items()}
    steps = sorted((positions[voter] for voter in head.voters if voter in positions), reverse=True)
    if not steps:
        return MAX_COUNT  # no voter has joined, so the round is not decided
    # Half of the voters may be a quorum, if the first one is among them.
    accepted = steps[min(len(head.voters) // 2, len(steps) - 1)]
    return max(head.run_step, accepted) + MOST_AHEAD * run.sync_every


def outer_settings(run: RunConfig, run_step: int) -> tuple[str, float, float]:
    """Outer optimizer, learning rate and momentum of a round that brings the run to this step."""
    if run.is_over_at(run_step) or run.is_pairwise:
        # The last round is a plain average: with few rounds Nesterov overshoots (measured: 2.255 → 2.323). Pairwise
        # steps are the outer optimizer of their runs.
        return "sgd", 1.0, 0.0
    progress = run_step / run.total_steps if run.total_steps else 0.0
    return run.outer_optimizer, run.outer_lr * outer_lr_scale(run.outer_lr_schedule, progress), run.outer_momentum


def check_record(record: Record, run: RunConfig, averaging: Averaging, grid: Grid) -> None:
    """Raises WireError unless a leader could have made this record, as far as that does not depend on the head.

    Args:
        grid: of the record's round.
    """
    weights, intervals = {c.peer_id: c.weight for c in record.contributors}, dict(record.intervals)
    if len(weights) < len(record.contributors) or len(intervals) < len(record.intervals):
        raise WireError("a record whose contributors, or peers with an interval, are not distinct")
    check_size(record)
    positive = [weight for weight in weights.values() if weight > 0]
    # As `policy.weights_of` limits them. With "clip" the guard may scale the others down, and
    # with any guard one of two: no weight of two is more than twice their median.
    if positive and run.round_guard != "clip" and max(positive) > MOST_WEIGHT * statistics.median(positive):
        raise WireError(f"a record with a weight above {MOST_WEIGHT:.0f} times the median")
    if not any(weights.values()) or not all(0 <= weight <= MOST_COUNT for weight in weights.values()):
        raise WireError("a record with weights that are not between 0 and 2^53, or all zero")
    size = root_bytes(audited=is_audited(run, averaging))
    if any(len(c.root) != size for c in record.contributors):
        raise WireError(f"a record whose contributors have not Merkle roots of {size} bytes")
    averaging.check_record(record, grid)
    most = MOST_INTERVAL * run.sync_every
    if not all(1 <= interval <= most for interval in intervals.values()):
        raise WireError(f"a record with intervals that are not between 1 and {most}")
    optimizer, *expected = outer_settings(run, record.run_step)
    given = (record.outer_lr, record.outer_momentum)
    # Not equal: another math library may round the schedule's cosine differently.
    same = (math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-12) for pair in zip(given, expected, strict=True))
    if record.outer_optimizer != optimizer or not all(same):
        raise WireError(
            f"a record with outer optimizer {record.outer_optimizer[:40]!r}, lr and momentum {given}; the run has "
            f"{optimizer!r}, {tuple(expected)}"
        )


def check_advance(record: Record, run: RunConfig, head: Head) -> None:
    """Raises WireError unless the round after `head` could have brought the run to this record's step and tokens."""
    most_tokens = min(MAX_COUNT, head.tokens_total + MOST_COUNT * len(record.contributors))
    if not head.run_step <= record.run_step <= most_run_step(run, head):
        raise WireError(f"a record that leads from step {head.run_step} of the run to {record.run_step}")
    if not head.tokens_total <= record.tokens_total <= most_tokens:
        raise WireError(f"a record that leads from {head.tokens_total} tokens to {record.tokens_total}")


def check_pace(record: Record, run: RunConfig, head: Head, own_step: int) -> None:
    """Raises RoundFailedError if a record that we have not decided yet is too far ahead of what we trained.

    Args:
        own_step: our position in the run.
    """
    most = max(head.run_step, own_step) + MOST_AHEAD * run.sync_every
    if record.run_step > most:
        raise RoundFailedError(f"a record at step {record.run_step} of the run, while we are at {own_step}")


def joins_rounds(run: RunConfig, own_step: int) -> bool:
    """Whether we join a round. With pairwise steps, only near the end of the run: an attempt holds up all pairs."""
    left = run.total_steps - own_step
    return not run.is_pairwise or (run.total_steps > 0 and left <= MOST_AHEAD * run.sync_every)


def expected(record: Record, present: Collection[Voter], most: int, swarm_size: float) -> set[Voter]:
    """The peers that a record should name: of those present, at most `most`, drawn as its leader draws them.

    A quarter of `most` is always expected: the swarm's size is an estimate, and the contributors may be made up.
    """
    ranks = {voter: rank(record.parent_hash, voter[0]) for voter in present}
    last = max((rank(record.parent_hash, c.peer_id) for c in record.contributors), default=0)
    is_full = len(record.contributors) >= most
    likely = sum(may_be_drawn(own, most, swarm_size) and (own <= last or not is_full) for own in ranks.values())
    count = min(most, max(likely, math.ceil(FEWEST_EXPECTED * most)))
    return set(sorted(ranks, key=ranks.__getitem__)[:count])


def check_company(record: Record, present: Collection[Voter]) -> None:
    """Raises RoundFailedError if a record that we have not decided yet leaves most of us out.

    Otherwise a leader could leave out the others, and train the model alone. Not called for a member that sits the
    round out, because it expects to be left out, nor for a leader that has chosen the contributors itself.

    Args:
        present: ourselves, and the live peers of our lineage that contributed of late, of those that it should name.
    """
    named = sum(c.weight > 0 and (c.peer_id, c.incarnation) in present for c in record.contributors)
    if 2 * named < min(len(present), MAX_CONTRIBUTORS):
        raise RoundFailedError(f"a record that names {named} of the {len(present)} peers that we see")


def measures_of(grams: Sequence[tuple[float, ...]], weights: Sequence[float]) -> tuple[float, float]:
    """Average cosine of the outer gradients and norm of their mean, from the parts' Gram matrices; 0 if unknown."""
    size = len(weights)
    if any(len(gram) != size * size for gram in grams):
        return 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum([np.array(gram) for gram in grams], axis=0).reshape(size, size)
        measures = mean_cosine(total) if size > 1 else 0.0, mean_norm(total, weights)
    return measures if all(map(math.isfinite, measures)) else (0.0, 0.0)


def part_digest(blob: Blob, contributors: Sequence[Contributor], bounds: tuple[int, int]) -> str:
    """The hash that names a part in a record.

    Where contributors commit to their chunks it covers them, their weights and the part's blocks too, so that a leader
    cannot pass off the mean of other contributors, with other weights or of another part, as that of a reducer.
    """
    hashed = blake3()
    if any(contributor.root for contributor in contributors):
        hashed.update(b"%d-%d" % bounds)
    for contributor in contributors:
        if contributor.root:
            hashed.update(pack(contributor))
    hashed.update(blob)
    return hashed.hexdigest()
