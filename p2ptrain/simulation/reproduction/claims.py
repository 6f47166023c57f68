"""A paper's claim about two variants of an experiment, and our verdict on it.

Losses are compared as perplexities, as in the papers: a difference of d nats is a change of exp(d) - 1.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import did_you_mean
from p2ptrain.simulation.records import Records

# Difference between two runs that differ only in their seed (measured).
NOISE_NATS = 0.004
DIRECTIONS = ("lower", "higher", "equal", "not higher")


def _spike(records: Records) -> float:
    """The largest rise of the mean held-out loss between two evaluations, in nats."""
    losses = [row["held_out_loss"] for row in records.table() if row["held_out_loss"] is not None]
    return max((later - earlier for earlier, later in itertools.pairwise(losses)), default=0.0)


def _mean_of_rounds(records: Records, field: str) -> float:
    values = [event[field] for event in records.rounds if len(event["contributors"]) > 1]
    return statistics.fmean(values) if values else math.nan


# By name: a function of the records, and whether the result is a loss in nats.
MEASURES: dict[str, tuple[Callable[[Records], float], bool]] = {
    "merged_loss": (lambda records: records.final_loss, True),
    "loss_before_merge": (lambda records: records.loss_before_merge, True),
    # Average pairwise correlation of the weights, last measured.
    "correlation": (lambda records: records.correlations()[-1][1], False),
    "spike": (_spike, False),
    # In nats; the last round is a plain average.
    "merge_rise": (lambda records: records.final_loss - records.loss_before_merge, False),
    "bytes": (lambda records: float(records.bytes_sent), False),
    "cosine": (lambda records: _mean_of_rounds(records, "cosine"), False),
    "mean_norm": (lambda records: _mean_of_rounds(records, "mean_norm"), False),
}


@dataclass(frozen=True)
class Claim:
    """A paper's claim about variant `left` compared with variant `right`.

    Attributes:
        row: number of the claim, such as "S7".
        text: the claim in words.
        left, right: names of variants.
        measure: a key of MEASURES.
        direction: left is "lower" or "higher" than right, "equal" to it or "not higher", both within `tolerance`.
        paper: the paper's figure, as text.
        tolerance: largest relative difference for "equal" and "not higher".
    """

    row: str
    text: str
    left: str
    right: str
    measure: str
    direction: str
    paper: str
    tolerance: float = 0.02

    @classmethod
    def read(cls, table: Mapping[str, Any], variants: Sequence[str]) -> Claim:
        """From a [[claim]] table. Raises ConfigError."""
        try:
            claim = cls(**table)
        except TypeError as error:
            raise ConfigError(f"[[claim]] {dict(table)}: {error}") from None
        for name in (claim.left, claim.right):
            if name not in variants:
                raise ConfigError(f"[[claim]] names a variant {name!r}; {did_you_mean(name, variants)}")
        if claim.measure not in MEASURES:
            raise ConfigError(f"[[claim]] measure {claim.measure!r}; {did_you_mean(claim.measure, MEASURES)}")
        if claim.direction not in DIRECTIONS:
            raise ConfigError(f"[[claim]] direction {claim.direction!r}: must be one of {', '.join(DIRECTIONS)}")
        return claim

    def judge(self, by_seed: Sequence[Mapping[str, Records]]) -> Verdict:
        """Compare the variants; each mapping has the records of all variants for one seed."""
        read, is_loss = MEASURES[self.measure]
        lefts, rights = ([read(records[name]) for records in by_seed] for name in (self.left, self.right))
        differences = [left - right for left, right in zip(lefts, rights, strict=True)]
        difference = statistics.fmean(differences)
        spread = statistics.stdev(differences) if len(differences) > 1 else None
        # Two standard errors of the mean over the seeds.
        noise = max(NOISE_NATS if is_loss else 0.0, 2 * (spread or 0.0) / math.sqrt(len(differences)))
        right = statistics.fmean(rights)
        relative = math.expm1(difference) if is_loss else difference / abs(right) if right else math.nan
        words = self._words(difference, relative, noise)
        return Verdict(self, statistics.fmean(lefts), right, relative, spread, words)

    def _words(self, difference: float, relative: float, noise: float) -> str:
        if self.direction == "equal":
            return "holds" if abs(relative) <= self.tolerance else "does not hold"
        if self.direction == "not higher":
            return "holds" if relative <= self.tolerance else "does not hold"
        if abs(difference) <= noise:
            return "within noise"
        return "holds" if (difference < 0) == (self.direction == "lower") else "does not hold: the other way round"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim: both figures, their relative difference, the standard deviation of their difference over
    seeds (None for one seed), and whether the claim holds, in words."""

    claim: Claim
    left: float
    right: float
    relative: float
    spread: float | None
    words: str
