"""Converts the arguments of `Peer.step()` to plain Python values, and checks them."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import torch

from p2ptrain.errors import ConfigError
from p2ptrain.protocol.rounds.deciding.record import MOST_COUNT

# More than any batch. Rounds add up the samples of all members, and integers on the wire have 63 bits.
MAX_SAMPLES = 2**32


def plain_samples(samples: Any) -> int:
    """`samples` of a step as an int: any whole number, also of numpy or a tensor of one value; True is 1, as in Python.

    Raises ConfigError where it is no whole number from 0 to 2**32.
    """
    return _whole(samples, "samples", MAX_SAMPLES, "give the tokens or examples of this step, rounded by int()")


def plain_shard_tokens(tokens: Any) -> int:
    """A peer's `shard_tokens` as an int, by the rules of `plain_samples`, up to 2**53. Raises ConfigError."""
    return _whole(tokens, "shard_tokens", MOST_COUNT, "give the tokens of this peer's shard, rounded by int()")


def plain_loss(loss: Any) -> float | None:
    """`loss` as a float or None: any number, also NaN, of numpy, or a tensor of one value. Raises ConfigError."""
    if loss is None or type(loss) is float:
        return loss
    if not isinstance(loss, str | bytes | bytearray):
        try:
            return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except Exception:  # tensors and arrays raise several unrelated types
            pass
    raise ConfigError(
        f"loss = {_shown(loss)}: must be one number, or None; give loss.item() of the mean over the batch"
    )


def _whole(value: Any, name: str, largest: int, fix: str) -> int:
    try:
        number = operator.index(value)
    except Exception:  # tensors raise several unrelated types
        number = -1
    if not 0 <= number <= largest:
        raise ConfigError(f"{name} = {_shown(value)}: must be a whole number from 0 to {largest}; {fix}")
    return number


def _shown(value: Any) -> str:
    """A value for a message, shortened. Python refuses to print integers of more than 4300 digits."""
    try:
        return reprlib.repr(value)
    except Exception:  # any type may come here, with a repr of its own
        return f"a value of type {type(value).__name__}"
