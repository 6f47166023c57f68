"""The codecs of a run's outer gradients and of their mean."""

from __future__ import annotations

from p2ptrain.algorithms.codec import Codec, codec
from p2ptrain.settings.config import RunConfig

# top-k takes three bytes per kept value, int8 one byte for every value.
TOPK_PAYS_BELOW = 0.33
# Numbers of kept values are rounded in each chunk of 65536.
ROUNDING = 2.0**-16


def gradient_codec(run: RunConfig) -> Codec:
    """The codec of one peer's outer gradient."""
    return codec(run.round_codec, prune_fraction=run.prune_fraction, density=run.round_density)


def mean_codec(run: RunConfig, contributors: int) -> Codec:
    """The codec of the mean of this many contributors.

    The mean of k top-k gradients has up to k times as many values, and is sent as top-k while that is shorter.
    """
    density = contributors * (run.round_density + ROUNDING)
    if run.round_codec == "topk" and density < TOPK_PAYS_BELOW:
        return codec("topk", density=density)
    return codec("int8" if run.round_codec == "topk" else run.round_codec)
