"""A claim of a paper about two arms of an experiment, and what we say of it: a figure beside the paper's, and words.

Losses are compared as perplexities, as the papers do: a difference of d nats is a change of exp(d) - 1.
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

# Two runs that differ in nothing but the seed differ by this much (ALGORITHMS.md: "noise about ±0.004 nats").
NOISE_NATS = 0.004
DIRECTIONS = ("lower", "higher", "equal", "not higher")


def _spike(records: Records) -> float:
    """The largest rise of the mean held-out loss from one measurement to the next, in nats."""
    losses = [row["held_out_loss"] for row in records.table() if row["held_out_loss"] is not None]
    return max((later - earlier for earlier, later in itertools.pairwise(losses)), default=0.0)


def _merge_rise(records: Records) -> float:
    """What the run's last round, a plain average, adds to the mean held-out loss, in nats."""
    return records.final_loss - records.loss_before_merge


def _last_correlation(records: Records) -> float:
    """Average pairwise correlation of the weights before the last round."""
    return records.correlations()[-1][1]


def _mean_of_rounds(records: Records, field: str) -> float:
    values = [event[field] for event in records.rounds if len(event["contributors"]) > 1]
    return statistics.fmean(values) if values else math.nan


# Name of a measure: how it is read off the records, and whether it is a loss in nats.
MEASURES: dict[str, tuple[Callable[[Records], float], bool]] = {
    "merged_loss": (lambda records: records.final_loss, True),
    "loss_before_merge": (lambda records: records.loss_before_merge, True),
    "correlation": (_last_correlation, False),
    "spike": (_spike, False),
    "merge_rise": (_merge_rise, False),
    "bytes": (lambda records: float(records.bytes_sent), False),
    "cosine": (lambda records: _mean_of_rounds(records, "cosine"), False),
    "mean_norm": (lambda records: _mean_of_rounds(records, "mean_norm"), False),
}


@dataclass(frozen=True)
class Claim:
    """What a paper says of arm `left` against arm `right`.

    Attributes:
        row: of the table of algorithms, such as "S7".
        text: the claim in words.
        left, right: names of arms.
        measure: a key of MEASURES.
        direction: left is "lower" or "higher" than right, "equal" to it or "not higher", both within `tolerance`.
        paper: the paper's figure, as text.
        tolerance: for "equal" and "not higher": the largest relative difference.
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
    def read(cls, table: Mapping[str, Any], arms: Sequence[str]) -> Claim:
        """From a [[claim]] table. Raises ConfigError."""
        try:
            claim = cls(**table)
        except TypeError as error:
            raise ConfigError(f"[[claim]] {dict(table)}: {error}") from None
        for name in (claim.left, claim.right):
            if name not in arms:
                raise ConfigError(f"[[claim]] names an arm {name!r}; {did_you_mean(name, arms)}")
        if claim.measure not in MEASURES:
            raise ConfigError(f"[[claim]] measure {claim.measure!r}; {did_you_mean(claim.measure, MEASURES)}")
        if claim.direction not in DIRECTIONS:
            raise ConfigError(f"[[claim]] direction {claim.direction!r}: must be one of {', '.join(DIRECTIONS)}")
        return claim

    def judge(self, by_seed: Sequence[Mapping[str, Records]]) -> Verdict:
        """Compare the arms; each mapping holds the records of all arms for one seed."""
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
        as_said = difference < 0 if self.direction == "lower" else difference > 0
        if abs(difference) <= noise:
            return "within noise"
        return "holds" if as_said else "does not hold: the other way round"


@dataclass(frozen=True)
class Verdict:
    """A claim, both figures, their relative difference, its standard deviation over seeds in the measure's own unit
    (None for one seed), and whether the claim holds, in words."""

    claim: Claim
    left: float
    right: float
    relative: float
    spread: float | None
    words: str
