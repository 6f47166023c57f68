"""How a round that lands late changes the weights: the rules that `benchmarks.late` compares.

At its snapshot a peer has weights s. While the round is under way it trains on from `begun`, which is s unless the
rule starts elsewhere, and makes progress p = θ − begun. The round turns the anchor A into A′ by the outer step with the
mean outer gradient ḡ = A − mean(s). What a rule keeps is sent again with the next outer gradient, A′ − θ. So `add`, A′
+ p, sends each inner step once, while `keep`, θ + (A′ − A) = A′ + p + (s − A), sends the steps before s again and
again.

What `add` counts twice is more subtle: A′ is ahead of mean(s) by u = A′ − mean(s), steps that the outer momentum
expects; p, made without u, takes these steps as well. `net` leaves them out, which was worse in a first run.

Rules named after a paper are adapted to one round of all peers that is under way, before the next one begins: no outer
step comes between a snapshot and its landing. The papers on stale outer gradients are about those that do come.

All functions are pure, and vectors flat float32. A′ includes what the codec did not send of the peer's own gradient
(`unsent`). Not here: generalized primal averaging (arXiv 2512.17131), which has no rounds, so nothing lands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
# Name, learning rate and momentum of an outer optimizer.
Outer = tuple[str, float, float]

# What the project's measurements use with some ten rounds.
LR, MOMENTUM = 0.7, 0.6
TINY = 1e-12
# Larger outer steps: in first runs, all that makes steps smaller made late rounds worse. The last three are the outer
# steps of `milder`, `less momentum` and `cgad nesterov` for 20 of 25 steps: on time, they show what is not the delay's.
FIXED = ((1.0, 0.6), (1.4, 0.6), (1.0, 0.8), (0.7, 0.8), (0.42, 0.6), (0.7, 0.12), (0.31, 0.6))
# HeLoCo's constants, as reimplementations of it have them; κ is for our momentum, which is a sum and not an average.
KEEP, SHRINK, MOST_SHRINK, TURN, KAPPA = 0.2, 0.5, 0.5, 1.0, 3.0 * (1 - MOMENTUM)
# CGAD's decay and cut-off, in rounds (guesses).
DECAY, CUT_OFF = 0.5, 2.0


@dataclass(frozen=True)
class Landing:
    """A peer's vectors when a round lands. Rules only read them.

    Attributes:
        now: θ before the landing.
        begun: θ right after the snapshot.
        before: A. after: A′.
        unsent: what the codec did not send, with its sign in the weights.
        mean: ḡ.
        tensors: where each tensor lies.
    """

    now: Array
    begun: Array
    before: Array
    after: Array
    unsent: Array
    mean: Array
    tensors: Sequence[slice]

    @property
    def target(self) -> Array:
        """Where a round on time leads: A′, and what was not sent."""
        return self.after + self.unsent

    @property
    def progress(self) -> Array:
        """p: what the peer has learnt since the snapshot."""
        return self.now - self.begun


@dataclass(frozen=True)
class Prediction:
    """A peer's vectors at its snapshot, from which a rule guesses A′.

    Attributes:
        snapshot: s.
        sent, sent_before: its outer gradient as others decode it, and that of the round before.
        moment, momentum: m and μ of the outer optimizer.
        mean_before: ḡ of the round before.
        peers: k.
        step_from: maps a mean outer gradient to the anchor after the outer step with it.
    """

    snapshot: Array
    sent: Array
    sent_before: Array
    moment: Array
    mean_before: Array
    peers: int
    momentum: float
    step_from: Callable[[Array], Array]


# Landings.


def add(landing: Landing) -> Array:
    """The project's rule, θ ← A′ + p. With a plain mean, that of CoCoD-SGD (arXiv 1906.12043)."""
    return landing.target + landing.progress


def keep(landing: Landing) -> Array:
    """θ ← θ + (A′ − A): adds the anchor's change. Peers never come together, and repeat what they have sent."""
    return landing.now + (landing.after - landing.before)


def damped(landing: Landing, beta: float) -> Array:
    """θ ← A′ + β p. 1 is `add`; 0 is `write`, which forgets p; the same as mixing `add`'s result with A′."""
    return landing.target + np.float32(beta) * landing.progress


def mixed(landing: Landing, alpha: float) -> Array:
    """Streaming DiLoCo (arXiv 2501.18512): θ ← α θ + (1 − α) A′. Keeps α of p and of the steps before s."""
    return np.float32(alpha) * landing.now + np.float32(1 - alpha) * landing.target


