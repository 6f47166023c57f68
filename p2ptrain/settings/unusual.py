"""Warns of settings of a new run that are allowed but probably a mistake."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.model_defaults import model_defaults

# The warm-ups of the built-in models and the presets are 1 to 10 % of the steps.
LONG_WARMUP = 0.25
# With fewer rounds, peers train alone for a third of the run or more.
FEWEST_ROUNDS = 3
# With 59 rounds topk was better than int2; with 23 worse, from a tenth of the bytes (docs/evidence/late.md). A guess.
FEWEST_TOPK_ROUNDS = 50
# Usual rates of AdamW are from 0.00001 to 0.01; a larger one may be meant for SGD, or be a slip.
HIGHEST_LR = 0.1
OF_FRAGMENTS = (
    "fragment_selection", "fragment_codec", "fragment_schedule", "fragment_delay", "max_staleness", "topology",
    "fan_out",
)  # fmt: skip


def unusual(run: RunConfig, given: Collection[str]) -> Iterator[str]:
    """Yield one line for each such setting, with its value and what to give instead.

    `given`: the settings that the user gave, by field name of `RunConfig`: only these are reported to have no effect.
    """
    steps, warmup, sync_every = run.total_steps, run.warmup_steps, run.sync_every
    if steps and warmup >= LONG_WARMUP * steps:
        yield f"the warm-up takes {warmup:,} of {steps:,} steps: give --warmup-steps {steps // 20}, or more --steps"
    if steps and steps / sync_every < FEWEST_ROUNDS:
        rounds = steps / sync_every
        shorter = max(1, steps // 10)
        yield (
            f"{steps:,} steps with H = {sync_every:,} make {rounds:.1f} rounds: give "
            f"--sync-every {_at_most(shorter)}, or more --steps"
        )
    if run.round_codec == "topk" and run.inner_optimizer == "muon":
        yield "with Muon inside, topk learns less than int4 and int2: give --round-codec int4"
    elif run.round_codec == "topk" and steps and steps / sync_every < FEWEST_TOPK_ROUNDS:
        shorter = max(1, steps // FEWEST_TOPK_ROUNDS)
        yield (
            f"topk may learn less than int2 with fewer than about {FEWEST_TOPK_ROUNDS} rounds, and this run has "
            f"{steps // sync_every}: give --sync-every {_at_most(shorter)}, or --round-codec int2"
        )
    if run.lr > HIGHEST_LR:
        usual = model_defaults(run.model).lr
        yield f"the learning rate {run.lr:g} is above {HIGHEST_LR}, too high for AdamW: give --lr {usual:g} or less"
    yield from _without_effect(run, given)


def _without_effect(run: RunConfig, given: Collection[str]) -> Iterator[str]:
    """Yield one line for each setting that the user gave and that is not used."""
    has_fragments = run.fragment_fraction > 0
    for names, is_used, needed in (
        (OF_FRAGMENTS, has_fragments, "--fragment-fraction above 0"),
        (("fan_out",), not has_fragments or run.topology in ("push", "groups"), "--topology push or groups"),
        (("round_density",), run.round_codec == "topk", "--round-codec topk"),
        (("outer_momentum",), run.outer_optimizer != "sgd", "an --outer-optimizer other than sgd"),
        (("sharding",), run.num_shards > 0, "--num-shards above 0"),
    ):
        if is_used:
            continue
        for name in given:
            if name in names:
                yield f"--{name.replace('_', '-')} {getattr(run, name)} has no effect: it needs {needed}"


def _at_most(number: int) -> str:
    return f"{number} or less" if number > 1 else "1"
