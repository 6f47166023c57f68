"""Local training: schedule, optimizer, held-out loss, and a restored state that continues bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Corpus
from p2ptrain.training.inner_optimizer import InnerOptimizer, hidden_matrices, lr_share
from p2ptrain.training.models import GPT, GPTConfig, Llama, LlamaConfig
from p2ptrain.training.trainer import (
    EVAL_BATCH,
    EVAL_TOKENS,
    MAX_LOST_STEPS,
    SAMPLED_WEIGHTS,
    Execution,
    Stopped,
    Trainer,
    TrainingData,
)
from tests.training.characters import encode

CORPUS = Corpus(training=encode("to be, or not to be: that is the question. " * 200), held_out=encode("to be " * 50))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _model(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        gpt = GPT(GPTConfig(vocab_size=98, layers=1, heads=2, width=16, context=16))
    model = nn.Sequential(gpt, nn.Dropout(dropout))
    model.context = 16
    return model


def _trainer(*, run: RunConfig | None = None, seed: int = 3, dropout: float = 0.0) -> Trainer:
    run = run or RunConfig(total_steps=40, warmup_steps=4, lr=1e-2)
    return Trainer(_model(dropout), TrainingData(CORPUS), run, batch_size=4, seed=seed)


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    run = RunConfig(lr=1.0, warmup_steps=10, total_steps=110)
    assert lr_share(run, 0) == pytest.approx(0.1)
    assert lr_share(run, 9) == lr_share(run, 10) == 1.0
    assert lr_share(run, 60) == pytest.approx(0.55)
    assert lr_share(run, 110) == lr_share(run, 500) == pytest.approx(0.1)
    rates = [lr_share(run, step) for step in range(10, 110)]
    assert rates == sorted(rates, reverse=True)


def test_the_rate_of_a_run_without_end_is_constant_after_warm_up() -> None:
    run = RunConfig(lr=1.0, warmup_steps=10, total_steps=0)
    assert [lr_share(run, step) for step in (4, 10, 10**9)] == [0.5, 1.0, 1.0]
    assert lr_share(RunConfig(lr=1.0, warmup_steps=0), 0) == 1.0


def test_it_learns() -> None:
    trainer = _trainer()
    before = trainer.evaluate()
    losses = [trainer.step(step)[0] for step in range(40)]
    assert before == pytest.approx(math.log(98), abs=0.2)
    assert losses[-1] < losses[0] - 1
    assert trainer.evaluate() < before - 1


def test_a_step_reports_its_tokens() -> None:
    assert _trainer().step(0)[1] == 4 * 16


def test_the_rate_follows_the_runs_step_not_ones_own() -> None:
    run = RunConfig(lr=1e-2, warmup_steps=10**6, weight_decay=0.0)
    early, late = _trainer(run=run), _trainer(run=run)
    start = early.sample_weights()
    early.step(0)
    late.step(10**6)
    assert np.abs(np.subtract(early.sample_weights(), start)).max() < 1e-6
    assert np.abs(np.subtract(late.sample_weights(), start)).max() > 1e-3


def test_only_matrices_decay_and_all_have_the_runs_betas() -> None:
    model = _model()
    trainer = Trainer(model, TrainingData(CORPUS), RunConfig(weight_decay=0.5, beta2=0.99), batch_size=1, seed=0)
    decaying, kept = trainer.state_dict()["optimizer"]["param_groups"]
    assert decaying["betas"] == kept["betas"] == (0.9, 0.99)
    assert (decaying["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    matrices = sum(parameter.ndim >= 2 for parameter in model.parameters())
    assert (len(decaying["params"]), len(kept["params"])) == (matrices, len(list(model.parameters())) - matrices)


def test_the_held_out_loss_is_the_mean_over_fixed_windows() -> None:
    trainer = _trainer(dropout=0.5)
    assert trainer.evaluate() == trainer.evaluate()
    trainer.step(0)
    assert trainer.model.training


def test_peers_draw_different_text() -> None:
    assert _trainer(seed=1).step(0)[0] != _trainer(seed=2).step(0)[0]


def test_a_shards_text_is_all_that_is_trained_on() -> None:
    half = len(CORPUS.training) // 2
    for begin, end in ((0, half), (half, 2 * half)):
        trainer = Trainer(
            _model(), TrainingData(CORPUS, spans=np.array([[begin, end]])), RunConfig(), batch_size=4, seed=3
        )
        alone = Trainer(
            _model(),
            TrainingData(Corpus(CORPUS.training[begin:end], CORPUS.held_out)),
            RunConfig(),
            batch_size=4,
            seed=3,
        )
        assert [trainer.step(step)[0] for step in range(3)] == [alone.step(step)[0] for step in range(3)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_twenty_steps_are_ten_and_ten_more_bit_for_bit(dropout: float) -> None:
    straight = _trainer(dropout=dropout)
    expected = [straight.step(step)[0] for step in range(20)]

    first = _trainer(dropout=dropout)
    losses = [first.step(step)[0] for step in range(10)]
    weights, state = first.model.state_dict(), first.state_dict()
    resumed = _trainer(dropout=dropout)
    resumed.model.load_state_dict(weights)
    torch.manual_seed(12345)
    resumed.load_state_dict(state)
    losses += [resumed.step(step)[0] for step in range(10, 20)]

    assert losses == expected
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_that_is_loaded_shares_no_memory_with_its_source() -> None:
    """The tensors of a checkpoint are maps of its file, which would stay on the disk when it is removed."""
    first, resumed = _trainer(), _trainer()
    first.step(0)
    state = first.state_dict()
    moments = [values["exp_avg"] for values in state["optimizer"]["state"].values()]
    before = copy.deepcopy(moments)
    resumed.load_state_dict(state)
    resumed.step(1)
    assert moments
    assert all(map(torch.equal, moments, before))


def test_a_state_goes_on_with_the_seed_that_is_given() -> None:
    first, copied, same = _trainer(), _trainer(seed=99), _trainer()
    first.step(0)
    for trainer in (copied, same):
        trainer.model.load_state_dict(first.model.state_dict())
        trainer.load_state_dict(first.state_dict())
    expected = first.step(1)
    assert same.step(1) == expected
    assert copied.step(1) != expected
    assert copied.state_dict()["windows"] == {"seed": 99, "position": 2}


def test_replaced_data_is_reported_and_used(caplog: pytest.LogCaptureFixture) -> None:
    def trainer(digest: str) -> Trainer:
        return Trainer(
            _model(), TrainingData(dataclasses.replace(CORPUS, digest=digest)), RunConfig(), batch_size=4, seed=3
        )

    first = trainer("old")
    first.step(0)
    state = first.state_dict()
    older = {name: value for name, value in state.items() if name != "data"}  # of a version that did not note it
    for digest, saved in (("old", state), ("", state), ("new", older)):
        trainer(digest).load_state_dict(saved)
    assert caplog.messages == []
    second = trainer("new")
    second.load_state_dict(state)
    (said,) = caplog.messages
    assert said.startswith("--data: is another text than that of the checkpoint; batch 1 and all later ones come from")
    second.step(1)
    trainer("new").load_state_dict(second.state_dict())
    other_rank: Any = trainer("new")
    other_rank.ranks = SimpleNamespace(rank=1)
    other_rank.load_state_dict(state)
    assert len(caplog.messages) == 1


def test_the_weights_sample_is_the_same_places_everywhere() -> None:
    trainer, other = _trainer(), _trainer(seed=8)
    sample = trainer.sample_weights()
    assert sample == other.sample_weights()
    assert len(sample) == SAMPLED_WEIGHTS
    # Adding 1000 to every weight moves every sampled one.
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 1000
    assert np.subtract(trainer.sample_weights(), sample) == pytest.approx(np.full(SAMPLED_WEIGHTS, 1000.0), abs=0.01)


def test_the_weights_sample_reads_tensors_of_any_layout() -> None:
    model = _model()
    expected = Trainer(model, TrainingData(CORPUS), RunConfig(), batch_size=1, seed=0).sample_weights()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
            assert not module.weight.is_contiguous()
    assert Trainer(model, TrainingData(CORPUS), RunConfig(), batch_size=1, seed=0).sample_weights() == expected


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = _trainer()
    trainer.step(0)
    weights = nn.utils.parameters_to_vector(trainer.model.parameters()).clone()
    poison = trainer.model.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    for step in range(1, MAX_LOST_STEPS):
        loss, _ = trainer.step(step)
        assert math.isnan(loss)
    assert torch.equal(nn.utils.parameters_to_vector(trainer.model.parameters()), weights)
    with pytest.raises(ConfigError, match=r"lr = 0.01: the gradient was not finite for 50 steps"):
        trainer.step(50)
    poison.remove()
    assert math.isfinite(trainer.step(51)[0])


def test_frozen_parameters_stay() -> None:
    model = _model()
    frozen = model[0].token_embedding.weight.requires_grad_(False)
    before = frozen.clone()
    trainer = Trainer(model, TrainingData(CORPUS), RunConfig(warmup_steps=0), batch_size=2, seed=0)
    trainer.step(0)
    assert torch.equal(frozen, before)
    trainer.sample_weights()


def test_wsd_stays_at_the_peak_and_decays_to_zero_in_the_last_fifth() -> None:
    run = RunConfig(warmup_steps=10, total_steps=1000, schedule="wsd")
    assert [lr_share(run, step) for step in (4, 9, 100, 799, 800)] == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert [lr_share(run, step) for step in (900, 950, 1000, 1200)] == pytest.approx([0.5, 0.25, 0.0, 0.0])
    assert lr_share(RunConfig(schedule="wsd", total_steps=0), 10**9) == 1.0


def test_a_constant_rate_is_constant() -> None:
    run = RunConfig(warmup_steps=10, total_steps=1000, schedule="constant")
    assert [lr_share(run, step) for step in (9, 10, 999, 2000)] == [1.0] * 4


TINY = GPTConfig(vocab_size=98, layers=2, heads=2, width=16, context=16)
MUON = RunConfig(inner_optimizer="muon", lr=1e-3, warmup_steps=0, total_steps=0)


def test_muon_has_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = GPT(TINY)
    names = {name for name, p in model.named_parameters() if any(p is q for q in hidden_matrices(model, 98))}
    assert names == {
        f"blocks.{block}.{matrix}.weight"
        for block in (0, 1)
        for matrix in ("attention.query_key_value", "attention.project", "mlp.expand", "mlp.project")
    }
    inner = InnerOptimizer(model, MUON)
    assert inner.muon is not None
    counts = [sum(len(group["params"]) for group in each.param_groups) for each in (inner.adamw, inner.muon)]
    assert counts == [len(list(model.parameters())) - 8, 8]


@pytest.mark.parametrize("vocab_size", [20, 98])
def test_with_one_table_for_both_muon_has_every_matrix_of_the_blocks(vocab_size: int) -> None:
    """Also where a block's output is wider than the vocabulary, so that its last layer looks like a head."""
    gpt = GPT(GPTConfig(vocab_size=vocab_size, layers=2, heads=2, width=128, context=16))
    assert len(hidden_matrices(gpt, vocab_size)) == 2 * 4
    for tied in (True, False):
        shape = LlamaConfig(vocab_size=vocab_size, layers=2, heads=2, width=128, hidden=150, context=16, tied=tied)
        assert len(hidden_matrices(Llama(shape), vocab_size)) == 2 * 7


