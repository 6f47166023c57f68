"""SPARTA with DiLoCo beside the authors' simulator: the same training, compared by loss, bytes and time blocked.

Model, text, initial weights, each peer's windows of text, inner optimizer, k, H, p and length are the same. In the
simulator all peers average one mask at every step, in lockstep and in fp32. Here each peer is a process with its own
p2pd, pushes int8 blocks, and does not wait for other peers. p2ptrain runs in three ways: every fragment to all peers,
which is the simulator's algorithm; to one other peer, the default, with the same p and so a (k-1)-th of the bytes; and
to one other peer with as many bytes as the first.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import p2ptrain
from benchmarks import rival_reference
from benchmarks.demo_training import Trained, Training, held_out_loss
from benchmarks.measure import Summary, TrafficMeter, milliseconds
from benchmarks.processes import WorkerError, Workers
from benchmarks.row import Row
from benchmarks.shapes import gpt_25m
from benchmarks.swarm import Phase, Setup, Step, Swarm
from benchmarks.workloads import Busy
from p2ptrain.demo.orchestrator import EventReader
from p2ptrain.peer.group_peer import GroupPeer

SEEDS = (0, 1, 2)
STEPS = 600
# Each peer follows the run's steps, not its own number of steps. Without this pace, peers that share cores took 490 to
# 630 steps in a run of 600, and their loss depends on that (measured). The rival's steps take 150 ms.
LEAST_STEP_S = 0.05
# At 25M parameters: SPARTA's p for larger models, and one round in the steps that the rival does in a minute. Our steps
# take a fraction of that, and a round lands some 30 steps after it is due: more steps, so that three can land.
LARGE = Setup(gpt_25m, Busy(0.1), fragment_fraction=0.005, sync_every=40)
LARGE_PEERS = 4
LARGE_STEPS = 4 * LARGE.sync_every
LARGE_RIVAL_STEPS = LARGE.sync_every
MAX_SHARE_HELD = 1 / 20
# Longest time of a step of the demo model on a busy machine (guess).
STEP_TIMEOUT_S = 1.0
LAST_ROUND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Way:
    """How our peers gossip.

    Attributes:
        name: its name in the table.
        topology: how the receivers of a fragment are chosen.
        fraction_scale: p of our peers is the training's p times this.
    """

    name: str
    topology: str
    fraction_scale: float = 1.0


# The first is the rival's algorithm with the rival's p.
WAYS = (
    Way("fragments to all peers", "all"),
    Way("fragments to one (our default)", "push"),
    Way("fragments to one, three times as many", "push", 3.0),
)


def run(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> list[Row]:
    trainings = [Training(seed, steps=steps) for seed in seeds]
    theirs = [rival_reference.train(training) for training in trainings]
    rows = []
    for way in WAYS:
        ours = [train(training, way) for training in trainings]
        rows += training_rows(trainings[0], way, list(zip(ours, theirs, strict=True)))
    held = hold(LARGE_STEPS)
    rival_held = rival_reference.hold(LARGE, peers=LARGE_PEERS, steps=LARGE_RIVAL_STEPS)
    return [*rows, large_row(held, rival_held)]


@dataclass(frozen=True)
class OurTrained(Trained):
    """The result of a training with p2ptrain, including the peers' own metrics.

    Attributes:
        counted_bytes: bytes of fragments and rounds in the peers' metrics, per peer and step.
        rounds: rounds that all peers committed.
        inner_steps: inner steps of all peers together. Each follows the run's steps, so their numbers differ.
    """

    counted_bytes: float
    rounds: int
    inner_steps: int


def train(training: Training, way: Way) -> OurTrained:
    """Train the demo model in real peers; each step takes at least LEAST_STEP_S seconds.

    Raises:
        WorkerError: a peer failed, was too slow or missed the last round.
    """
    per_step = 1 / training.peers / training.steps
    with Workers(_peer, [(rank, training, way) for rank in range(training.peers)]) as peers:
        peers.tell_one(0, ())
        initial_peers = peers.hear_from(0, timeout_s=90.0)
        for rank in range(1, training.peers):
            peers.tell_one(rank, initial_peers)
        peers.hear(timeout_s=120.0)
        meter = TrafficMeter(peers.pids)
        started = time.perf_counter()
        peers.tell("go")
        outcomes: list[tuple[float, list[float]]] = peers.hear(
            timeout_s=LAST_ROUND_TIMEOUT_S + 60.0 + STEP_TIMEOUT_S * training.steps
        )
        wall_s = time.perf_counter() - started
        sent = meter.since_start().sent
        peers.tell("leave")
        metrics: list[tuple[int, int]] = peers.hear(timeout_s=60.0)
    return OurTrained(
        loss=outcomes[0][0],
        held_s=[seconds for _, held_s in outcomes for seconds in held_s],
        sent_bytes=sent * per_step,
        wall_s=wall_s,
        counted_bytes=sum(counted for counted, _ in metrics) * per_step,
        rounds=min(rounds for _, rounds in metrics),
        inner_steps=sum(len(held_s) for _, held_s in outcomes),
    )


def hold(steps: int) -> list[Step]:
    """The steps of all peers with the setup `LARGE`, including those of its rounds. The weights drift every H steps."""
    held = []
    with Swarm(LARGE, LARGE_PEERS) as swarm:
        swarm.warm_up()
        for _ in range(0, steps, LARGE.sync_every):
            swarm.drift()
            held += [step for peer in swarm.run(Phase(LARGE.sync_every)) for step in peer]
    return held


def training_rows(training: Training, way: Way, pairs: Sequence[tuple[OurTrained, Trained]]) -> list[Row]:
    """The table rows of trainings that differ only in the seed."""
    ours, theirs = [own for own, _ in pairs], [rival for _, rival in pairs]
    loss, loss_error = _mean_and_error([own.loss for own in ours])
    rival_loss, rival_error = _mean_and_error([rival.loss for rival in theirs])
    paired, paired_error = _mean_and_error([own.loss - rival.loss for own, rival in pairs])
    sent, rival_sent = (statistics.fmean(side.sent_bytes for side in sides) for sides in (ours, theirs))
    counted = statistics.fmean(own.counted_bytes for own in ours)
    held, rival_held = (
        statistics.fmean(second for side in sides for second in side.held_s) for sides in (ours, theirs)
    )
    wall, rival_wall = (statistics.fmean(side.wall_s for side in sides) for sides in (ours, theirs))
    numel = sum(parameter.numel() for parameter in training.model().parameters())
    # Every other process needs a copy of rank 0's mask (one byte per weight), and one of the outer step's result.
    copies = (training.peers - 1) / training.peers
    masks = numel * copies
    # An all-reduce sends twice as much, and in fp32.
    values = 4 * numel * copies * (2 * training.fragment_fraction + 3 / training.sync_every)
    own_steps = statistics.fmean(own.inner_steps for own in ours) / training.peers
    rounds = ", ".join(str(own.rounds) for own in ours)
    fraction = training.fragment_fraction * way.fraction_scale
    name = (
        f"demo model, k = {training.peers}, H = {training.sync_every}, {training.steps} steps; "
        f"{way.name}, p = {100 * fraction:g} %, theirs {100 * training.fragment_fraction:g} %"
    )
    return [
        Row(
            work=f"{name}: loss of the merged model on held-out text, mean of {len(pairs)} seeds ± standard error",
            must_reach="theirs + 2 of its standard errors, or less",
            measured=f"{loss:.4f} ± {loss_error:.4f}; ours - theirs, seed by seed: {paired:+.4f} ± {paired_error:.4f}; "
            f"rounds with all peers: {rounds}; steps of a peer: {own_steps:.0f}, "
            f"each {1e3 * LEAST_STEP_S:g} ms or more",
            reached=loss <= rival_loss + 2 * rival_error,
            rival=f"{rival_loss:.4f} ± {rival_error:.4f}",
            values={
                "loss": loss, "loss_standard_error": loss_error,
                "rival_loss": rival_loss, "rival_loss_standard_error": rival_error,
                "paired_difference": paired, "paired_difference_standard_error": paired_error,
                **{f"loss, {i}": own.loss for i, own in enumerate(ours)},
                **{f"rival_loss, {i}": rival.loss for i, rival in enumerate(theirs)},
            },
        ),
        Row(
            work="… sent per peer and step, counted by the kernel",
            must_reach="no more than theirs",
            measured=f"{sent:,.0f} bytes, heartbeats and DHT included; fragments and rounds alone {counted:,.0f}",
            reached=sent <= rival_sent,
            rival=f"{rival_sent:,.0f} bytes; of these, computed, {masks:,.0f} masks and {values:,.0f} values",
            values={
                "bytes": sent, "counted_bytes": counted,
                "rival_bytes": rival_sent, "rival_mask_bytes": masks, "rival_value_bytes": values,
            },
        ),
        Row(
            work="… exchange holds training, mean of all steps, rounds among them",
            must_reach="",
            measured=f"{milliseconds(held)} a step; {wall:.1f} s in all",
            rival=f"{milliseconds(rival_held)} a step; {rival_wall:.1f} s in all",
            values={"held_s": held, "wall_s": wall, "rival_held_s": rival_held, "rival_wall_s": rival_wall},
        ),
    ]  # fmt: skip


def large_row(steps: Sequence[Step], rival_held_s: Sequence[float]) -> Row:
    """The table row of the exchange at 25M parameters, from the steps of our peers and the rival's seconds."""
    held_s = [step.exchange_s for step in steps]
    reports = [step.report for step in steps if step.report]
    landed = sum(report.round is not None for report in reports)
    merged, sent = (sum(getattr(report, name) for report in reports) for name in ("merged", "sent"))
    held, rival_held = statistics.fmean(held_s), statistics.fmean(rival_held_s)
    median, rival_median = Summary.of(held_s).median, Summary.of(rival_held_s).median
    return Row(
        work=f"25M parameters, k = {LARGE_PEERS}, H = {LARGE.sync_every}, p = {100 * LARGE.fragment_fraction:g} %, "
        "every core computing: exchange holds training, mean of all steps, rounds among them",
        must_reach="≤ 1/20 of theirs",
        measured=f"{milliseconds(held)} a step, {milliseconds(median)} median: 1/{rival_held / held:.0f}; "
        f"in {len(steps)} steps {landed} rounds landed, {merged} of {sent} fragments were merged",
        reached=held <= MAX_SHARE_HELD * rival_held,
        rival=f"{milliseconds(rival_held)} a step, {milliseconds(rival_median)} median",
        values={"held_s": held, "median_s": median, "rival_held_s": rival_held, "rival_median_s": rival_median},
    )


