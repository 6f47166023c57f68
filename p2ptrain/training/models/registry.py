"""Build models by name. The initial weights depend only on the seed."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.machine import free_memory_bytes
from p2ptrain.settings.model_defaults import BATCH_WINDOWS, EVAL_STEPS, model_defaults
from p2ptrain.settings.table import did_you_mean
from p2ptrain.training.memory import check_parameters
from p2ptrain.training.models import hf
from p2ptrain.training.models.gpt import GPT, GPTConfig
from p2ptrain.training.models.llama import Llama, LlamaConfig

# Their learning rates, batches and the like are in `settings/model_defaults.py`. `vocab_size` is the one that the size
# was published for; 0 if there is none. What is built has a row for each id of the run's tokenizer: more would be
# trained, averaged and sent for nothing, as 6.9M of 15.2M parameters with `train:8192`. Rows are not padded to a
# multiple of 64, as nanoGPT does for speed, so that GPT-2 has its published size; who makes a tokenizer can choose one.
PRESETS: dict[str, GPTConfig | LlamaConfig] = {
    # Trains in minutes on one slow core; 0.1M parameters.
    "gpt-demo": GPTConfig(vocab_size=0, layers=2, heads=4, width=64, context=64),
    # nanoGPT's character model for one small GPU; 10.8M parameters.
    "gpt-small": GPTConfig(vocab_size=0, layers=6, heads=6, width=384, context=256),
    # GPT-2 small, SPARTA's large-scale setting; 124M parameters.
    "gpt2-124m": GPTConfig(vocab_size=50257, layers=12, heads=12, width=768, context=1024),
    # DiLoCo, table 1, with the sequence length of table 5. The paper uses Chinchilla's blocks. With GPT-2's blocks and
    # one table for input and output the sizes still match the names: 59.9M, 150.8M and 390.7M parameters.
    "diloco-60m": GPTConfig(vocab_size=32_000, layers=3, heads=16, head_size=64, width=896, context=1024),
    "diloco-150m": GPTConfig(vocab_size=32_000, layers=12, heads=16, head_size=64, width=896, context=1024),
    "diloco-400m": GPTConfig(vocab_size=32_000, layers=12, heads=12, head_size=128, width=1536, context=1024),
    # Llamas with QK-norm. The shapes of llama2.c's stories15M (tied); of GaLore's 60M (arXiv 2403.03507); of
    # JackFram/llama-160m; and the last, of as many layers as GPT-2 medium, is ours. 15.2M, 58.1M, 162M and 393M.
    "llama-15m": LlamaConfig(vocab_size=32_000, layers=6, heads=6, width=288, hidden=768, context=256),
    "llama-60m": LlamaConfig(vocab_size=32_000, layers=8, heads=8, width=512, hidden=1376, context=1024, tied=False),
    "llama-160m": LlamaConfig(vocab_size=32_000, layers=12, heads=12, width=768, hidden=3072, context=1024, tied=False),
    "llama-400m": LlamaConfig(
        vocab_size=32_000, layers=24, heads=16, width=1024, hidden=3072, context=1024, tied=False
    ),
}
# The context of users' models without an attribute `context`, as short as the demo model's.
DEFAULT_CONTEXT = 64
# Tokens that a new model is tried on, at most: as long as the default context, so that a shorter table of positions
# shows. Models of transformers say their context, and may be so large that each token takes time.
TRIED_TOKENS, TRIED_TOKENS_OF_TRANSFORMERS = DEFAULT_CONTEXT, 8
# In standard deviations of the logits: far above the rounding of fp32, and below what a token does (guess).
CAUSAL_TOLERANCE = 1e-4
# Directories of packages that are not the user's own code.
_INSTALLED = {"site-packages", "dist-packages"}


def build(name: str, *, vocab_size: int, seed: int, context: int = 0) -> nn.Module:
    """Build a model on the CPU. Raises ConfigError if it is unknown, not causal, or its factory breaks the rule below.

    Args:
        name: a key of PRESETS; hf:NAME or hf:NAME:pretrained; or `package.module:factory`. The factory takes no
            argument, or `vocab_size=`, and returns a module that maps int64 tokens (batch, time) to logits (batch,
            time, at least vocab_size).
        vocab_size: number of ids of the tokenizer. Presets have as many rows in their tables.
        seed: seeds the initial weights. The global random state is restored.
        context: longest sequence in tokens; 0 for the model's own, which models of the user always have.
    """
    check_name(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in PRESETS:
            shape = _shape(name, vocab_size, context)
            return GPT(shape) if isinstance(shape, GPTConfig) else Llama(shape)
        if name.startswith(hf.PREFIX):
            model = hf.build(name, vocab_size, context)
            _check_model(name, model, vocab_size, TRIED_TOKENS_OF_TRANSFORMERS)
            return model
        if context:
            raise ConfigError(
                f"--context {context}: a model of your own says its longest sequence by its attribute context; leave "
                f"--context out, and set the attribute in {name}"
            )
        return _build_users(name, vocab_size)


def build_of(run: RunConfig) -> nn.Module:
    """Build the model of a run, with its initial weights."""
    return build(run.model, vocab_size=run.vocab_size, seed=run.run_seed, context=run.context)


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is a preset, a model of transformers, or a factory that can be imported.

    Raise it also if the weights of a preset, or of a model of transformers, do not fit into memory.
    """
    if name in PRESETS or name.startswith(hf.PREFIX):
        check_parameters(name, count_parameters(name, vocab_size=0), free_memory_bytes())
        return
    if ":" not in name:
        others = "your own is package.module:factory, one of transformers hf:NAME"
        raise ConfigError(f"--model {name}: unknown model; {did_you_mean(name, PRESETS)} ({others})")
    _find_factory(name)