def test_a_head_of_its_own_is_adamws() -> None:
    model = nn.Sequential(nn.Embedding(98, 16), nn.Linear(16, 200), nn.Linear(200, 16), nn.Linear(16, 98))
    assert [tuple(p.shape) for p in hidden_matrices(model, 98)] == [(200, 16), (16, 200)]


def test_both_optimizers_follow_the_schedule_with_their_own_rates() -> None:
    model = GPT(TINY)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for muon_lr, expected in ((0.0, 2e-3), (0.02, 1e-2)):
        inner = InnerOptimizer(model, dataclasses.replace(MUON, muon_lr=muon_lr))
        inner.step(0.5)
        assert inner.muon is not None
        rates = {group["lr"] for each in (inner.adamw, inner.muon) for group in each.param_groups}
        assert rates == {5e-4, expected}


def test_muon_learns_and_continues_exactly_after_a_restart() -> None:
    def trainer() -> Trainer:
        torch.manual_seed(1)
        return Trainer(GPT(TINY), TrainingData(CORPUS), MUON, batch_size=4, seed=5)

    whole, first = trainer(), trainer()
    losses = [whole.step(step)[0] for step in range(30)]
    assert losses[-1] < losses[0] - 0.5
    for step in range(10):
        first.step(step)
    state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(first.model.state_dict())
    again = trainer()
    again.model.load_state_dict(weights)
    again.load_state_dict(state)
    assert [again.step(step)[0] for step in range(10, 30)] == losses[10:]


