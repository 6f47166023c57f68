"""Local training: schedule, optimizer, held-out loss, and a restored state that continues bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.training.data import Corpus, encode
from p2ptrain.training.models import GPT, GPTConfig
from p2ptrain.training.trainer import MAX_LOST_STEPS, SAMPLED_WEIGHTS, Trainer, choose_device, learning_rate

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
    return Trainer(_model(dropout), CORPUS, run, batch_size=4, seed=seed)


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    run = RunConfig(lr=1.0, warmup_steps=10, total_steps=110)
    assert learning_rate(run, 0) == pytest.approx(0.1)
    assert learning_rate(run, 9) == learning_rate(run, 10) == 1.0
    assert learning_rate(run, 60) == pytest.approx(0.55)
    assert learning_rate(run, 110) == learning_rate(run, 500) == pytest.approx(0.1)
    rates = [learning_rate(run, step) for step in range(10, 110)]
    assert rates == sorted(rates, reverse=True)


def test_the_rate_of_a_run_without_end_is_constant_after_warm_up() -> None:
    run = RunConfig(lr=1.0, warmup_steps=10, total_steps=0)
    assert [learning_rate(run, step) for step in (4, 10, 10**9)] == [0.5, 1.0, 1.0]
    assert learning_rate(RunConfig(lr=1.0, warmup_steps=0), 0) == 1.0


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


def test_only_matrices_decay() -> None:
    model = _model()
    trainer = Trainer(model, CORPUS, RunConfig(weight_decay=0.5), batch_size=1, seed=0)
    decaying, kept = trainer.state_dict()["optimizer"]["param_groups"]
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
        trainer = Trainer(_model(), CORPUS, RunConfig(), batch_size=4, seed=3, spans=np.array([[begin, end]]))
        alone = Trainer(
            _model(), Corpus(CORPUS.training[begin:end], CORPUS.held_out), RunConfig(), batch_size=4, seed=3
        )
        assert [trainer.step(step)[0] for step in range(3)] == [alone.step(step)[0] for step in range(3)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_twenty_steps_are_ten_and_ten_more_bit_for_bit(dropout: float) -> None:
    straight = _trainer(dropout=dropout)
    expected = [straight.step(step)[0] for step in range(20)]

    first = _trainer(dropout=dropout)
    losses = [first.step(step)[0] for step in range(10)]
    weights, state = first.model.state_dict(), first.state_dict()
    resumed = _trainer(seed=99, dropout=dropout)
    resumed.model.load_state_dict(weights)
    torch.manual_seed(12345)
    resumed.load_state_dict(state)
    losses += [resumed.step(step)[0] for step in range(10, 20)]

    assert losses == expected
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


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
    expected = Trainer(model, CORPUS, RunConfig(), batch_size=1, seed=0).sample_weights()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
            assert not module.weight.is_contiguous()
    assert Trainer(model, CORPUS, RunConfig(), batch_size=1, seed=0).sample_weights() == expected


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
    trainer = Trainer(model, CORPUS, RunConfig(warmup_steps=0), batch_size=2, seed=0)
    trainer.step(0)
    assert torch.equal(frozen, before)
    trainer.sample_weights()


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="--device gpu: not a device of torch"):
        choose_device("gpu")
    with pytest.raises(ConfigError, match="--device cuda:99: cannot be used"):
        choose_device("cuda:99")
