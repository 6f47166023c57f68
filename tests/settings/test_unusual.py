"""Warnings of settings that are seldom meant."""

from __future__ import annotations

import pytest

from p2ptrain.settings.model_defaults import MODEL_DEFAULTS
from p2ptrain.settings.presets import PRESETS
from p2ptrain.settings.table import merge
from p2ptrain.settings.unusual import unusual


def found(**flags: str) -> list[str]:
    settings = merge(flags, {})
    return list(unusual(settings.resolve_run(None), settings.explicit_run()))


def test_no_model_and_no_preset_is_unusual_by_its_defaults() -> None:
    for flags in (*({"model": model} for model in MODEL_DEFAULTS), *({"preset": preset} for preset in PRESETS)):
        assert found(**flags) == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"steps": "2800", "sync_every": "100"},
            "the warm-up takes 700 of 2,800 steps: give --warmup-steps 140, or more --steps",
        ),
        (
            {"steps": "20000", "sync_every": "8000"},
            "20,000 steps with H = 8,000 make 2.5 rounds: give --sync-every 2000 or less, or more --steps",
        ),
        (
            {"steps": "10", "warmup_steps": "1"},
            "10 steps with H = 500 make 0.0 rounds: give --sync-every 1, or more --steps",
        ),
        (
            {"round_codec": "topk", "sync_every": "401"},
            "topk may learn less than int2 with fewer than about 50 rounds, and this run has 49: give --sync-every 400 "
            "or less, or --round-codec int2",
        ),
        (
            {"round_codec": "topk", "inner_optimizer": "muon"},
            "with Muon inside, topk learns less than int4 and int2: give --round-codec int4",
        ),
        ({"lr": "0.2"}, "the learning rate 0.2 is above 0.1, too high for AdamW: give --lr 0.0006 or less"),
        (
            {"fragment_fraction": "0", "fragment_codec": "fp16"},
            "--fragment-codec fp16 has no effect: it needs --fragment-fraction above 0",
        ),
        (
            {"topology": "pairs", "fan_out": "2"},
            "--fan-out 2 has no effect: it needs --topology push or groups",
        ),
        ({"round_density": "0.1"}, "--round-density 0.1 has no effect: it needs --round-codec topk"),
        (
            {"outer_optimizer": "sgd", "outer_momentum": "0.9"},
            "--outer-momentum 0.9 has no effect: it needs an --outer-optimizer other than sgd",
        ),
        ({"sharding": "clusters"}, "--sharding clusters has no effect: it needs --num-shards above 0"),
    ],
)
def test_unusual_settings_are_reported_with_their_numbers_and_a_fix(flags: dict[str, str], line: str) -> None:
    assert found(**{"model": "gpt2-124m", **flags}) == [line]


def test_a_run_without_end_has_rounds_enough() -> None:
    assert found(steps="0", sync_every="9000") == []
    # At the limits.
    assert found(steps="2801", warmup_steps="700", sync_every="933", lr="0.1") == []
    assert found(steps="5000", sync_every="100", round_codec="topk") == []


def test_a_preset_is_not_blamed_for_what_another_setting_makes_useless() -> None:
    assert found(preset="diloco", outer_optimizer="sgd") == []
    assert found(preset="diloco", fan_out="2", topology="pairs") == [
        "--topology pairs has no effect: it needs --fragment-fraction above 0",
        "--fan-out 2 has no effect: it needs --fragment-fraction above 0",
    ]
