"""Every algorithm of the papers that is a setting works in a whole swarm: rounds commit, and it does what it is for."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.simulation import Experiment, Records, simulate


def run(**settings: Any) -> Records:
    defaults = {"peers": 3, "steps": 40, "sync_every": 20, "eval_every": 20, "fragment_fraction": 0.0}
    records = simulate(Experiment.of(**{**defaults, **settings}))
    for number in {event["round"] for event in records.rounds}:
        assert len({e["state_sha256"] for _, e in records.of("round") if e["round"] == number}) == 1
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
        ({"round_codec": "topk", "round_density": 0.03, "outer_optimizer": "sgd", "outer_lr": 1.0}, 0.17),
        ({"prune_fraction": 0.5}, 0.85),
    ],
    ids=str,
)
def test_a_codec_sends_as_many_bytes_as_it_says(plain: Records, settings: dict[str, Any], share: float) -> None:
    records = run(**settings)
    assert records.bytes_sent / plain.bytes_sent == pytest.approx(share, rel=0.12)
    assert records.final_loss < 4.2


def test_what_top_k_does_not_send_is_sent_later() -> None:
    """With the error buffer, rounds that send 2 % still bring peers to one model that learns as well."""
    settings = {"steps": 120, "sync_every": 10, "outer_optimizer": "sgd", "outer_lr": 1.0}
    whole, sparse = run(**settings), run(round_codec="topk", round_density=0.02, **settings)
    assert sparse.final_loss < whole.final_loss + 0.35
    # The weights come to stand on the anchor in each round, so peers stay together though little is sent.
    assert sparse.correlations()[-1][1] > 0.99


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
def test_a_way_to_gossip_keeps_peers_together(settings: dict[str, Any]) -> None:
    common = {"peers": 4, "sync_every": 40, "fragment_fraction": 0.05}
    apart, together = run(**{**common, "fragment_fraction": 0.0}), run(**{**common, **settings})
    merged = sum(event["merged"] for _, event in together.of("fragments"))
    sent = sum(event["sent"] for _, event in together.of("fragments"))
    assert merged > 0.6 * sent > 40
    assert together.correlations()[-1][1] > apart.correlations()[-1][1]


def test_the_full_average_sends_to_everybody() -> None:
    common = {"peers": 4, "sync_every": 40, "fragment_fraction": 0.02}
    one, everybody = (run(**common, topology=topology) for topology in ("push", "all"))
    sent = [sum(event["sent"] for _, event in records.of("fragments")) for records in (one, everybody)]
    assert 2.5 < sent[1] / sent[0] < 3.5


def test_peers_of_a_run_with_shards_train_on_their_own() -> None:
    records = run(num_shards=3, sharding="unbalanced", round_weights="shard")
    weights = next(iter(records.events.values()))
    assert weights
    assert all(len(event["contributors"]) == 3 for event in records.rounds)


def test_intervals_grow_or_shrink_over_the_run() -> None:
    def first_interval(schedule: str) -> float:
        times = [event["t"] for event in run(steps=120, sync_schedule=schedule).rounds]
        return times[1] - times[0]

    assert first_interval("grow") < first_interval("fixed") < first_interval("shrink")


def test_rounds_say_how_alike_the_outer_gradients_were(plain: Records) -> None:
    for event in plain.rounds:
        assert 0 < event["cosine"] < 1
        assert event["mean_norm"] > 0


def test_a_pretrained_start_is_a_better_start() -> None:
    fresh, pretrained = (run(steps=20, pretrain_steps=steps).table()[0]["held_out_loss"] for steps in (0, 30))
    assert pretrained < fresh - 0.5


def test_who_is_left_out_often_goes_on_from_its_own_weights_if_the_run_says_so() -> None:
    overwritten, kept = (
        sum(event["tokens_discarded"] for _, event in run(steps=200, drop=0.5, max_missed_rounds=rounds).of("round"))
        for rounds in (0, 1000)
    )
    assert overwritten > kept
