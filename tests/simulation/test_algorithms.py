"""Every algorithm that a setting selects works in a whole swarm: rounds commit, and it has its effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.swarm import simulate
from p2ptrain.training.data import Characters, load_corpus
from p2ptrain.training.models import build
from p2ptrain.training.trainer import Trainer, TrainingData
from tests.training.characters import VOCAB_SIZE


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def run(**settings: Any) -> Records:
    defaults = {
        "peers": 3, "steps": 40, "sync_every": 20, "eval_every": 20, "fragment_fraction": 0.0, "batch_size": 1
    }  # fmt: skip
    records = simulate(Experiment.of(**{**defaults, **settings}))
    states = {(e["round"], e["state_hash"]) for _, e in records.of("round") if e["status"] != "skipped"}
    assert len(states) == len({event["round"] for event in records.rounds})
    return records


@pytest.fixture(scope="module")
def plain() -> Records:
    return run()


@pytest.mark.parametrize(
    "settings",
    [
        {"outer_optimizer": "sgd", "outer_lr": 0.5},
        {"outer_optimizer": "sgdm", "outer_lr": 0.3},
        {"outer_optimizer": "adam", "outer_lr": 0.3},
        {"outer_lr_schedule": "cosine"},
        {"round_mean": "disjoint"},
        {"round_mean": "clipped"},
        {"round_mean": "trimmed", "averaging": "gather"},
        {"round_mean": "geometric"},
        {"round_weights": "equal", "speeds": [1.0, 1.0, 0.4]},
    ],
    ids=str,
)
def test_a_setting_of_rounds_changes_what_is_learnt_and_all_agree(plain: Records, settings: dict[str, Any]) -> None:
    records = run(**settings)
    assert all(len(event["contributors"]) == 3 for event in records.rounds)
    assert len(records.rounds) >= 2
    assert records.final_loss != plain.final_loss
    assert records.final_loss < 4.2


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"round_codec": "none"}, 3.9),
        ({"round_codec": "fp16"}, 1.9),
        ({"round_codec": "int4"}, 0.55),
        ({"round_codec": "int2"}, 0.39),
        ({"round_codec": "topk", "round_density": 0.03}, 0.082),
        ({"prune_fraction": 0.5}, 0.85),
    ],
    ids=str,
)
def test_a_codec_sends_as_many_bytes_as_it_says(plain: Records, settings: dict[str, Any], share: float) -> None:
    records = run(**settings)
    assert records.bytes_sent / plain.bytes_sent == pytest.approx(share, rel=0.12)
    assert records.final_loss < 4.2


def test_what_top_k_does_not_send_is_sent_later() -> None:
    """With the error buffer, rounds that send 1.6 % still bring peers to one model that learns nearly as well."""
    settings = {"steps": 120, "sync_every": 10, "outer_optimizer": "sgd", "outer_lr": 1.0}
    whole, sparse = run(**settings), run(round_codec="topk", **settings)
    assert sparse.final_loss < whole.final_loss + 0.35
    # Every round resets the weights to the anchor, so peers stay close although little is sent.
    assert sparse.correlations()[-1][1] > 0.99


FOUR = {"peers": 4, "sync_every": 40}


@pytest.fixture(scope="module")
def apart() -> Records:
    return run(**FOUR)


@pytest.mark.parametrize(
    "settings",
    [
        {"topology": "pairs"},
        {"topology": "groups", "fan_out": 2},
        {"topology": "all"},
        {"fan_out": 2},
        {"fragment_selection": "fresh"},
        {"fragment_codec": "fp16"},
        {"fragment_delay": 3, "max_staleness": 0.0},
        {"fragment_schedule": "ramp"},
        {"fragment_schedule": "decay"},
    ],
    ids=str,
)
def test_a_way_to_gossip_keeps_peers_together(apart: Records, settings: dict[str, Any]) -> None:
    together = run(**FOUR, **{"fragment_fraction": 0.05, **settings})
    merged = sum(event["merged"] for _, event in together.of("fragments"))
    sent = sum(event["sent"] for _, event in together.of("fragments"))
    assert merged > 0.6 * sent > 40
    assert together.correlations()[-1][1] > apart.correlations()[-1][1]


@pytest.mark.long
def test_the_full_average_sends_to_everybody() -> None:
    one, everybody = (run(**FOUR, steps=20, fragment_fraction=0.02, topology=topology) for topology in ("push", "all"))
    sent = [sum(event["sent"] for _, event in records.of("fragments")) for records in (one, everybody)]
    assert 2.5 < sent[1] / sent[0] < 3.5


def test_peers_of_a_run_with_shards_train_on_their_own(plain: Records) -> None:
    records = run(num_shards=3, sharding="unbalanced", round_weights="shard")
    assert [len(event["contributors"]) for event in records.rounds] == [3, 3]
    assert records.final_loss != plain.final_loss


@pytest.mark.long
def test_intervals_grow_or_shrink_over_the_run() -> None:
    def first_interval(schedule: str) -> float:
        times = [event["t"] for event in run(steps=60, sync_every=10, sync_schedule=schedule).rounds]
        return times[1] - times[0]

    assert first_interval("grow") < first_interval("fixed") < first_interval("shrink")


def test_rounds_say_how_alike_the_outer_gradients_were(plain: Records) -> None:
    for event in plain.rounds:
        assert 0 < event["cosine"] < 1
        assert event["mean_norm"] > 0


def test_a_pretrained_start_is_a_better_start() -> None:
    fresh, pretrained = (run(steps=20, pretrain_steps=steps).table()[0]["held_out_loss"] for steps in (0, 30))
    assert pretrained < fresh - 0.5


@pytest.mark.long
def test_who_is_left_out_often_goes_on_from_its_own_weights_if_the_run_says_so() -> None:
    overwritten, kept = (
        sum(event["tokens_discarded"] for _, event in run(steps=60, drop=0.5, max_missed_rounds=rounds).of("round"))
        for rounds in (0, 1000)
    )
    assert overwritten > kept


@pytest.mark.long
def test_rounds_average_adams_moments_where_the_run_says_so() -> None:
    """Against DiLoCo with synchronized Adam states in plain torch: same data, same seeds, outer SGD.

    Steps are long, so that a round lands before the next one.
    """
    experiment = Experiment.of(
        peers=3, steps=20, sync_every=10, eval_every=20, fragment_fraction=0.0, round_codec="none",
        inner_moments="averaged", outer_optimizer="sgd", outer_lr=0.7, step_s=10.0,
        batch_size=1,
    )  # fmt: skip
    records = simulate(experiment)
    assert len(records.rounds) == 2
    expected = synchronized_adam(experiment)
    assert records.final_loss == pytest.approx(expected, abs=1e-4)
    local = simulate(dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, inner_moments="local")))
    assert abs(local.final_loss - expected) > 5 * abs(records.final_loss - expected)
    assert records.bytes_sent / local.bytes_sent == pytest.approx(3, rel=0.05)


def synchronized_adam(experiment: Experiment) -> float:
    """Held-out loss after two rounds: θ by outer SGD and then a plain average, Adam's state a plain average.

    The snapshot is taken one step after the round was due, and the round lands one step later: θ keeps what that step
    learnt, the moments are the round's.
    """
    run, corpus = experiment.run, load_corpus(experiment.data, Characters())
    models = [build(run.model, vocab_size=VOCAB_SIZE, seed=run.run_seed) for _ in range(experiment.peers)]
    trainers = [
        Trainer(
            model, TrainingData(corpus), run, batch_size=experiment.batch_size, seed=run.data_seed(f"peer-{number}")
        )
        for number, model in enumerate(models)
    ]
    anchor = [parameter.detach().clone() for parameter in models[0].parameters()]

    def train(steps: range) -> None:
        for step in steps:
            for trainer in trainers:
                trainer.step(step)

    for first, last, outer_lr in ((0, 11, run.outer_lr), (12, 20, 1.0)):
        train(range(first, last))
        weights = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
        moments = [
            {name: mean(trainer.optimizer.adamw.state[p][name] for trainer, p in zip(trainers, group, strict=True))
             for name in ("exp_avg", "exp_avg_sq")}
            for group in zip(*(model.parameters() for model in models), strict=True)
        ]  # fmt: skip
        anchor = [a - outer_lr * (a - mean(group)) for a, group in zip(anchor, zip(*weights, strict=True), strict=True)]
        train(range(last, last + 1 if last < run.total_steps else last))
        for trainer, model, then in zip(trainers, models, weights, strict=True):
            for a, parameter, was, average in zip(anchor, model.parameters(), then, moments, strict=True):
                parameter.data += a - was
                trainer.optimizer.adamw.state[parameter].update(
                    {name: value.clone() for name, value in average.items()}
                )
                trainer.optimizer.adamw.state[parameter]["step"].fill_(last)
    return trainers[0].evaluate()


def mean(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).mean(0)