def test_a_torch_without_muon_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"has no Muon; install torch 2.9 or newer"):
        InnerOptimizer(GPT(TINY), MUON)


def test_a_model_without_hidden_matrices_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"the model has no hidden matrices"):
        InnerOptimizer(nn.Sequential(nn.Embedding(98, 98)), MUON)


def test_gradients_are_clipped_to_the_runs_norm() -> None:
    moved = []
    for clip in (0.0, 1e-12):
        torch.manual_seed(1)
        model = GPT(TINY)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        run = dataclasses.replace(MUON, inner_optimizer="adamw", grad_clip=clip, weight_decay=0.0)
        Trainer(model, TrainingData(CORPUS), run, batch_size=4, seed=5).step(0)
        moved.append(float((nn.utils.parameters_to_vector(model.parameters()) - before).detach().norm()))
    # Adam's first step does not depend on the gradient's size, until its epsilon does.
    assert moved[1] < 0.01 * moved[0]


def _flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _tiny_trainer(*, eval_tokens: int = EVAL_TOKENS, **execution: Any) -> Trainer:
    torch.manual_seed(1)
    run, data = RunConfig(lr=1e-3, warmup_steps=0, total_steps=0), TrainingData(CORPUS, eval_tokens=eval_tokens)
    return Trainer(GPT(TINY), data, run, batch_size=6, seed=5, execution=Execution(**execution))


