"""The end of the demo: results from the peers' checkpoints and metrics, as a report."""

from __future__ import annotations

import shlex
import statistics
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from p2ptrain.algorithms.metrics import pairwise_correlation
from p2ptrain.demo.orchestrator import BOOTSTRAP, IDENTITY, DemoFailedError, peer_directory
from p2ptrain.demo.plan import DemoPlan
from p2ptrain.errors import CheckpointError
from p2ptrain.formatting import clock, count, size
from p2ptrain.monitor.liveview import REASONS
from p2ptrain.monitor.peerview import PeerState
from p2ptrain.monitor.swarmview import BytesPerStep, SwarmView
from p2ptrain.peer.model_layout import ModelParts
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.machine import address_towards
from p2ptrain.training import checkpoint
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.generation import generate_text
from p2ptrain.training.models import build_of
from p2ptrain.training.trainer import Trainer, TrainingData

PROMPT = "def "
SAMPLE_LENGTH = 400
# At lower temperatures a model with so little training mostly writes spaces (tried).
TEMPERATURE = 0.9
CURVES = "curves.png"
SUMMARY = "summary.txt"
PORT = 4001
WIDTH = 79


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

    # The newest one, in case a peer missed the last round.
    newest = max(checkpoints.values(), key=lambda found: (found.info["round"], found.step))
    anchor = ModelParts(model).unflatten(newest.state["peer"]["anchor"])
    model.load_state_dict(anchor, strict=False)
    info = {name: value for name, value in newest.info.items() if name != "peer_id"}
    merged = checkpoint.Checkpoint(newest.step, info, {"model": model.state_dict()})
    correlations = [found.value for found in swarm.correlations() if found.step < swarm.total_steps]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seed = run.run_seed
    text = generate_text(model, Characters(), PROMPT, length=SAMPLE_LENGTH, temperature=TEMPERATURE, seed=seed)
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
        text=PROMPT + "".join(text),
    )


def format_report(
    results: Results, swarm: SwarmView, plan: DemoPlan, out: Path, *, bootstrap_id: str, took_s: float
) -> str:
    """The report as plain text. Only its commands are wider than a terminal."""
    sections = [
        _headline(swarm, took_s),
        _losses(results),
        _agreement(results, swarm),
        _traffic(results, plan),
        f"The merged model ({results.parameters:,} weights) writes:\n{_quoted(results.text)}",
        _files(results, out),
        _across_machines(plan, out, bootstrap_id),
    ]
    return "\n\n".join(sections) + "\n"


def _headline(swarm: SwarmView, took_s: float) -> str:
    steps = sum(peer.own_steps for peer in swarm.peers.values())
    peers = count(len(swarm.peers), "peer")
    return _prose(f"Done in {clock(took_s)}: {peers} made {steps:,} inner steps in a run of {swarm.total_steps:,}.")


def _losses(results: Results) -> str:
    lines = ["Held-out loss, nats a character      before the last round     after it"]
    for peer in results.peers:
        before = "" if peer.before is None else f"{peer.before:.3f}"
        lines.append(f"    peer {peer.number}, {peer.steps:>6,} own steps {before:>28} {peer.after:>12.3f}")
    lines.append(f"    merged model {results.merged:>52.3f}")
    return "\n".join(lines)


def _agreement(results: Results, swarm: SwarmView) -> str:
    by_size = Counter(len(round_.contributors) for round_ in swarm.rounds.applied)
    sizes = ", ".join(f"{times} by {count(peers, 'peer')}" for peers, times in sorted(by_size.items(), reverse=True))
    anchors = "the same, bit for bit," if results.same_anchor else "NOT THE SAME"
    lines = [f"Rounds committed: {by_size.total()} ({sizes}); their anchors were {anchors} on all peers."]
    if results.correlation_mean is not None:
        lines.append(
            f"Average pairwise correlation of the weights: {results.correlation_mean:.4f} while training "
            f"(lowest {results.correlation_lowest:.4f}), {results.correlation_end:.4f} at the end."
        )
    skipped = Counter(results.skipped)
    reasons = [f"{number:,} {REASONS.get(reason, reason)}" for reason, number in skipped.most_common()]
    why = f" ({', '.join(reasons)})" if reasons else ""
    lines.append(f"Fragments: {results.merged_fragments:,} merged, {skipped.total():,} skipped{why}.")
    return "\n".join(_prose(line) for line in lines)


def _traffic(results: Results, plan: DemoPlan) -> str:
    traffic = results.traffic
    sent = traffic.fragments + traffic.rounds
    return _prose(
        f"Payload sent per step and peer: {size(sent)} (fragments {size(traffic.fragments)}, rounds "
        f"{size(traffic.rounds)}). Dense data-parallel training would send {size(traffic.dense)}, "
        f"{traffic.dense / sent:,.0f} times as much, and wait for it: ring all-reduce of fp32 gradients at "
        f"every step, 2(k−1)/k · 4N bytes with k = {plan.peers} peers and N = {results.parameters:,} weights."
    )


def _files(results: Results, out: Path) -> str:
    lines = {
        out / CURVES: "losses and correlation",
        results.checkpoint: "the merged model, for p2ptrain generate",
        out / SUMMARY: "this report",
        out / "peer-*": "log, metrics and checkpoint of each peer",
    }
    width = max(len(str(path)) for path in lines)
    return "Written:\n" + "\n".join(f"    {path!s:<{width}}  {what}" for path, what in lines.items())


def _across_machines(plan: DemoPlan, out: Path, bootstrap_id: str) -> str:
    identity = out / BOOTSTRAP / IDENTITY
    here = address_towards("192.0.2.1") or "127.0.0.1"  # a network for documentation: where the default route leads
    address = f"/ip4/{here}/tcp/{PORT}/p2p/{bootstrap_id}"
    bootstrap = ["p2ptrain", "bootstrap", "--host-maddrs", f"/ip4/0.0.0.0/tcp/{PORT}", "--identity", str(identity)]
    join = ["p2ptrain", "join", "--initial-peers", address, *plan.run_flags]
    return (
        f"To do the same across machines, start a bootstrap node on this one:\n\n{shlex.join(bootstrap)}\n\n"
        f"and a peer on each machine, including this one, in another terminal:\n\n{shlex.join(join)}"
    )


def _prose(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _quoted(text: str) -> str:
    """The text, indented and without the ends of lines that are too wide."""
    lines = text.expandtabs(4).splitlines()
    shortened = (line if len(line) <= WIDTH - 4 else f"{line[: WIDTH - 6].rstrip()} …" for line in lines)
    return "\n".join(f"    {line}".rstrip() for line in shortened)
