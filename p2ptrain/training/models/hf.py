"""Causal language models of transformers: `hf:NAME_OR_PATH` from its configuration, `hf:…:pretrained` with its weights.

Code of a repository is never run: `trust_remote_code` is off, not left to a question on the terminal.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from p2ptrain.errors import ConfigError
from p2ptrain.training.hub import is_hub_there, library_errors

PREFIX, PRETRAINED = "hf:", ":pretrained"
# Few machines have the memory for longer windows, and a model also trains on shorter ones.
MOST_CONTEXT = 4096
# Each layer takes time and memory, however narrow it is. GPT-3 has 96, Llama 3.1 405B 126, the deepest DeepNet 1,000.
MOST_LAYERS = 1000


class CausalLM(nn.Module):
    """A model of transformers that maps tokens to logits, as ours do. Attribute `context`: its longest sequence."""

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__()
        self.lm = model
        self.context = context

    @property
    def num_ids(self) -> int:
        """Rows of its table of tokens."""
        return int(self.lm.get_input_embeddings().num_embeddings)  # type: ignore[operator]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, time) -> logits (batch, time, vocabulary)."""
        return self.lm(tokens, use_cache=False).logits  # type: ignore[no-any-return]


def count_parameters(name: str, vocab_size: int) -> int:
    """The number of parameters, without memory for them. May read from the hub.

    Raises ConfigError if transformers is missing, knows no such causal language model, or cannot build it.
    """
    config, _ = _config(name)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ConfigError(f"--model {name}: has {layers:,} layers, and at most {MOST_LAYERS:,} are built; give fewer")
    with torch.device("meta"):
        model = _from_config(config, name, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def build(name: str, vocab_size: int, context: int = 0) -> CausalLM:
    """Build the model with at least `vocab_size` ids, on the CPU, in fp32. Raises ConfigError.

    Its weights are new, or with `:pretrained` those of the hub or of a directory. Blocks while they are downloaded.

    `context`: its longest sequence; 0 for as many positions as its configuration has, up to MOST_CONTEXT.
    """
    config, is_local = _config(name)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and int(positions) < 1:
        raise ConfigError(f"--model {name}: its configuration allows {positions} positions; 1 or more can be trained")
    if positions is not None and context > int(positions):
        raise ConfigError(f"--context {context}: must be at most {positions}, the positions of --model {name}")
    context = context or (MOST_CONTEXT if positions is None else min(MOST_CONTEXT, int(positions)))
    if pretrained_place(name) is None:
        return CausalLM(_from_config(config, name, vocab_size).float(), context)
    with _building(name, is_hub_silent=_is_hub_silent(name, is_local)):
        model, loaded = _transformers().AutoModelForCausalLM.from_pretrained(
            _path(name), trust_remote_code=False, local_files_only=is_local, output_loading_info=True
        )
        if vocab_size > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(vocab_size)
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(
            f"--model {name}: its weights lack {missing[0]} and {len(missing) - 1} more that its configuration names; "
            f"give a directory whose weights and config.json belong together"
        )
    return CausalLM(model.float(), context)


def _from_config(config: Any, name: str, vocab_size: int) -> Any:
    """The model with new weights, on torch's default device."""
    with _building(name):
        config.vocab_size = max(config.vocab_size, vocab_size)
        return _transformers().AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _building(name: str, *, is_hub_silent: bool = False) -> AbstractContextManager[None]:
    return library_errors(f"--model {name}: cannot be built", "check its files", is_hub_silent=is_hub_silent)


def _config(name: str) -> tuple[Any, bool]:
    """The model's configuration, and whether only this machine is read: a directory, or the cache without the hub."""
    kind, path = _transformers().AutoConfig, _path(name)
    is_local = Path(path).is_dir() or not is_hub_there()
    fix = f"give {PREFIX}NAME of the hub or {PREFIX}DIR, and check the connection"
    what = f"--model {name}: has no configuration that transformers can use"
    with library_errors(what, fix, is_hub_silent=_is_hub_silent(name, is_local)):
        return kind.from_pretrained(path, trust_remote_code=False, local_files_only=is_local), is_local


def _is_hub_silent(name: str, is_local: bool) -> bool:
    """Whether only the cache is read, as the hub does not answer."""
    return is_local and not Path(_path(name)).is_dir()


def pretrained_place(name: str) -> str | None:
    """The name or directory of a model that begins with its own weights; None if it is another one."""
    return _path(name) if name.startswith(PREFIX) and name.endswith(PRETRAINED) else None


def _path(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(PRETRAINED)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        fix = "install with: pip install 'p2ptrain[transformers]'"
        raise ConfigError(f"--model {PREFIX}…: needs transformers; {fix}") from None
    return transformers