@pytest.mark.parametrize("micro_batch", [1, 4, 6, 100])
def test_a_step_in_parts_is_the_whole_step(micro_batch: int) -> None:
    whole, parts = _tiny_trainer(), _tiny_trainer(micro_batch=micro_batch)
    for step in range(3):
        (loss, tokens), (loss_of_parts, tokens_of_parts) = whole.step(step), parts.step(step)
        assert loss_of_parts == pytest.approx(loss, rel=1e-5)
        assert tokens_of_parts == tokens == 6 * 16
    torch.testing.assert_close(_flat(parts.model), _flat(whole.model), rtol=1e-3, atol=1e-5)


class Small(nn.Module):
    """A model on a device with memory for `most` windows."""

    context = 16

    def __init__(self, most: int, *, dropout: float = 0.0, always: bool = False) -> None:
        super().__init__()
        self.model = GPT(TINY)
        self.dropout = nn.Dropout(dropout)
        self.most = most
        self.always = always
        self.seen: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(tokens))
        logits: torch.Tensor = self.dropout(self.model(tokens))
        if (self.training or self.always) and len(tokens) > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return logits


def test_out_of_memory_halves_the_windows_at_once_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model = Small(most=2)
    run = RunConfig(lr=1e-3, warmup_steps=0, total_steps=0)
    trainer, whole = Trainer(model, TrainingData(CORPUS), run, batch_size=6, seed=5), _tiny_trainer()
    whole.model.load_state_dict(model.model.state_dict())
    loss, tokens = trainer.step(0)
    assert model.seen == [6, 3, 1, 1, 1, 1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "out of memory: 3 windows at once from now on (--micro-batch)",
        "out of memory: 1 windows at once from now on (--micro-batch)",
    ]
    assert tokens == 6 * 16
    assert loss == pytest.approx(whole.step(0)[0], rel=1e-5)
    torch.testing.assert_close(_flat(model.model), _flat(whole.model), rtol=1e-3, atol=1e-5)
    trainer.step(1)
    assert model.seen[8:] == [1] * 6


