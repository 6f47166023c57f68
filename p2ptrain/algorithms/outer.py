"""The outer optimizer of DiLoCo: from the mean outer gradient to the next anchor.

The anchor's bits depend only on this module, on `averaging` and on `codec`. Members of a round must get the same bits
on any CPU, so the arithmetic is numpy float32 with each operation rounded separately, in a fixed order. torch's
`SGD(nesterov)`, `add(alpha=)` and `lerp` fuse operations depending on the vector unit, which gives different bits.

The optimizers are those of DiLoCo, figure 6, with the values that table 5 prints in bold. SGD with lr 1 is the plain
average: federated averaging (McMahan et al., 2017), or a model soup (Wortsman et al., 2022) if there is one round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2ptrain.algorithms import kernels

Array = npt.NDArray[np.float32]

# 256 KiB of float32: the scratch memory of one chunk fits into a core's second-level cache.
_CHUNK = 65536
# Squares are clipped to this range, which no training leaves. Without it, a value near the limit of float32 would
# freeze its weight for ever, and a CPU that flushes subnormals would get other bits. Adam's ε hides the minimum.
_SQUARE_MIN, _SQUARE_MAX = np.float32(2.0**-100), np.float32(2.0**100)


@dataclass(frozen=True)
class OuterOptimizer:
    """Default values of one outer optimizer, as chosen by DiLoCo (table 5).

    Attributes:
        lr: outer learning rate.
        momentum: μ, or Adam's β1.
        beta2, eps: Adam's; the paper found it unstable with a smaller ε (section 3.1, "Outer Optimizers").
        num_moments: vectors of the anchor's size that it keeps between rounds.
    """

    lr: float
    momentum: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    num_moments: int = 0


OUTER_OPTIMIZERS = {
    "sgd": OuterOptimizer(lr=0.5),
    "sgdm": OuterOptimizer(lr=0.3, momentum=0.9, num_moments=1),
    "nesterov": OuterOptimizer(lr=0.7, momentum=0.9, num_moments=1),
    "adam": OuterOptimizer(lr=0.3, momentum=0.9, beta2=0.95, eps=0.1, num_moments=2),
}
_IN_C = ("sgd", "sgdm", "nesterov")


def outer_step(
    optimizer: str,
    anchor: Array,
    moments: Sequence[Array],
    mean_gradient: Array,
    *,
    lr: float,
    momentum: float,
    round_: int,
) -> None:
    """Take one outer step, in place (DiLoCo, Algorithm 1, line 14). Elementwise, so parts can be updated separately.

    With g the mean outer gradient, and each operation rounded to float32 in the order written:

    - sgd: A -= lr · g.
    - sgdm: m = μ·m + g; A -= lr · m.
    - nesterov: m = μ·m + g; A -= lr · (g + μ·m), as in torch. The first step from m = 0 is 1.33 g at 0.7 and 0.9.
    - adam: m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·g²; A -= lr/(1-β1ᵗ) · m / (√v · 1/√(1-β2ᵗ) + ε), t = round_ + 1.

    Args:
        optimizer: a name in `OUTER_OPTIMIZERS`.
        anchor: contiguous float32 of any shape, changed in place.
        moments: at least as many as the optimizer has, each with the anchor's shape and dtype. The first `num_moments`
            are changed in place, the rest is ignored.
        mean_gradient: the mean of anchor - local, with the anchor's shape and dtype; only read.
        lr: outer learning rate.
        momentum: μ or β1, in [0, 1); ignored by sgd.
        round_: outer steps taken before this one on these moments; used only by Adam's bias correction.
    """
    used = [moment.reshape(-1) for moment in moments[: OUTER_OPTIMIZERS[optimizer].num_moments]]
    assert len(used) == OUTER_OPTIMIZERS[optimizer].num_moments, (optimizer, len(moments))
    assert all(moment.shape == anchor.shape and moment.flags.c_contiguous for moment in moments[: len(used)])
    assert anchor.shape == mean_gradient.shape
    assert anchor.flags.c_contiguous
    flat, gradient = anchor.reshape(-1), mean_gradient.reshape(-1)
    if optimizer == "adam":
        _adam(flat, used, gradient, _adam_factors(lr, momentum, round_ + 1))
    elif optimizer in _IN_C and (library := kernels.library()) is not None:
        of, moment = kernels.address, kernels.address(used[0]) if used else None
        nesterov = optimizer == "nesterov"
        library.sgd_step(of(flat), moment, of(gradient), flat.size, float(lr), float(momentum), nesterov)
    else:
        _numpy_sgd(flat, used, gradient, optimizer, np.float32(lr), np.float32(momentum))


def _numpy_sgd(
    anchor: Array, moments: list[Array], gradient: Array, optimizer: str, lr: np.float32, momentum: np.float32
) -> None:
    """sgd, sgdm and nesterov: the reference."""
    for chunk, update, _ in _chunks(anchor.size):
        direction = g = gradient[chunk]
        for vector in moments:
            m = vector[chunk]
            np.multiply(m, momentum, out=m)
            np.add(m, g, out=m)
            direction = m
        if optimizer == "nesterov":
            np.multiply(direction, momentum, out=update)
            direction = np.add(update, g, out=update)
        np.multiply(direction, lr, out=update)
        np.subtract(anchor[chunk], update, out=anchor[chunk])


def _chunks(size: int) -> Iterator[tuple[slice, Array, Array]]:
    """[0, size) in steps of `_CHUNK`, the last one shorter, each with scratch memory of its length, twice."""
    scratch = np.empty((2, min(_CHUNK, size)), np.float32)
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
        yield slice(start, stop), scratch[0, : stop - start], scratch[1, : stop - start]


def _adam_factors(lr: float, beta1: float, t: int) -> list[np.float32]:
    """Adam's β1, 1-β1, β2, 1-β2, 1/√(1-β2ᵗ) and lr/(1-β1ᵗ): in double precision with + - × ÷ √ only, then rounded."""
    beta2 = OUTER_OPTIMIZERS["adam"].beta2
    root, step = 1 / math.sqrt(1 - _power(beta2, t)), lr / (1 - _power(beta1, t))
    return [np.float32(factor) for factor in (beta1, 1 - beta1, beta2, 1 - beta2, root, step)]


def _adam(anchor: Array, moments: list[Array], gradient: Array, factors: list[np.float32]) -> None:
    """Adam. The change of the anchor is finite for finite m and g."""
    beta1, rest1, beta2, rest2, root, step = factors
    for chunk, update, other in _chunks(anchor.size):
        g, m, v = gradient[chunk], moments[0][chunk], moments[1][chunk]
        np.multiply(m, beta1, out=m)
        np.multiply(g, rest1, out=other)
        np.add(m, other, out=m)
        with np.errstate(over="ignore"):
            np.multiply(g, g, out=other)
        np.clip(other, _SQUARE_MIN, _SQUARE_MAX, out=other)
        np.multiply(other, rest2, out=other)
        np.multiply(v, beta2, out=v)
        np.add(v, other, out=v)
        np.sqrt(v, out=other)
        np.multiply(other, root, out=other)
        np.add(other, np.float32(OUTER_OPTIMIZERS["adam"].eps), out=other)
        np.divide(m, other, out=update)
        np.multiply(update, step, out=update)
        np.subtract(anchor[chunk], update, out=anchor[chunk])


def _power(base: float, exponent: int) -> float:
    """base ** exponent by squaring: math libraries differ in the last bit of `pow`, but not of products."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
