"""The codecs of a run's outer gradients and of their mean."""

from __future__ import annotations

from p2ptrain.algorithms.codec import Codec, codec
from p2ptrain.settings.config import RunConfig

# top-k takes three bytes per kept value, int8 one byte for every value.
TOPK_PAYS_BELOW = 0.33
# The mean has no error buffer: reducers change, and an audit makes the same bytes again. So it needs a finer codec.
MEAN_OF = {"topk": "int8", "int2": "int4"}
# Numbers of kept values are rounded in each chunk of 65536.
ROUNDING = 2.0**-16


def gradient_codec(run: RunConfig) -> Codec:
    """The codec of one peer's outer gradient."""
    return codec(run.round_codec, prune_fraction=run.prune_fraction, density=run.round_density)


def mean_codec(run: RunConfig, contributors: int) -> Codec:
    """The codec of the mean of this many contributors.

    The mean of k top-k gradients has up to k times as many values, and is sent as top-k while that is shorter. That of
    int2 is sent as int4.
    """
    density = contributors * (run.round_density + ROUNDING)
    if run.round_codec == "topk" and density < TOPK_PAYS_BELOW:
        return codec("topk", density=density)
    return codec(MEAN_OF.get(run.round_codec, run.round_codec))