def test_where_memory_cannot_be_tried_out_it_begins_with_fewer_windows() -> None:
    model = Small(most=100)
    data, run = TrainingData(CORPUS, eval_tokens=80), RunConfig(total_steps=0)
    trainer = Trainer(model, data, run, batch_size=6, seed=5, execution=Execution(most_at_once=2))
    trainer.step(0)
    trainer.evaluate()
    assert model.seen == [2, 2, 2, 2, 2, 1]
    fixed = Execution(micro_batch=3, most_at_once=2)
    Trainer(model, data, run, batch_size=6, seed=5, execution=fixed).step(0)
    assert model.seen[6:] == [3, 3]


def test_memory_that_backward_lacks_is_free_before_the_next_try() -> None:
    """The graph of the failed try is gone when the next one begins."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if len(grad) > 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return grad

    class Late(Small):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert not any(kept() is not None for kept in alive)
            logits: torch.Tensor = Fails.apply(super().forward(tokens))
            alive.append(weakref.ref(logits))
            return logits

    loss, tokens = Trainer(Late(most=100), TrainingData(CORPUS), RunConfig(total_steps=0), batch_size=4, seed=5).step(0)
    assert (tokens, len(alive)) == (4 * 16, 3)
    assert math.isfinite(loss)


def test_a_stopped_step_changes_nothing_and_is_taken_again() -> None:
    def trainer() -> Trainer:
        return Trainer(
            _model(dropout=0.3),
            TrainingData(CORPUS),
            MUON,
            batch_size=4,
            seed=5,
            execution=Execution(micro_batch=1, read_ahead=True),
        )

    whole, stopped = trainer(), trainer()
    expected = [whole.step(step) for step in range(4)]
    torch.manual_seed(5)
    done = [stopped.step(step) for step in range(2)]
    asked = iter([False, True])
    with pytest.raises(Stopped):
        stopped.step(2, lambda: next(asked))
    assert next(asked, None) is None
    assert stopped.state_dict()["windows"]["position"] == 2
    assert [*done, *(stopped.step(step) for step in range(2, 4))] == expected


def test_a_restart_after_out_of_memory_is_exact() -> None:
    """It begins with as many windows at once as it had: a failed try would draw dropout's numbers once more."""

    def trainer() -> Trainer:
        torch.manual_seed(1)
        return Trainer(Small(most=2, dropout=0.3), TrainingData(CORPUS), MUON, batch_size=4, seed=5)

    whole = trainer()
    losses = [whole.step(step)[0] for step in range(4)]
    first = trainer()
    assert [first.step(step)[0] for step in range(2)] == losses[:2]
    state = copy.deepcopy(first.state_dict())
    again = trainer()
    again.model.load_state_dict(first.model.state_dict())
    again.load_state_dict(state)
    assert [again.step(step)[0] for step in range(2, 4)] == losses[2:]
    assert again.model.seen == [2, 2, 2, 2]


