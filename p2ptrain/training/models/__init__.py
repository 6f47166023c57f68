"""The built-in models, and models of the user given as `package.module:factory`."""

from p2ptrain.training.models.gpt import GPT, GPTConfig
from p2ptrain.training.models.llama import Llama, LlamaConfig
from p2ptrain.training.models.registry import (
    PRESETS,
    batch_windows,
    build,
    build_of,
    check_name,
    context_length,
    count_parameters,
    eval_tokens,
)

__all__ = [
    "GPT",
    "PRESETS",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "batch_windows",
    "build",
    "build_of",
    "check_name",
    "context_length",
    "count_parameters",
    "eval_tokens",
]