def count_parameters(name: str, *, vocab_size: int | None, context: int = 0) -> int:
    """Number of parameters of a model; only users' models are built to count them. Raises ConfigError like `build`.

    `vocab_size`: None for the published one of a preset, or else that of characters.
    """
    if vocab_size is None:
        vocab_size = (PRESETS[name].vocab_size if name in PRESETS else 0) or RunConfig.vocab_size
    if name in PRESETS:
        return _shape(name, vocab_size, context).num_parameters
    if name.startswith(hf.PREFIX):
        return hf.count_parameters(name, vocab_size)
    return sum(parameter.numel() for parameter in build(name, vocab_size=vocab_size, seed=0).parameters())


def batch_windows(name: str, context: int, tokens: int | None, ranks: int = 1) -> int:
    """Windows of each rank in an inner step. Those of all ranks have about `tokens`, or the model's default."""
    wanted = tokens or model_defaults(name).batch_tokens or BATCH_WINDOWS * context
    return max(1, round(wanted / context / ranks))


def eval_tokens(name: str, context: int) -> int:
    """The default number of tokens to evaluate a model on. It is the same on all peers of a run."""
    return EVAL_STEPS * batch_windows(name, context, None) * context


def _shape(name: str, vocab_size: int, context: int) -> GPTConfig | LlamaConfig:
    preset = PRESETS[name]
    return replace(preset, vocab_size=vocab_size, context=context or preset.context)


def context_length(model: nn.Module) -> int:
    """Length in tokens of the windows that `model` is trained on: its attribute `context`, or 64 without one."""
    context = getattr(model, "context", DEFAULT_CONTEXT)
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"the model's attribute context = {context!r} must be its longest sequence, a whole number")
    return context


