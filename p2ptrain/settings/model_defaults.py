"""Defaults that follow from a run's model: its learning rate, schedule and batch.

Only the command line takes them: `RunConfig()` and the Python API know no built-in models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

# Windows in a batch, for models without a default of their own.
BATCH_WINDOWS = 4
# Tokens to evaluate on, in inner steps of the model. A forward pass is a third of a step, so that an evaluation takes
# about five steps, and 5 % of the time every 100 steps. A million tokens for GPT-2, as nanoGPT's two and a half.
EVAL_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class ModelDefaults:
    """Defaults of one model, by the names in `table.py`; those up to `beta2` are the run's.

    Attributes:
        batch_tokens: tokens of one peer in an inner step; None: `BATCH_WINDOWS`.
        muon_times: Muon's learning rate, in units of `lr`.
    """

    lr: float
    warmup_steps: int
    # Our choice where no source is given: with 65,536 tokens a step, one peer reads 1.3 billion.
    steps: int = 20_000
    # DiLoCo, section 3.1.
    sync_every: int = 500
    # nanoGPT's for GPT-2, and llama2.c's.
    beta2: float = 0.95
    # For models of more than 50M parameters: an evaluation then takes 1 % of the time.
    eval_every: int = 500
    batch_tokens: int | None = 65_536
    # torch scales Muon's updates (match_rms_adamw) so that AdamW's rate can be used (Moonlight, arXiv 2502.16982).
    # 4 times was better in short runs of 156 thousand parameters. Longer runs and larger models want less.
    muon_times: float = 2.0


# Tuned, with H and length for a few minutes (simulated, k = 8). The fields of `RunConfig` have the same values.
DEMO = ModelDefaults(
    lr=3e-3, warmup_steps=50, steps=2000, sync_every=200, eval_every=100, batch_tokens=256, muon_times=4.0
)
# 65,536 tokens are an eighth of nanoGPT's half million for GPT-2: eight peers together have its batch. In DiLoCo each
# replica has half a million (512 windows of 1,024, table 5), and eight have eight times that.
MODEL_DEFAULTS: Mapping[str, ModelDefaults] = {
    "gpt-demo": DEMO,
    # nanoGPT's train_shakespeare_char, which has one peer; H: 25 rounds.
    "gpt-small": ModelDefaults(
        lr=1e-3, warmup_steps=100, steps=5000, sync_every=200, beta2=0.99, eval_every=100, batch_tokens=16_384
    ),
    # nanoGPT's and GPT-3's rate (table 2.1); the warm-up is llm.c's for ten billion tokens, nanoGPT's 2,000 of 600,000.
    "gpt2-124m": ModelDefaults(lr=6e-4, warmup_steps=700),
    # DiLoCo, table 5. Its runs have 88,000 steps: see `--preset diloco`.
    "diloco-60m": ModelDefaults(lr=4e-4, warmup_steps=1000),
    "diloco-150m": ModelDefaults(lr=4e-4, warmup_steps=1000),
    "diloco-400m": ModelDefaults(lr=4e-4, warmup_steps=1000),
    # llama2.c's train.py, which has 100,000 steps of 131,072 tokens. It has 15M parameters, so it is evaluated often.
    "llama-15m": ModelDefaults(lr=5e-4, warmup_steps=1000, eval_every=100, batch_tokens=32_768),
    # As GaLore's full-rank baseline, with a tenth of its 10,000 steps as warm-up.
    "llama-60m": ModelDefaults(lr=1e-3, warmup_steps=1000),
    # GPT-3's table 2.1, for 125M and 350M; the warm-ups are guesses.
    "llama-160m": ModelDefaults(lr=6e-4, warmup_steps=1000),
    "llama-400m": ModelDefaults(lr=3e-4, warmup_steps=2000),
}  # fmt: skip
# Guesses for models of transformers, whose size is known only once they are built: new weights as GPT-2's; published
# ones at the Trainer's default rate, for fine-tuning.
_HF = ModelDefaults(lr=6e-4, warmup_steps=1000, batch_tokens=None)
_HF_PRETRAINED = ModelDefaults(lr=5e-5, warmup_steps=100, steps=5000, sync_every=200, batch_tokens=None)
# Users' own models and those of the Python API have the demo model's defaults.
_OTHERS = replace(DEMO, batch_tokens=None)
# Settings of the run among the defaults.
OF_RUN = ("lr", "warmup_steps", "steps", "sync_every", "beta2")


def model_defaults(model: str) -> ModelDefaults:
    """The defaults of a model, by its name as `--model` takes it."""
    if model.startswith("hf:"):
        return _HF_PRETRAINED if model.endswith(":pretrained") else _HF
    return MODEL_DEFAULTS.get(model, _OTHERS)
