"""One of two processes that torchrun starts: trainers whose ranks are real processes. The argument is a directory."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.torchrun import launch_of
from p2ptrain.training import checkpoint
from p2ptrain.training.data import Corpus, RandomWindows
from p2ptrain.training.inner_optimizer import InnerOptimizer, lr_share
from p2ptrain.training.models import GPT, GPTConfig
from p2ptrain.training.parallel import shard, whole
from p2ptrain.training.ranks import Ranks, open_ranks
from p2ptrain.training.trainer import PROBED_STEPS, Execution, Trainer, TrainingData

TEXT = b"to be, or not to be: that is the question. "
CORPUS = Corpus(training=np.frombuffer(TEXT * 200, np.uint8), held_out=np.frombuffer(TEXT * 20, np.uint8))
RUN = RunConfig(lr=1e-2, warmup_steps=0, total_steps=0, weight_decay=0.0, grad_clip=0.0)
STEPS = PROBED_STEPS + 2
WINDOWS = 5  # of each rank
FOLDER = Path(sys.argv[1])


class Model(nn.Module):
    """A small GPT with dropout, on a device with memory for `most` windows."""

    context = 16

    def __init__(self, dropout: float = 0.0, most: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(vocab_size=128, layers=1, heads=2, width=16, context=16))
        self.layers = nn.Sequential(gpt, nn.Dropout(dropout))
        self.most = most

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training and len(tokens) > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return self.layers(tokens)  # type: ignore[no-any-return]


def trainer_of(model: Model, ranks: Ranks, *, micro_batch: int | None = 2, seed: int = 0) -> Trainer:
    seed += ranks.rank
    return Trainer(
        model,
        TrainingData(CORPUS),
        RUN,
        batch_size=WINDOWS,
        seed=seed,
        ranks=ranks,
        execution=Execution(micro_batch=micro_batch),
    )


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def assert_equal_on_all(ranks: Ranks, values: torch.Tensor) -> None:
    assert all(torch.equal(values, theirs) for theirs in ranks.gather(values))


def a_step_is_that_of_all_windows_at_once(ranks: Ranks) -> None:
    ours, alone = Model(), Model()
    trainer = trainer_of(ours, ranks)
    streams = [RandomWindows(CORPUS.training, context=16, batch_size=WINDOWS, seed=rank) for rank in range(2)]
    optimizer = torch.optim.AdamW(alone.parameters(), lr=RUN.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        loss, tokens = trainer.step(step)
        batches = [stream.next_batch() for stream in streams]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        expected = functional.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten())
        expected.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert tokens == WINDOWS * 16
        assert abs(ranks.total(loss)[0] / 2 - expected.item()) < 1e-5
    torch.testing.assert_close(flat(ours), flat(alone), rtol=1e-3, atol=1e-4)
    assert_equal_on_all(ranks, flat(ours))
    # Each rank evaluates its share of the windows.
    assert abs(trainer.evaluate() - trainer_of(ours, Ranks()).evaluate()) < 1e-5


class Partial(Model):
    """A model that uses one of its matrices on rank 1 only, and only for 2 windows; and another never."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.never, self.rarely = (nn.Parameter(torch.ones(1, 128)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return logits * self.rarely if self.rank == 1 and len(tokens) == 2 else logits