def _find_factory(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    # Modules of the current directory can be imported, as with `python -m`.
    if "" not in sys.path:
        sys.path.insert(0, "")
    package = module_name.partition(".")[0]
    fix = f"check the name, and run this in the directory that holds {package}, or add that to PYTHONPATH"
    with _users_errors(f"--model {name}: cannot import {module_name!r}", fix):
        module = importlib.import_module(module_name)
    factory: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = did_you_mean(attribute, known)
        raise ConfigError(f"--model {name}: {module_name} has no function {attribute!r}; {hint}")
    return factory


def _build_users(name: str, vocab_size: int) -> nn.Module:
    factory = _find_factory(name)
    rule = f"it is called with vocab_size={vocab_size} if it has that argument, else without arguments"
    with _users_errors(f"--model {name}: the factory failed", rule):
        takes_vocab_size = "vocab_size" in inspect.signature(factory).parameters
        model = factory(vocab_size=vocab_size) if takes_vocab_size else factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {name}: the factory returned {type(model).__name__}; it must be a torch.nn.Module")
    _check_model(name, model, vocab_size, TRIED_TOKENS)
    return model


def _check_model(name: str, model: nn.Module, vocab_size: int, most_tokens: int) -> None:
    """Try a model on a short window. Raises ConfigError unless it maps tokens to logits, is causal, and can be trained.

    Models on the meta device are not checked for causality; nor are those whose output is random, or the same for all
    tokens at first.
    """
    tokens = _alternating(min(most_tokens, context_length(model)))
    modes = [(module, module.training) for module in model.modules()]
    given, wanted = tuple(tokens.shape), f"(batch, time, {vocab_size} or more)"
    rule = f"it must map int64 tokens (batch, time) to logits {wanted}"
    if not hasattr(model, "context"):
        rule += f"; without an attribute context, windows are {DEFAULT_CONTEXT} tokens"
    model.eval()
    with _users_errors(f"--model {name}: failed on int64 tokens of shape {given}", rule), torch.no_grad():
        logits = model(tokens)
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else ()
        if shape[:-1] != given or shape[-1] < vocab_size:
            got = shape or type(logits).__name__
            raise ConfigError(f"--model {name}: tokens {given} gave {got}; it must return logits of shape {wanted}")
    # One window may show no more than a scale that all positions share, such as of quantised activations.
    sees_later = _sees_the_last(model, tokens, logits) and all(
        _sees_the_last(model, _alternating(given[1], step)) for step in (2, 3)
    )
    model.train(modes[0][1])  # a module may do more in it than to note the mode
    for module, training in modes:
        module.training = training
    if sees_later:
        raise ConfigError(
            f"--model {name}: its predictions depend on later tokens; it must be causal (transformers: is_decoder=True "
            "or causal=True in the configuration)"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"--model {name}: the model has no parameter with requires_grad=True: there is nothing to train"
        )


def _alternating(length: int, step: int = 1) -> torch.Tensor:
    """Tokens (1, length): `step` times 0, then as often 1, and so on."""
    return (torch.arange(length) // step % 2)[None]


@torch.no_grad()
def _sees_the_last(model: nn.Module, tokens: torch.Tensor, known: torch.Tensor | None = None) -> bool:
    """Whether the logits of a model change at earlier positions with the last of these tokens (1, T), each 0 or 1.

    `known`: its logits for these tokens, if it was asked for them already.
    """
    changed = tokens.clone()
    changed[0, -1] = 1 - changed[0, -1]

    def earlier(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :-1].float()

    try:
        first = earlier(model(tokens) if known is None else known)
        if first.is_meta or not first.numel():
            return False
        is_close = partial(torch.allclose, first, rtol=0.0, atol=CAUSAL_TOLERANCE * float(first.std()))
        # If the same tokens also give other logits, it draws at random.
        return not is_close(earlier(model(changed))) and is_close(earlier(model(tokens)))
    except Exception:  # a model that counts its calls
        return False


@contextmanager
def _users_errors(what: str, rule: str) -> Iterator[None]:
    """Raise ConfigError for any exception of the user's own code. The message names the innermost line of it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        paths, package = sysconfig.get_paths(), Path(__file__).parents[2]
        others = ("<", f"{package}{os.sep}", *(paths[name] for name in ("stdlib", "platstdlib")))
        lines = [
            line
            for line in traceback.extract_tb(error.__traceback__)
            if not line.filename.startswith(others) and not _INSTALLED.intersection(Path(line.filename).parts)
        ]
        place = f" at {_shortest(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""
        raise ConfigError(f"{what}{place} ({type(error).__name__}: {error}); {rule}") from error


def _shortest(filename: str) -> str:
    try:
        return os.path.relpath(filename)
    except (OSError, ValueError):  # the current directory was deleted, or is on another drive
        return filename
