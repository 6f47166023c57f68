"""One run of `benchmarks.late`: all peers train in lockstep in one process, without the protocol.

What a round does is the project's: its codecs with their error feedback, its outer step, its inner optimizers and its
shares. The mean is not coded again: what that costs is left out. Muon alone is here once more, in float32: torch's
takes bfloat16, which many CPUs compute 20 times slower.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.held_out import mean_loss
from benchmarks.late_rules import RULES, Array, Landing, Prediction
from p2ptrain.algorithms.averaging import disjoint_mean
from p2ptrain.algorithms.blocks import BLOCK
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.codec.base import ERROR_DECAY
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS, outer_step
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Characters, Corpus, RandomWindows
from p2ptrain.training.inner_optimizer import MUON_MOMENTUM, MUON_TIMES, InnerOptimizer, hidden_matrices, lr_share
from p2ptrain.training.models.gpt import GPT, GPTConfig
from p2ptrain.training.partitioning import Partition

CONTEXT = 64
# SparseLoCo (arXiv 2508.15706): values of a chunk, and bins of 2 bits that cover 6 standard deviations.
SPARSE_CHUNK, SIGMAS, BINS = 4096, 6.0, 4
EVAL_BATCH = 64
# Newton-Schulz as torch.optim.Muon has it: coefficients, steps, and the size of an update relative to AdamW's.
NS_COEFFICIENTS, NS_STEPS, NS_EPS, RMS = (3.4445, -4.7750, 2.0315), 5, 1e-7, 0.2

Result = dict[str, Any]
# From values to what the others decode, and its size in bytes.
Coder = Callable[[Array], tuple[Array, int]]


@dataclass(frozen=True)
class Cell:
    """One run. `delay` and `sync_every` are inner steps; `shards` is RunConfig's `sharding`; None: the setup's.

    One peer with `sync_every` of all steps trains alone, and as data parallel with the batch of all peers.

    `spread`: the first peer is on time, the last one late by `delay`, the others in between.
    """

    grid: str
    rule: str
    delay: int
    optimizer: str
    peers: int
    shards: str
    seed: int
    codec: str = "int4"
    sync_every: int = 25
    lr: float | None = None
    steps: int | None = None
    spread: bool = False
    batch_size: int | None = None

    @property
    def delays(self) -> list[int]:
        """Of each peer."""
        if not self.spread:
            return [self.delay] * self.peers
        return [round(self.delay * number / max(1, self.peers - 1)) for number in range(self.peers)]


@dataclass(frozen=True)
class Setup:
    """The settings that all runs share, of a model with 160 thousand parameters. Tests use smaller ones."""

    steps: int = 600
    warmup_steps: int = 100
    layers: int = 3
    width: int = 64
    batch_size: int = 8
    # The corpus may have fewer without overlap.
    eval_windows: int = 1280
    lr: float = 3e-3


class Peer:
    """A model that trains on its share, and what it remembers of the round in flight.

    Attributes:
        weights: θ, the memory of the model's parameters, (n,) with n a multiple of 64.
        begun: θ right after the last snapshot.
        sent: what the others decode of the last outer gradient; `sent_before`: of the one before.
        unsent: what to take off A′, so that the codec's error stays in the weights; 0 with an error buffer.
        error: the error buffer of coarse codecs.
    """

    def __init__(self, model: nn.Module, windows: RandomWindows, run: RunConfig) -> None:
        self.weights, self.tensors = flatten(model)
        self.model, self._windows, self._run = model, windows, run
        self._matrices = hidden_matrices(model, run.vocab_size) if run.inner_optimizer == "muon" else []
        self._adamw = InnerOptimizer(model, run).adamw
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]
        self.begun, self.sent, self.sent_before, self.unsent, self.error = np.zeros((5, len(self.weights)), np.float32)

    def train(self, step: int) -> None:
        """Take an inner step, at the learning rate of this step of the run."""
        inputs, targets = self._windows.next_batch()
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self._run.grad_clip)
        rate = self._run.lr * lr_share(self._run, step)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        if self._matrices:
            muon_step(self._matrices, self._momenta, lr=MUON_TIMES * rate, weight_decay=self._run.weight_decay)
        for parameter in self.model.parameters():
            parameter.grad = None

    def contribute(self, anchor: Array, code: Coder, error_decay: float, part: slice) -> int:
        """Take the snapshot and code its outer gradient, as `rounds/moving/snapshot.py` does. Returns its bytes."""
        gradient = anchor[part] - self.weights[part] + np.float32(error_decay) * self.error[part]
        self.sent_before[part] = self.sent[part]
        self.sent[part], size = code(gradient)
        (self.error if error_decay else self.unsent)[part] = gradient - self.sent[part]
        return size


@torch.no_grad()
def muon_step(
    matrices: Sequence[nn.Parameter], momenta: Sequence[torch.Tensor], *, lr: float, weight_decay: float
) -> None:
    """A step of torch.optim.Muon (Nesterov, "match_rms_adamw"), in float32. Changes matrices and momenta in place."""
    for matrix, momentum in zip(matrices, momenta, strict=True):
        assert matrix.grad is not None
        momentum.lerp_(matrix.grad, 1 - MUON_MOMENTUM)
        update = orthogonal(matrix.grad.lerp(momentum, MUON_MOMENTUM))
        matrix.mul_(1 - lr * weight_decay)
        matrix.add_(update, alpha=-lr * RMS * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix with equal singular values, by Newton-Schulz."""
    a, b, c = NS_COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=NS_EPS)
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def flatten(model: nn.Module) -> tuple[Array, list[slice]]:
    """Move all parameters into one vector, padded to whole blocks. Returns it, and where each tensor lies."""
    parameters = list(model.parameters())
    ends = np.cumsum([parameter.numel() for parameter in parameters]).tolist()
    flat = torch.zeros(-(-ends[-1] // BLOCK) * BLOCK)
    slices = [slice(end - parameter.numel(), end) for end, parameter in zip(ends, parameters, strict=True)]
    for parameter, part in zip(parameters, slices, strict=True):
        flat[part] = parameter.detach().reshape(-1)
        parameter.data = flat[part].view_as(parameter)
    return flat.numpy(), slices


def coder_of(name: str, tensors: Sequence[slice]) -> tuple[Coder, float]:
    """Return the coder of this name, and its error decay."""
    if name.startswith("sparse"):
        return functools.partial(sparse, tensors=tensors, kept=int(name.removeprefix("sparse"))), ERROR_DECAY
    chosen = codec(name)

    def code(values: Array) -> tuple[Array, int]:
        encoded = chosen.encode(values.reshape(-1, BLOCK))
        return chosen.decode(encoded, len(values) // BLOCK).reshape(-1), len(encoded)

    return code, chosen.error_decay


def sparse(values: Array, *, tensors: Sequence[slice], kept: int) -> tuple[Array, int]:
    """SparseLoCo's coding (arXiv 2508.15706): of every 4096 values of a tensor the `kept` largest, in two bits each.

    A value takes the mean of its bin among the tensor's values; the bins, 6 σ ÷ 4 wide, lie around their mean.
    Positions take 12 bits, and the table of bin means 8 bytes a tensor (float16).
    """
    decoded, bits = np.zeros_like(values), 0
    for tensor in tensors:
        part, positions = values[tensor], []
        for start in range(0, len(part), SPARSE_CHUNK):
            chunk = np.abs(part[start : start + SPARSE_CHUNK])
            count = max(1, round(kept * len(chunk) / SPARSE_CHUNK))
            positions.append(start + np.argpartition(chunk, len(chunk) - count)[-count:])
        at = np.concatenate(positions)
        chosen = part[at]
        width = max(SIGMAS * float(chosen.std()) / BINS, 1e-12)
        bins = np.clip(np.floor((chosen - chosen.mean()) / width) + BINS // 2, 0, BINS - 1).astype(np.int64)
        sums, counts = np.bincount(bins, chosen, BINS), np.bincount(bins, minlength=BINS)
        means = (sums / np.maximum(counts, 1)).astype(np.float16).astype(np.float32)
        decoded[tensor][at] = means[bins]
        bits += len(at) * (12 + 2) + 16 * BINS
    return decoded, -(-bits // 8)


def mean_of(sent: Sequence[Array], *, of_senders: bool) -> Array:
    """The mean over all peers, or for each coordinate over those that sent a value of it."""
    total: Array = np.sum(sent, axis=0, dtype=np.float32)
    senders = np.maximum(np.count_nonzero(sent, axis=0), 1) if of_senders else len(sent)
    return (total / senders).astype(np.float32)


def topk_mean(sent: Sequence[Array]) -> Array:
    """The project's mean of `topk`, of values that are decoded already."""
    none, blocks = codec("none"), len(sent[0]) // BLOCK
    encoded = [(none.encode(values.reshape(-1, BLOCK)), 1.0) for values in sent]
    return disjoint_mean(encoded, none, blocks).reshape(-1)


def simulate(cell: Cell, corpus: Corpus, partition: Partition | None, setup: Setup) -> Result:
    """Train all peers, and measure them. Returns losses, None if they diverged, and MB of a peer's outer gradients."""
    run = run_config(cell, setup)
    steps, peers = run.total_steps, []
    for number in range(cell.peers):
        torch.manual_seed(cell.seed)
        shape = GPTConfig(
            vocab_size=Characters.vocab_size, layers=setup.layers, heads=4, width=setup.width, context=CONTEXT
        )
        windows = RandomWindows(
            corpus.training,
            context=CONTEXT,
            batch_size=cell.batch_size or setup.batch_size,
            seed=1000 * cell.seed + number,
            spans=partition.spans(number) if partition else None,
        )
        peers.append(Peer(GPT(shape), windows, run))
    rule, tensors = RULES[cell.rule], peers[0].tensors
    is_sparse, is_topk = cell.codec.startswith("sparse"), cell.codec == "topk"
    lateness = statistics.fmean(cell.delays) / cell.sync_every
    # With short intervals, and for SparseLoCo, the plain mean: as good, or needed (measured).
    plain = cell.grid == "bytes" and (is_sparse or is_topk or cell.sync_every <= 10)
    optimizer, lr, momentum = ("sgd", 1.0, 0.0) if plain else rule.outer(lateness)
    code, error_decay = coder_of(cell.codec, tensors)
    anchor = peers[0].weights.copy()
    moments = [np.zeros_like(anchor) for _ in range(OUTER_OPTIMIZERS[optimizer].num_moments)]
    mean, before, sent_bytes, rounds = np.zeros_like(anchor), np.zeros_like(anchor), 0, 0
    # Each section has rounds of its own, in turn. Its bytes are fewer, so it lands sooner.
    bounds = [len(anchor) // BLOCK * number // rule.sections * BLOCK for number in range(rule.sections + 1)]
    sections = [slice(*pair) for pair in itertools.pairwise(bounds)]
    first_due = [cell.sync_every * number // rule.sections for number in range(rule.sections)]
    delays = [math.ceil(delay / rule.sections) for delay in cell.delays]
    taken = [-math.inf] * rule.sections  # the step of each section's snapshot

    def step_from(gradient: Array) -> Array:
        """Where an outer step with this gradient would lead; changes nothing."""
        predicted = anchor.copy()
        copies = [moment.copy() for moment in moments]
        outer_step(optimizer, predicted, copies, gradient, lr=lr, momentum=momentum, round_=rounds)
        return predicted

    for step in range(1, steps + 1):
        for peer in peers:
            peer.train(step - 1)
        for number, section in enumerate(sections):
            if step >= cell.sync_every and step % cell.sync_every == first_due[number] and step < steps:
                taken[number] = step
                if not all(np.isfinite(peer.weights).all() for peer in peers):
                    return {"loss": None, "own_loss": None, "mb": None}
                for peer in peers:
                    sent_bytes += peer.contribute(anchor, code, error_decay, section)
                    if rule.start is not None and rounds:
                        own = (peer.weights.copy(), peer.sent, peer.sent_before)
                        guess = Prediction(*own, moments[0], mean, len(peers), momentum, step_from)
                        peer.weights[:] = rule.start(guess)
                    peer.begun[section] = peer.weights[section]
            if step == taken[number] + min(delays):
                sent = [peer.sent[section] for peer in peers]
                mean[section] = topk_mean(sent) if is_topk else mean_of(sent, of_senders=is_sparse)
                before[section] = anchor[section]
                of_section = [moment[section] for moment in moments]
                gradient = rule.gradient(mean[section], of_section, tensors, lateness)
                outer_step(
                    optimizer, anchor[section], of_section, gradient, lr=lr, momentum=momentum,
                    round_=rounds // rule.sections,
                )  # fmt: skip
                rounds += 1
            for peer, delay in zip(peers, delays, strict=True):
                if step == taken[number] + delay:
                    peer.weights[section] = rule.land(
                        Landing(
                            peer.weights[section],
                            peer.begun[section],
                            before[section],
                            anchor[section],
                            -peer.unsent[section],
                            mean[section],
                            tensors,
                        )
                    )
    held_out_loss = functools.partial(mean_loss, held_out=corpus.held_out, batch=EVAL_BATCH)
    own_losses = [held_out_loss(peer.model, windows=setup.eval_windows // 4) for peer in peers]
    peers[0].weights[:] = np.mean([peer.weights for peer in peers], axis=0)
    loss = held_out_loss(peers[0].model, windows=setup.eval_windows)
    mb = sent_bytes / len(peers) / 1e6
    return {"loss": _rounded(loss), "own_loss": _rounded(statistics.fmean(own_losses)), "mb": mb}


def run_config(cell: Cell, setup: Setup) -> RunConfig:
    """The settings of the inner optimizer, and of the shares."""
    return RunConfig(
        model="gpt-demo", total_steps=cell.steps or setup.steps, warmup_steps=setup.warmup_steps,
        lr=cell.lr or setup.lr, inner_optimizer=cell.optimizer, num_shards=cell.peers, sharding=cell.shards,
        run_seed=cell.seed,
    )  # fmt: skip


def _rounded(loss: float) -> float | None:
    return round(loss, 5) if math.isfinite(loss) else None