def delay_compensated(landing: Landing, strength: float) -> Array:
    """After DC-ASGD (arXiv 1609.08326): adds λ g ⊙ g ⊙ (θ_now − θ_then) to gradients that are late.

    Here −p takes the gradients' place; it is late by the landing's shift, A′ − begun. λ is relative to the mean square
    of each tensor, so that it has no unit: p ← p − λ (p ÷ rms p)² ⊙ shift, with a factor of the shift of 1 at most.
    DC-ASGD-a divides by the root of a moving mean square of each coordinate instead.
    """
    progress, shift = landing.progress, landing.target - landing.begun
    for tensor in landing.tensors:
        p = progress[tensor]
        squares = np.square(p)
        p -= np.minimum(strength * squares / (squares.mean() + np.float32(TINY)), 1).astype(np.float32) * shift[tensor]
    return landing.target + progress


def net(landing: Landing, share: float = 1.0) -> Array:
    """Ours: add only what the momentum did not expect. For each tensor, p loses its part along u = A′ − mean(s).

    p ← p − κ min(max(⟨p, u⟩ ÷ ⟨u, u⟩, 0), 1) u: at most u itself is left out.
    """
    progress = landing.progress
    ahead = landing.after - (landing.before - landing.mean)
    for tensor in landing.tensors:
        p, u = progress[tensor], ahead[tensor]
        part = float(np.dot(p, u)) / max(float(np.dot(u, u)), TINY)
        p -= np.float32(share * min(max(part, 0.0), 1.0)) * u
    return landing.target + progress


# Starts.


def look_ahead(prediction: Prediction, share: float = 1.0) -> Array:
    """After momentum look-ahead (Ajanthan et al., MCDC at ICLR 2025): train on from the anchor moved by the momentum.

    Theirs goes η μ (1 − μ) m from an anchor that has this worker's own gradient, ours η m from one without it.

    With ĝ = (1 − μ) m, that of a steady descent, Nesterov's step leads to A − η m: the same point for all peers. When
    the round lands, the guess is corrected: θ ← A′ + (θ − guess). `share`: how far to go there from s.
    """
    guess = prediction.step_from(np.float32(1 - prediction.momentum) * prediction.moment)
    return prediction.snapshot + np.float32(share) * (guess - prediction.snapshot)


def own_step(prediction: Prediction) -> Array:
    """Take one's own outer gradient for the mean until the round lands."""
    return prediction.step_from(prediction.sent)


def eager(prediction: Prediction, share: float = 1.0) -> Array:
    """Eager updates (arXiv 2502.12996): until the round lands, the mean of the last one with one's own part renewed.

    ĝ = ḡ' + (g − g') ÷ k, with ′ for the round before. In the paper the delay is a whole interval, and the guess is the
    outer step itself, so nothing lands later. `share`: how far to go there from s (ours).
    """
    fresh = (prediction.sent - prediction.sent_before) / np.float32(prediction.peers)
    guess = prediction.step_from(prediction.mean_before + fresh)
    return prediction.snapshot + np.float32(share) * (guess - prediction.snapshot)


# Outer gradients.

Gradient = Callable[[Array, Sequence[Array], Sequence[slice], float], Array]


def as_it_is(mean: Array, moments: Sequence[Array], tensors: Sequence[slice], lateness: float) -> Array:
    return mean


def heloco(mean: Array, moments: Sequence[Array], tensors: Sequence[slice], lateness: float) -> Array:
    """HeLoCo (arXiv 2606.00271), for each tensor, with c the cosine of ḡ and the outer momentum m:

    - c ≥ `KEEP`: keep ḡ.
    - c < 0: ḡ − β c ‖ḡ‖ m̂ with β = min(k (−c) conf, β_max), conf = ‖ḡ‖ ÷ (‖ḡ‖ + κ ‖m‖).
    - else turn ḡ towards m by λ = min(`TURN` (1 − c) conf, 1), with its norm kept.

    The paper corrects each worker's gradient, by a momentum that has taken outer steps since; this one the mean.
    """
    corrected = mean.copy()
    for tensor in tensors:
        g, m = corrected[tensor], moments[0][tensor]
        g_norm, m_norm = float(np.linalg.norm(g)), float(np.linalg.norm(m))
        if g_norm < TINY or m_norm < TINY:
            continue
        cosine = float(np.dot(g, m)) / (g_norm * m_norm)
        confidence = g_norm / (g_norm + KAPPA * m_norm)
        if cosine < 0:
            beta = min(SHRINK * -cosine * confidence, MOST_SHRINK)
            g -= np.float32(beta * cosine * g_norm / m_norm) * m
        elif cosine < KEEP:
            turn = min(TURN * (1 - cosine) * confidence, 1.0)
            turned = (1 - turn) / g_norm * g + turn / m_norm * m
            g[:] = turned * (g_norm / max(float(np.linalg.norm(turned)), TINY))
    return corrected


