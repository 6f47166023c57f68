"""The papers' settings, for `--preset`: they replace defaults, but not settings that the user gives.

A preset has only settings of the run, by their names in `table.py`. Batch size and device are up to each machine:
DiLoCo's table 5 has 512 windows of 1,024 tokens per step of each replica, eight times our default; nanoGPT has 480 for
GPT-2 124M in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Built-in models and their parameters; shapes and sources are in `training/models/registry.py`.
MODELS = {
    "gpt-demo": "0.1M", "gpt-small": "10.8M", "gpt2-124m": "124M", "diloco-60m": "60M", "diloco-150m": "151M",
    "diloco-400m": "391M", "llama-15m": "15.2M", "llama-60m": "58M", "llama-160m": "162M", "llama-400m": "393M",
}  # fmt: skip
# Defaults of a run with averaging = "pairwise": NoLoCo's outer optimizer, as that of rounds does not suit pairs.
PAIR_DEFAULTS: Mapping[str, str | float] = {"outer_optimizer": "sgdm", "outer_lr": 0.7, "outer_momentum": 0.5}
# Defaults of a run with inner_optimizer = "muon": half of int8's bytes at no loss, 2.016 nats, and 2.015 with float32
# (simulated, 156 thousand parameters, two seeds).
MUON_DEFAULTS: Mapping[str, str] = {"round_codec": "int4"}
# Defaults of a run with round_codec = "topk", as in SparseLoCo. A mean over all contributors instead of a value's
# senders lost 0.14 nats (docs/log/2026-11-22.md), and one in parts is sent as int4, in 18 times as many bytes.
# The density is among them so that the digests of other runs stay as they were.
TOPK_DEFAULTS: Mapping[str, str | float] = {
    "averaging": "gather", "round_mean": "disjoint", "outer_optimizer": "sgd", "outer_lr": 1.0, "round_density": 1 / 64,
}  # fmt: skip
# Defaults of a run that is founded with a run key or an allow list: its members were chosen, so none is left out.
CLOSED_DEFAULTS: Mapping[str, str] = {"round_guard": "clip"}
PRESETS: Mapping[str, Mapping[str, str | int | float]] = {
    # DiLoCo, table 5, with the model and length of its main experiment (section 3). The model has the table's
    # sequences of 1,024 tokens.
    "diloco": {
        "model": "diloco-150m",
        # From random weights. By section 3.1, 24,000 steps alone and 64,000 together (--init-from, --steps 64000)
        # come within 0.1 perplexity of it.
        "steps": 88_000,
        "lr": 4e-4,
        "warmup_steps": 1000,
        "weight_decay": 0.1,
        "sync_every": 500,
        # DiLoCo alone: nothing is sent between rounds.
        "fragment_fraction": 0.0,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    },
    # SPARTA, section 3; settings that the paper leaves open are from simulations.
    "sparta-124m": {
        "model": "gpt2-124m",
        # 30 rounds: Nesterov with 0.7 and 0.9 overshoots in runs of fewer than about 20 (simulated).
        "steps": 30_000,
        # 1.75 x DiLoCo's 4e-4, which SPARTA allows at H = 100 (section 3.2); at H = 10,000 it was 2 x.
        "lr": 7e-4,
        # nanoGPT has 2,000 for the same model; longer for the higher rate.
        "warmup_steps": 3000,
        "weight_decay": 0.1,
        # The paper uses 100 to 10,000, and reports correlations for 1,000 (section 3.2).
        "sync_every": 1000,
        # The larger of the paper's two values, used for its best result (section 3.3).
        "fragment_fraction": 0.005,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    },
    # NoLoCo (arXiv 2506.10911): random pairs instead of rounds. The model is up to the user.
    "noloco": {
        "averaging": "pairwise",
        # Half of the paper's DiLoCo: a pair's step sends one encoded model, a round two.
        "sync_every": 50,
        "fragment_fraction": 0.0,
        **PAIR_DEFAULTS,
    },
}


def implied_defaults(values: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, str | float]]]:
    """Yield what implies defaults in these settings, and the defaults: the first ones count, then those of a preset.

    Args:
        values: settings of a run, by name.
    """
    if values.get("averaging") == "pairwise":
        yield "averaging pairwise", PAIR_DEFAULTS
    if values.get("round_codec") == "topk":
        yield "round_codec topk", TOPK_DEFAULTS


def muon_defaults(values: Mapping[str, object]) -> Mapping[str, str]:
    """`MUON_DEFAULTS` if these settings have Muon inside, and nothing that excludes int4; else nothing.

    Args:
        values: settings of a run, by name; those that are missing have their defaults.
    """
    fits = values.get("averaging") != "pairwise" and not values.get("prune_fraction")
    return MUON_DEFAULTS if values.get("inner_optimizer") == "muon" and fits else {}


def closed_defaults(values: Mapping[str, object]) -> Mapping[str, str]:
    """`CLOSED_DEFAULTS` if the mean is weighted, as no other can clip. `values`: as in `muon_defaults`."""
    return CLOSED_DEFAULTS if values.get("round_mean", "weighted") == "weighted" else {}
