"""The papers' settings by name: what `--preset` puts between the defaults and what the user gives himself.

A preset holds settings of the run alone, by the names of the table in `settings.py`. Batch size, device and the like
are each machine's own business: DiLoCo's table 5 has 512 windows a step, for GPT-2 124M 16 are usual (ALGORITHMS.md,
section 4), and who has the memory gives `--batch-size`.
"""

from __future__ import annotations

from collections.abc import Mapping

# The models that come with p2ptrain; their shapes, and where those are from, are in `models/registry.py`.
MODELS = ("gpt-demo", "gpt-small", "gpt2-124m", "diloco-60m", "diloco-150m", "diloco-400m")
PRESETS: Mapping[str, Mapping[str, str | int | float]] = {
    # DiLoCo, table 5, and the model and the length of its main experiment (section 3). Sequences of 1,024 tokens
    # (same table) come with the model.
    "diloco": {
        "model": "diloco-150m",
        # From the first weights; section 3.1: within 0.1 perplexity of 24,000 steps alone and 64,000 together, which
        # is --init-from with --steps 64000.
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
    # SPARTA, section 3, with what that paper leaves open from simulations.
    "sparta-124m": {
        "model": "gpt2-124m",
        # Thirty rounds: Nesterov with 0.7 and 0.9 overshoots in runs of fewer than about twenty (simulated).
        "steps": 30_000,
        # 1.75 x the 4e-4 of DiLoCo alone: what SPARTA allows at H = 100 (section 3.2); at H = 10,000 it was 2 x.
        "lr": 7e-4,
        # nanoGPT has 2,000 for the same model; longer for the higher rate.
        "warmup_steps": 3000,
        "weight_decay": 0.1,
        # The paper goes from 100 to 10,000; its correlations are those of 1,000 (section 3.2).
        "sync_every": 1000,
        # The larger of the paper's two, that of its best result (section 3.3).
        "fragment_fraction": 0.005,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
    },
}
