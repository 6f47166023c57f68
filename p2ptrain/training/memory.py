"""Checks that a model, a batch or a text fits into memory. Without them the system would kill the process silently.

All are pure functions of the free memory (`settings.machine`), which is None if it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from p2ptrain.errors import ConfigError
from p2ptrain.formatting import size

# The float32 weights of a model that is being built.
PARAMETER_BYTES = 4
# A token of a batch: position, id, copies of both while it is read, and the same in the batch that is read ahead.
TOKEN_BYTES = 40
# The least for a byte of text that is read and tokenized: 4.0 to 7.0 with chars and bytes (measured, 67 MB).
TEXT_BYTES = 4
# A layer's matrix (rows, columns) reads as many values of each token as it has columns, and makes as many as it has
# rows. float32, kept for the backward pass, and with their gradients: 4.7 to 9.9 bytes for each of both (measured with
# five built-in models; the most with large vocabularies, whose logits are there three times).
ACTIVATION_BYTES = 12
# The same, at least: a window that does not fit with so few cannot be trained on (3.6 measured, with 32,768 tokens).
LEAST_ACTIVATION_BYTES = 3
# More windows at once make no CPU faster: with 32 of them `gpt-small` took 0.41 s for each, with 8 it took 0.38 s. A
# round needs memory, too, and other programs and peers do: hence no more than a share of what is free.
MOST_ACTIVATIONS_BYTES, SHARE_OF_FREE = 2**30, 4


def windows_at_once(shapes: Iterable[torch.Size], context: int, free_bytes: int | None) -> int:
    """The largest number of windows that a CPU computes at once; at least 1.

    Args:
        shapes: of the model's parameters.
        context: tokens of a window.
        free_bytes: for this rank.
    """
    values = _values_of_a_token(shapes)
    most_bytes = MOST_ACTIVATIONS_BYTES
    if free_bytes is not None:
        most_bytes = min(most_bytes, free_bytes // SHARE_OF_FREE)
    return max(1, most_bytes // max(1, ACTIVATION_BYTES * values * context))


def check_window(shapes: Iterable[torch.Size], context: int, free_bytes: int | None) -> None:
    """Raise ConfigError if a CPU cannot compute one window. The peer that starts a run chooses the length of windows.

    The arguments are those of `windows_at_once`.
    """
    # A table of positions, which has a row for each, is only read.
    matrices = (shape for shape in shapes if len(shape) >= 2 and shape[-2] != context)
    needed = LEAST_ACTIVATION_BYTES * _values_of_a_token(matrices) * context
    wanted = f"--context {context}: training on one window takes {size(needed)} or more"
    _check_free(needed, free_bytes, wanted, "join or start a run with a shorter one")


def _values_of_a_token(shapes: Iterable[torch.Size]) -> int:
    return sum(shape[-2] + shape[-1] for shape in shapes if len(shape) >= 2)


def check_tokens(flag: str, tokens: int, free_bytes: int | None) -> None:
    """Raise ConfigError if the ids of so many tokens, which are read at once, do not fit."""
    needed = TOKEN_BYTES * tokens
    _check_free(needed, free_bytes, f"{flag} {tokens}: their ids alone take {size(needed)}", "give fewer")


def check_text(source: str, size_bytes: int, free_bytes: int | None) -> None:
    """Raise ConfigError if text of so many bytes, which is loaded whole, does not fit."""
    needed = TEXT_BYTES * size_bytes
    wanted = f"--data {source}: {size(size_bytes)} of text take {size(needed)} while it is read"
    _check_free(needed, free_bytes, wanted, "make token files of it with `p2ptrain data prepare`")


def check_parameters(model: str, num_parameters: int, free_bytes: int | None) -> None:
    """Raise ConfigError if the weights of a model do not fit.

    `num_parameters`: at least so many; a table may get more rows once the run's tokenizer is known.
    """
    needed = PARAMETER_BYTES * num_parameters
    wanted = f"--model {model}: its weights take at least {size(needed)} ({num_parameters:,} parameters)"
    _check_free(needed, free_bytes, wanted, "train a smaller model")


def _check_free(needed_bytes: int, free_bytes: int | None, wanted: str, fix: str) -> None:
    if free_bytes is not None and needed_bytes > free_bytes:
        raise ConfigError(f"{wanted}, and {size(free_bytes)} of memory are free; {fix}")