def test_the_evaluation_has_as_many_windows_as_it_is_given_tokens() -> None:
    held_out = len(CORPUS.held_out)
    for tokens, windows in ((1, 1), (16 * 5, 5), (10**9, (held_out - 1) // 16)):
        seen: list[int] = []
        trainer = _tiny_trainer(eval_tokens=tokens)
        trainer.model.register_forward_pre_hook(lambda model, given, seen=seen: seen.append(len(given[0])))
        trainer.evaluate()
        assert sum(seen) == windows
        assert max(seen) == min(windows, EVAL_BATCH)


def test_out_of_memory_in_an_evaluation_halves_its_windows(caplog: pytest.LogCaptureFixture) -> None:
    plain = _tiny_trainer(eval_tokens=160)
    small = Small(most=3, always=True)
    small.model = plain.model
    trainer = Trainer(small, TrainingData(CORPUS, eval_tokens=160), MUON, batch_size=2, seed=5)
    assert trainer.evaluate() == pytest.approx(plain.evaluate(), rel=1e-6)
    assert small.seen == [10, 8, 4, 2, 2, 2, 2, 2]
    small.most = 0
    with pytest.raises(ConfigError, match=r"evaluation: cpu is out of memory; train a smaller model"):
        trainer.evaluate()


def test_memory_that_never_suffices_is_an_error() -> None:
    run = RunConfig(total_steps=0)
    with pytest.raises(ConfigError, match=r"--micro-batch 1: cpu is out of memory; train a smaller model"):
        Trainer(Small(most=0), TrainingData(CORPUS), run, batch_size=4, seed=5).step(0)
    with pytest.raises(ConfigError, match=r"--micro-batch 3: cpu is out of memory; give --micro-batch auto"):
        Trainer(
            Small(most=2), TrainingData(CORPUS), run, batch_size=4, seed=5, execution=Execution(micro_batch=3)
        ).step(0)
    several = Trainer(Small(most=2), TrainingData(CORPUS), run, batch_size=4, seed=5)
    several.ranks.size = 2  # past the steps in which they halve it together
    with pytest.raises(ConfigError, match=r"smaller --micro-batch; auto cannot halve it after the first steps of"):
        several.step(0)


def test_memory_that_the_optimizer_lacks_is_an_error_and_leaves_no_part_of_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(Small(most=4), TrainingData(CORPUS), RunConfig(total_steps=0), batch_size=4, seed=5)
    optimizer, step = trainer.optimizer.adamw, trainer.optimizer.adamw.step
    said = r"the optimizer: cpu is out of memory; train a smaller model, or end what else uses its memory"

    def lack() -> None:
        step()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optimizer, "step", lack)
    with pytest.raises(ConfigError, match=said):
        trainer.step(0)
    assert not optimizer.state
    monkeypatch.undo()
    trainer.step(0)
    monkeypatch.setattr(optimizer, "step", lack)
    with pytest.raises(ConfigError, match=said):
        trainer.step(0)
    assert optimizer.state


def test_other_errors_of_a_model_are_its_own() -> None:
    class Broken(Small):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match=r"shapes do not fit"):
        Trainer(Broken(4), TrainingData(CORPUS), RunConfig(), batch_size=4, seed=5).step(0)


def test_reading_ahead_gives_the_same_batches_and_the_same_state() -> None:
    plain, ahead = _tiny_trainer(), _tiny_trainer(read_ahead=True)
    for step in range(5):
        assert plain.step(step) == ahead.step(step)
        assert plain.state_dict()["windows"] == ahead.state_dict()["windows"]
    state = copy.deepcopy(ahead.state_dict())
    again = _tiny_trainer(read_ahead=True)
    again.model.load_state_dict(ahead.model.state_dict())
    again.load_state_dict(state)
    assert again.step(5) == plain.step(5)


def test_bfloat16_computes_in_it_and_keeps_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, half = _tiny_trainer(), _tiny_trainer(precision=torch.bfloat16)
    for step in range(2):
        a, b = plain.step(step)[0], half.step(step)[0]
        assert a != b
        assert a == pytest.approx(b, rel=0.02)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_what_is_compiled_is_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    trainer = _tiny_trainer(compiled=True)
    assert compiled == [trainer.model]
    trainer.step(0)
