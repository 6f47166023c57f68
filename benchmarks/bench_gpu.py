"""What the exchange takes of training on a GPU: two peers on one, each with GPT-2 124M in bfloat16, compiled.

Phases with and without `peer.step()` alternate on the same live peers. In the former every step pushes a fragment, most
merge one, and rounds are committed. A step reads its loss, as most loops do, so the next one begins with an idle GPU.
Then rounds of two such peers, and of two with 391M parameters, without training beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import bench_round
from benchmarks.measure import Summary, milliseconds
from benchmarks.row import Row
from benchmarks.swarm import Phase, Setup, Step, Swarm
from benchmarks.workloads import Pause
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.data.tokenizer import GPT2_VOCAB_SIZE
from p2ptrain.training.models import build
from p2ptrain.training.trainer import Execution, Trainer, TrainingData

# Interleaved, because the speed of the machine varies.
PAIRS = 3
# To compile the model in both processes at once, the first time on this machine (guess).
PREPARE_S = 900.0
MOST_STEP_S = 0.001
LEAST_SHARE = 0.98


@dataclass(frozen=True)
class Scale:
    """What is trained, and where.

    Attributes:
        vocab_size: rows of the model's tables; at least as many as there are characters, which the text is made of.
        windows: of text, in a step of one peer.
        steps: of a phase; in those with an exchange, a round begins every `sync_every`.
        precision: dtype of autocast; None for none.
    """

    device: str
    model: str
    vocab_size: int
    windows: int
    steps: int
    sync_every: int
    precision: torch.dtype | None
    compiled: bool


GPT2 = Scale("cuda", "gpt2-124m", GPT2_VOCAB_SIZE, 8, 100, 50, torch.bfloat16, compiled=True)
# Models of the round benchmark: 124M and 391M parameters.
ROUND_SCALES = (GPT2, dataclasses.replace(GPT2, model="diloco-400m", vocab_size=32_000))
# As many as fit into a minute (guess).
ROUNDS = 4


def run() -> list[Row]:
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA or ROCm GPU on this machine; run it where nvidia-smi or rocm-smi does")
    return [*measure(GPT2), *(measure_round(scale) for scale in ROUND_SCALES)]


def measure_round(scale: Scale, rounds: int = ROUNDS) -> Row:
    """Measure rounds of two peers without training beside them."""
    setup = Setup(functools.partial(_model, scale), Pause(0.02), sync_every=600, round_steps=2000, prepare_s=120.0)
    ours = bench_round.measure(setup, peers=2, rounds=rounds)
    wall, longest, cpu = Summary.of(ours.wall_s), Summary.of(ours.longest_s), Summary.of(ours.cpu_s)
    return Row(
        work=f"a round: {scale.model}, int8, two peers on one device ({scale.device}): due to landed, slower peer",
        must_reach="",
        measured=f"{wall.median:.2f} s median, {wall.maximum:.2f} s worst of {wall.count}; {cpu.median:.2f} s of CPU; "
        f"a step held {milliseconds(longest.median)} longer than usual, {milliseconds(longest.maximum)} worst; "
        f"{ours.failed} failed",
        values={"wall_s": wall.median, "cpu_s": cpu.median, "longest_s": longest.median},
    )


def measure(scale: Scale) -> list[Row]:
    """Train alternately without and with the exchange."""
    setup = Setup(
        functools.partial(_model, scale), functools.partial(_training, scale), fragment_fraction=0.005,
        sync_every=scale.sync_every, prepare_s=PREPARE_S, step_timeout_s=10.0,
    )  # fmt: skip
    alone, together = list[Step](), list[Step]()
    with Swarm(setup, peers=2) as swarm:
        swarm.run(Phase(scale.steps))  # links are up, and pinned memory is allocated
        for _ in range(PAIRS):
            alone += itertools.chain(*swarm.run(Phase(scale.steps, exchange=False)))
            together += itertools.chain(*swarm.run(Phase(scale.steps)))
    return _rows(scale, alone, together)


def _rows(scale: Scale, alone: Sequence[Step], together: Sequence[Step]) -> list[Row]:
    name = f"{scale.model}, two peers on one device ({scale.device}), p = 0.5 %, a round every {scale.sync_every} steps"
    reports = [step.report for step in together if step.report is not None]
    sent, merged = sum(report.sent for report in reports), sum(report.merged for report in reports)
    rounds = [step for step in together if step.report is not None and step.report.round is not None]
    took = Summary.of(step.exchange_s for step in together)
    # Means, so that steps with a round count as often as they are.
    alone_s, together_s = (sum(step.whole_s for step in steps) / len(steps) for steps in (alone, together))
    share = alone_s / together_s
    landing = f", {milliseconds(max(step.exchange_s for step in rounds))} at most with a landing" if rounds else ""
    counts = f"merged {merged} of {sent} fragments, {len(rounds)} rounds landed"
    return [
        Row(
            work=f"peer.step(): {name}",
            must_reach=f"≤ {1e3 * MOST_STEP_S:g} ms median",
            measured=f"{took.milliseconds()}{landing}; {counts}",
            reached=took.median <= MOST_STEP_S and merged > 0 and len(rounds) > 0,
            values={
                "median_s": took.median, "p99_s": took.p99, "sent": sent, "merged": merged, "landed": len(rounds),
            },
        ),
        Row(
            work=f"training with all exchange: {name}",
            must_reach=f"≥ {100 * LEAST_SHARE:g} % of training without",
            measured=f"{100 * share:.1f} % ({milliseconds(together_s)} a step, {milliseconds(alone_s)} without)",
            reached=share >= LEAST_SHARE,
            values={"share": share, "step_s": together_s, "step_without_s": alone_s},
        ),
    ]  # fmt: skip


def _model(scale: Scale) -> nn.Module:
    return build(scale.model, vocab_size=scale.vocab_size, seed=0).to(scale.device)


def _training(scale: Scale, model: nn.Module) -> Callable[[], None]:
    """Train as `p2ptrain join` does. The first step, which compiles the model, is taken here."""
    trainer = Trainer(
        model,
        TrainingData(load_corpus("stdlib", Characters())),
        RunConfig(total_steps=0),
        batch_size=scale.windows,
        seed=0,
        execution=Execution(precision=scale.precision, compiled=scale.compiled, read_ahead=True),
    )
    trainer.step(0)
    return lambda: _step(trainer)


def _step(trainer: Trainer) -> None:
    trainer.step(0)