def aged(mean: Array, moments: Sequence[Array], tensors: Sequence[slice], lateness: float) -> Array:
    """The factor of CGAD (arXiv 2605.09126): ḡ e^(−ατ) ½ (1 + cos(π τ ÷ τ_c)), 0 from τ_c on; τ is the delay in rounds.

    The paper weights gradients of different ages, in outer rounds, against each other. Here all are equally late, by
    less than a round.
    """
    gate = 0.5 * (1 + math.cos(math.pi * min(lateness / CUT_OFF, 1)))
    return np.float32(gate * math.exp(-DECAY * lateness)) * mean


# Outer steps, by the delay in rounds.


def usual(lateness: float) -> Outer:
    return "nesterov", LR, MOMENTUM


def milder(lateness: float) -> Outer:
    """Half of the outer learning rate for a delay of a whole round."""
    return "nesterov", LR * (1 - lateness / 2), MOMENTUM


def less_momentum(lateness: float) -> Outer:
    """μ (1 − τ): a delay acts as momentum does (Mitliagkas et al., arXiv 1605.09774)."""
    return "nesterov", LR, MOMENTUM * (1 - lateness)


def less_momentum_same_rate(lateness: float) -> Outer:
    """The same with η ÷ (1 − μ) as on time: the sum of all steps that a gradient causes."""
    momentum = MOMENTUM * (1 - lateness)
    return "nesterov", LR * (1 - momentum) / (1 - MOMENTUM), momentum


def plain(lateness: float) -> Outer:
    """The plain mean: A′ = mean(s)."""
    return "sgd", 1.0, 0.0


def fixed(lateness: float, lr: float, momentum: float) -> Outer:
    """Other values whether late or not: what a delay costs may depend on them."""
    return "nesterov", lr, momentum


@dataclass(frozen=True)
class Rule:
    """A landing rule: how it changes the snapshot, the mean, the outer step and the landing.

    `sections`: of the flat vector, each with rounds of its own, in turn (Streaming DiLoCo, arXiv 2501.18512). Where the
    link takes d steps for the whole, a section lands after d ÷ sections. Only for rules that look at each value alone.
    """

    land: Callable[[Landing], Array] = add
    start: Callable[[Prediction], Array] | None = None
    gradient: Gradient = as_it_is
    outer: Callable[[float], Outer] = usual
    sections: int = 1


RULES = {
    "add": Rule(),
    "write": Rule(functools.partial(damped, beta=0.0)),
    "keep": Rule(keep),
    **{f"mix {alpha}": Rule(functools.partial(mixed, alpha=alpha)) for alpha in (0.25, 0.5, 0.75)},
    **{f"damped {beta}": Rule(functools.partial(damped, beta=beta)) for beta in (0.25, 0.5, 0.75, 1.25)},
    "net": Rule(net),
    "net half": Rule(functools.partial(net, share=0.5)),
    **{f"dc-asgd {by}": Rule(functools.partial(delay_compensated, strength=by)) for by in (0.03, 0.1, 0.3)},
    "look-ahead": Rule(start=look_ahead),
    "look-ahead half": Rule(start=functools.partial(look_ahead, share=0.5)),
    "own step": Rule(start=own_step),
    "eager": Rule(start=eager),
    "eager half": Rule(start=functools.partial(eager, share=0.5)),
    "eager net": Rule(net, start=eager),
    "heloco": Rule(gradient=heloco),
    "cgad nesterov": Rule(gradient=aged),
    "cgad adam": Rule(gradient=aged, outer=lambda lateness: ("adam", 0.3, 0.9)),
    "milder": Rule(outer=milder),
    "less momentum": Rule(outer=less_momentum),
    "less momentum, same rate": Rule(outer=less_momentum_same_rate),
    "plain mean": Rule(outer=plain),
    "2 sections in turn": Rule(sections=2),
    "5 sections in turn": Rule(sections=5),
    "mix 0.5, 5 sections in turn": Rule(functools.partial(mixed, alpha=0.5), sections=5),
    "outer 1.0 / 0.6, 5 sections in turn": Rule(outer=functools.partial(fixed, lr=1.0, momentum=0.6), sections=5),
    **{
        f"outer {lr} / {momentum}": Rule(outer=functools.partial(fixed, lr=lr, momentum=momentum))
        for lr, momentum in FIXED
    },
}
# Those that are not `add` if the round is on time.
ON_TIME = {"keep", "mix 0.25", "mix 0.5", "mix 0.75", "heloco", "cgad adam", "plain mean"}
ON_TIME |= {name for name, rule in RULES.items() if rule.sections > 1}
ON_TIME |= {name for name in RULES if name.startswith("outer ")}