def _peer(pipe: Connection, rank: int, training: Training, way: Way) -> None:
    model = training.model()
    trainer = training.trainer(model, rank)
    with tempfile.TemporaryDirectory(prefix="p2ptrain-") as directory:
        metrics = Path(directory) / "metrics.jsonl"
        with p2ptrain.join(
            model,
            run_id="reference",
            initial_peers=pipe.recv(),
            sparta=p2ptrain.Sparta(
                fragment_fraction=training.fragment_fraction * way.fraction_scale, topology=way.topology
            ),
            diloco=p2ptrain.DiLoCo(sync_every=training.sync_every),
            total_steps=training.steps,
            run_seed=training.seed,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            gossip_budget=1.0,  # the simulator that it is compared with pushes at every step
            metrics=metrics,
        ) as peer:
            if rank == 0:
                pipe.send(tuple(peer.maddrs))
            _wait_for_others(peer, training.peers - 1)
            pipe.send("ready")
            pipe.recv()
            held_s = []
            while not peer.finished and peer.run_step < training.steps:
                begun = time.perf_counter()
                loss, tokens = trainer.step(peer.run_step)
                time.sleep(max(0.0, begun + LEAST_STEP_S - time.perf_counter()))
                started = time.perf_counter()
                peer.step(loss=loss, samples=tokens)
                held_s.append(time.perf_counter() - started)
            if not peer.wait_finished(LAST_ROUND_TIMEOUT_S):
                raise WorkerError("the run's last round did not end in time")
            model.load_state_dict(peer.anchor_state_dict())
            pipe.send((held_out_loss(model), held_s))
            pipe.recv()
        pipe.send(_counted(metrics, training.peers))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, which is NaN for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def _wait_for_others(peer: p2ptrain.Peer | GroupPeer, others: int) -> None:
    deadline = time.monotonic() + 60.0
    while len(peer.alive) < others:
        if time.monotonic() > deadline:
            raise WorkerError("the peers did not find each other in time")
        time.sleep(0.05)


def _counted(metrics: Path, peers: int) -> tuple[int, int]:
    """Read a peer's metrics. Returns bytes sent in fragments and rounds, and the number of rounds with all peers."""
    events = list(EventReader(metrics).new_events())
    sent = sum(event["bytes_sent"] for event in events if event["event"] in ("fragments", "round"))
    rounds = [event for event in events if event["event"] == "round" and event["status"] == "committed"]
    return sent, sum(len(event["contributors"]) == peers for event in rounds)
