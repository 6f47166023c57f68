"""The results of the demo, measured from the peers' checkpoints and metrics."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from p2ptrain.algorithms.metrics import pairwise_correlation
from p2ptrain.demo.directory import peer_directory
from p2ptrain.demo.orchestrator import DemoFailedError
from p2ptrain.errors import CheckpointError
from p2ptrain.monitor.peerview import PeerState
from p2ptrain.monitor.swarmview import BytesPerStep, SwarmView
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.settings.config import RunConfig
from p2ptrain.training import checkpoint
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.generation import generate_text
from p2ptrain.training.models import build_of
from p2ptrain.training.trainer import Trainer, TrainingData

PROMPT = "def "
SAMPLE_LENGTH = 400
# At lower temperatures a model with so little training mostly writes spaces (tried).
TEMPERATURE = 0.9


@dataclass(frozen=True)
class PeerResult:
    """One peer at the end. Held-out losses in nats per character, before and after the last round."""

    number: int
    steps: int
    before: float | None
    after: float


@dataclass(frozen=True)
class Results:
    """Everything that the demo reports.

    Attributes:
        peers: the peers that finished.
        merged: held-out loss of the merged model, which is the anchor of the last round.
        same_anchor: whether every peer ended with the same anchor, and all rounds were the same, bit for bit.
        correlation_mean, correlation_lowest: pairwise correlation of the weights during training; None if unknown.
        correlation_end: the same over all weights, after the last round.
        traffic: payload sent.
        merged_fragments, skipped: counts of fragments; `skipped` by reason.
        parameters: number of trained weights.
        checkpoint: where the merged model was saved.
        text: sample text of the merged model.
    """

    peers: tuple[PeerResult, ...]
    merged: float
    same_anchor: bool
    correlation_mean: float | None
    correlation_lowest: float | None
    correlation_end: float
    traffic: BytesPerStep
    merged_fragments: int
    skipped: dict[str, int]
    parameters: int
    checkpoint: Path
    text: str


def measure(out: Path, swarm: SwarmView, *, peers_at_once: int) -> Results:
    """Load the peers' checkpoints, measure them, and save the merged model in `out`.

    Raises:
        DemoFailedError: no peer has saved a checkpoint, or all checkpoints of a peer are damaged.
    """
    finished = [peer for peer in swarm.peers.values() if peer.state is PeerState.FINISHED]
    try:
        saved = {peer.number: checkpoint.load_newest(peer_directory(out, peer.number)) for peer in finished}
    except CheckpointError as error:
        raise DemoFailedError(f"{error}; see the logs, {peer_directory(out, 1)} and so on") from error
    checkpoints = {number: found for number, found in saved.items() if found is not None}
    if not checkpoints:
        raise DemoFailedError(f"no peer has saved a checkpoint; see the logs, {peer_directory(out, 1)} and so on")
    run = RunConfig.from_stated(next(iter(checkpoints.values())).info["run"])
    model = build_of(run)
    trainer = Trainer(model, TrainingData(load_corpus("stdlib", Characters())), run, batch_size=1, seed=0)

    results, weights = [], []
    for number, found in checkpoints.items():
        peer = swarm.peers[number]
        model.load_state_dict(found.state["model"])
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().numpy())
        before = [loss for t, loss in peer.held_out if t < peer.last_round_t]
        results.append(PeerResult(number, peer.own_steps, before[-1] if before else None, trainer.evaluate()))

    # Use the newest, in case a peer missed the last round.
    newest = max(checkpoints.values(), key=lambda found: (found.info["round"], found.step))
    anchor = ModelParts(model).unflatten(newest.state["peer"]["anchor"])
    model.load_state_dict(anchor, strict=False)
    info = {name: value for name, value in newest.info.items() if name != "peer_id"}
    merged = checkpoint.Checkpoint(newest.step, info, {"model": model.state_dict()})
    correlations = [found.value for found in swarm.correlations() if found.step < swarm.total_steps]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Results(
        peers=tuple(results),
        merged=trainer.evaluate(),
        same_anchor=len({found.info["anchor_hash"] for found in checkpoints.values()}) == 1 and swarm.rounds.agreed,
        correlation_mean=statistics.fmean(correlations) if correlations else None,
        correlation_lowest=min(correlations, default=None),
        correlation_end=pairwise_correlation(weights) if len(weights) > 1 else 1.0,
        traffic=swarm.bytes_per_step(parameters, peers_at_once),
        merged_fragments=sum(peer.merged for peer in swarm.peers.values()),
        skipped=dict(sum((peer.skipped for peer in swarm.peers.values()), start=Counter())),
        parameters=parameters,
        checkpoint=checkpoint.save(out, merged),
        text=PROMPT
        + "".join(
            generate_text(model, Characters(), PROMPT, length=SAMPLE_LENGTH, temperature=TEMPERATURE, seed=run.run_seed)
        ),
    )
