"""How a run's outer gradients are coded on their way to a reducer, and their mean on its way back."""

from __future__ import annotations

from p2ptrain.algorithms.codec import Codec, codec
from p2ptrain.settings.config import RunConfig

# What top-k saves: three bytes a kept value, against one for each of int8's.
TOPK_PAYS_BELOW = 0.33
# Kept values are counted in whole numbers a chunk of 65536.
ROUNDING = 2.0**-16


def gradient_codec(run: RunConfig) -> Codec:
    """The codec of one peer's outer gradient."""
    return codec(run.round_codec, prune_fraction=run.prune_fraction, density=run.round_density)


def mean_codec(run: RunConfig, contributors: int) -> Codec:
    """The codec of the mean of so many: places that one left out, another may have sent.

    Pruned gradients have a mean that is not; the mean of k top-k gradients has at most k times as many values, and is
    sent with as many while that is shorter.
    """
    density = contributors * (run.round_density + ROUNDING)
    if run.round_codec == "topk" and density < TOPK_PAYS_BELOW:
        return codec("topk", density=density)
    return codec("int8" if run.round_codec == "topk" else run.round_codec)