def parameters_may_be_unused(ranks: Ranks) -> None:
    """Micro-batches are of 2, 2 and 1 windows: gradients are averaged in the third. In the first run no step probes."""
    run = dataclasses.replace(RUN, weight_decay=0.1)
    alone = Partial(rank=0)
    both = [trainer_of(alone, Ranks(), seed=rank) for rank in range(2)]
    optimizer = InnerOptimizer(alone, run)
    for step in range(STEPS):
        for rank, trainer in enumerate(both):
            alone.rank = rank
            trainer._accumulate(*trainer._windows.next_batch(), lambda: False)
        for parameter in alone.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        optimizer.step(lr_share(run, step))
        optimizer.zero_grad()
    for probes in (0, PROBED_STEPS):
        ours = Partial(ranks.rank)
        trainer = Trainer(
            ours,
            TrainingData(CORPUS),
            run,
            batch_size=WINDOWS,
            seed=ranks.rank,
            ranks=ranks,
            execution=Execution(micro_batch=None if probes else 2),
        )
        trainer.micro_batch = 2
        for step in range(STEPS):
            trainer.step(step)
        torch.testing.assert_close(flat(ours), flat(alone), rtol=1e-3, atol=1e-4)
        assert_equal_on_all(ranks, flat(ours))
        assert (ours.never == 1).all()  # without a gradient, its weights do not decay
        assert (ours.rarely != 1).any()


def a_state_goes_on_bit_for_bit(ranks: Ranks) -> None:
    whole = trainer_of(Model(dropout=0.3), ranks)
    first = trainer_of(Model(dropout=0.3), ranks)
    # Ranks differ in what they draw: else one state would do for all.
    drawn = ranks.gather(torch.rand(1))
    assert drawn[0] != drawn[1]
    trainer_of(Model(), ranks)  # seeds torch again
    losses = [whole.step(step)[0] for step in range(2 * STEPS)]
    trainer_of(Model(), ranks)
    losses_again = [first.step(step)[0] for step in range(STEPS)]
    state = {"trainer": first.state_dict(), "model": first.model.state_dict()}
    if ranks.is_first:
        checkpoint.save(FOLDER, checkpoint.Checkpoint(step=STEPS, info={}, state=state))
    ranks.any(False)  # waits for it
    saved = checkpoint.load(FOLDER / checkpoint.name_of(STEPS)).state
    again = trainer_of(Model(dropout=0.3), ranks)
    again.model.load_state_dict(saved["model"])
    again.load_state_dict(saved["trainer"])
    losses_again += [again.step(step)[0] for step in range(STEPS, 2 * STEPS)]
    assert losses_again == losses
    assert torch.equal(flat(again.model), flat(whole.model))


def ranks_halve_together(ranks: Ranks) -> None:
    whole = trainer_of(Model(), ranks)
    short = trainer_of(Model(most=2 if ranks.rank else 1000), ranks, micro_batch=None)
    for step in range(STEPS):
        assert abs(short.step(step)[0] - whole.step(step)[0]) < 1e-5
    assert [int(value) for value in ranks.gather(torch.tensor(short.state_dict()["micro_batch"]))] == [2, 2]
    torch.testing.assert_close(flat(short.model), flat(whole.model), rtol=1e-3, atol=1e-4)


