"""Converts the arguments of `Peer.step()` to plain Python values, and checks them."""

from __future__ import annotations

import operator
from typing import Any

import torch

from p2ptrain.errors import ConfigError

# More than any batch. Rounds add up the samples of all members, and integers on the wire have 63 bits.
MAX_SAMPLES = 2**32


def plain_samples(samples: Any) -> int:
    """`samples` as an int: a whole number up to 2**32, also of numpy or a tensor of one value. Raises ConfigError."""
    try:
        number = operator.index(samples)
    except Exception:  # tensors raise several unrelated types
        number = -1
    if not 0 <= number <= MAX_SAMPLES:
        raise ConfigError(
            f"samples = {samples!r}: must be a whole number from 0 to {MAX_SAMPLES}; "
            "give the tokens or examples of this step, rounded by int()"
        )
    return number


def plain_loss(loss: Any) -> float | None:
    """`loss` as a float or None: any number, also NaN, of numpy, or a tensor of one value. Raises ConfigError."""
    if loss is None or type(loss) is float:
        return loss
    if not isinstance(loss, str | bytes | bytearray):
        try:
            return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except Exception:  # tensors and arrays raise several unrelated types
            pass
    raise ConfigError(f"loss = {loss!r}: must be one number, or None; give loss.item() of the mean over the batch")