def sharded_ranks_train_as_whole_ones(ranks: Ranks) -> None:
    """And each continues from a checkpoint of the other. Rank 1 has no window to evaluate."""
    muon = dataclasses.replace(RUN, inner_optimizer="muon", vocab_size=128, muon_lr=0.01)

    def new_trainer(*, sharded: bool, state: Mapping[str, Any] | None = None, run: RunConfig = RUN) -> Trainer:
        model = Model()
        if state is not None:
            model.load_state_dict(state["model"])
        if sharded:
            if ranks.rank == 1 and state is None:
                nn.init.zeros_(next(model.parameters()))  # those of rank 0 count
            shard(model, ranks, torch.device("cpu"))
        trainer = Trainer(
            model,
            TrainingData(CORPUS, eval_tokens=16),
            run,
            batch_size=WINDOWS,
            seed=ranks.rank,
            ranks=ranks,
            execution=Execution(micro_batch=2),
        )
        if state is not None:
            trainer.load_state_dict(state["trainer"])
        return trainer

    def train(trainer: Trainer, steps: range) -> dict[str, Any]:
        losses = [trainer.step(step)[0] for step in steps]
        measured = [*losses, trainer.evaluate(), *trainer.sample_weights()[:9]]
        state = {"model": whole(trainer.model.state_dict(), ranks), "trainer": trainer.state_dict()}
        return {"measured": torch.tensor(measured), "state": state}

    def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        torch.testing.assert_close(ours["measured"], theirs["measured"], rtol=0, atol=1e-3)
        if ranks.is_first:
            torch.testing.assert_close(ours["state"]["model"], theirs["state"]["model"], rtol=0, atol=1e-3)

    first = {sharded: train(new_trainer(sharded=sharded), range(STEPS)) for sharded in (False, True)}
    assert_close(first[True], first[False])
    # One step of 0.002 on average: Muon computes in bfloat16.
    assert_close(*(train(new_trainer(sharded=sharded, run=muon), range(1)) for sharded in (True, False)))
    steps = range(STEPS, 2 * STEPS)
    for sharded, result in first.items():
        if ranks.is_first:
            checkpoint.save(FOLDER, checkpoint.Checkpoint(step=10 + sharded, info={}, state=result["state"]))
    ranks.any(False)  # waits for it

    def continued(*, sharded: bool, was_sharded: bool) -> dict[str, Any]:
        state = checkpoint.load(FOLDER / checkpoint.name_of(10 + was_sharded)).state
        return train(new_trainer(sharded=sharded, state=state), steps)

    expected = continued(sharded=False, was_sharded=False)
    assert_close(continued(sharded=True, was_sharded=False), expected)
    assert_close(continued(sharded=False, was_sharded=True), expected)


def a_sharded_step_is_not_halved(ranks: Ranks) -> None:
    model = Model(most=2)
    shard(model, ranks, torch.device("cpu"))
    refusal = "it was not refused"
    try:
        trainer_of(model, ranks, micro_batch=None).step(0)
    except ConfigError as error:
        refusal = str(error)
    expected = "--micro-batch 5: cpu is out of memory; give a smaller --micro-batch; auto cannot halve it with --fsdp"
    assert refusal == expected, refusal


def lists_of_lists_are_sharded(ranks: Ranks) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            shared = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Sequential(nn.Linear(4, 4))})
            self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]), shared, shared])

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                for part in layer.values() if isinstance(layer, nn.ModuleDict) else layer:  # type: ignore[union-attr]
                    values = part(values)
            return values

    model, values = Nested(), torch.ones(2, 4)
    expected = model(values)
    shard(model, ranks, torch.device("cpu"))
    assert torch.equal(model(values), expected)
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert names == ["", "layers.0.0", "layers.0.1", "layers.1.first", "layers.1.second"]

    scalar = nn.Linear(4, 4)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    refusal = "it was not refused"
    try:
        shard(nn.Sequential(nn.ModuleList([scalar])), ranks, torch.device("cpu"))
    except ConfigError as error:
        refusal = str(error)
    except SystemExit as end:
        refusal = f"exit status {end.code}"
    assert refusal.startswith("--fsdp on: module 0.0 cannot" if ranks.is_first else "exit status 0"), refusal


def one_stops_all(ranks: Ranks) -> None:
    signals = iter([False, False, ranks.rank == 1, False])
    stop, now = ranks.agreed(lambda: next(signals))
    began_s = now()
    assert_equal_on_all(ranks, torch.tensor(began_s, dtype=torch.float64))
    assert [stop(), stop(), stop()] == [False, True, False]
    assert now() > began_s


def main() -> None:
    torch.set_num_threads(1)
    with open_ranks(launch_of(os.environ)) as ranks:
        for check in (
            a_step_is_that_of_all_windows_at_once, parameters_may_be_unused, a_state_goes_on_bit_for_bit,
            ranks_halve_together, one_stops_all, sharded_ranks_train_as_whole_ones, a_sharded_step_is_not_halved,
            lists_of_lists_are_sharded,
        ):  # fmt: skip
            check(ranks)
            if ranks.is_first:
                print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
