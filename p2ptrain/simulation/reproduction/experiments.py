"""The papers' experiments in `papers/`: what each claims about its variants, what happened here, and our verdict.

Losses are compared as perplexities, as in the papers: a difference of d nats is a change of exp(d) - 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import did_you_mean, read_toml
from p2ptrain.simulation.experiment import Experiment, parse_experiments
from p2ptrain.simulation.records import Records, as_text, format_table
from p2ptrain.simulation.variants import simulate_variants

DIRECTORY = Path(__file__).parent / "papers"
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
        if self.direction in ("equal", "not higher"):
            apart = abs(relative) if self.direction == "equal" else relative
            return "holds" if apart <= self.tolerance else "does not hold"
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


@dataclass(frozen=True)
class Reproduction:
    """One experiment of a paper.

    Attributes:
        name: name of its file.
        title: title of the plot.
        note: differences from the paper, and reasons.
        variants: experiments to compare.
        claims: the paper's claims about them.
        headline: also run with three seeds by `make reproduce-full`.
    """

    name: str
    title: str
    note: str
    variants: tuple[Experiment, ...]
    claims: tuple[Claim, ...]
    headline: bool


@dataclass(frozen=True)
class Outcome:
    """A finished reproduction: records by seed and variant, and the verdicts."""

    reproduction: Reproduction
    seeds: tuple[int, ...]
    records: tuple[dict[str, Records], ...]
    verdicts: tuple[Verdict, ...]


def known_reproductions() -> list[str]:
    """Names of all experiments, sorted."""
    return sorted((path.stem for path in DIRECTORY.glob("*.toml")), key=lambda name: (name[0] != "s", len(name), name))


def read_reproduction(name: str) -> Reproduction:
    """One experiment by its name, or by the path of its file. Raises ConfigError."""
    path = Path(name) if name.endswith(".toml") else DIRECTORY / f"{name.lower()}.toml"
    if not path.exists():
        raise ConfigError(f"no experiment {name!r}; {did_you_mean(name, known_reproductions())}")
    table = read_toml(path)
    claims, note, headline = table.pop("claim", []), table.pop("note", ""), table.pop("headline", False)
    title, variants = parse_experiments(table, path)
    try:
        read = tuple(Claim.read(claim, [variant.name for variant in variants]) for claim in claims)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Reproduction(path.stem, title, note, tuple(variants), read, headline)


def run_reproduction(
    reproduction: Reproduction,
    seeds: Sequence[int],
    on_progress: Callable[[int, int], None] = lambda number, step: None,
) -> Outcome:
    """Simulate all variants with all seeds, and judge the claims."""
    of_seeds = [
        dataclasses.replace(variant, seed=seed, run=dataclasses.replace(variant.run, run_seed=seed))
        for seed in seeds
        for variant in reproduction.variants
    ]
    all_records = iter(simulate_variants(of_seeds, on_progress))
    by_seed = tuple({variant.name: next(all_records) for variant in reproduction.variants} for _ in seeds)
    verdicts = tuple(claim.judge(by_seed) for claim in reproduction.claims)
    return Outcome(reproduction, tuple(seeds), by_seed, verdicts)


def format_outcome(outcome: Outcome) -> str:
    """The variants, then each claim with the paper's figure, ours and the verdict."""
    reproduction = outcome.reproduction
    variants = format_table(list(outcome.records[0].values()))
    note = f"\n{reproduction.note}" if reproduction.note else ""
    return f"{reproduction.title}{note}\n\n{variants}\n\n{as_text(claim_rows(outcome), numbers=False, width=120)}"


def claim_rows(outcome: Outcome) -> list[dict[str, str]]:
    """A row for each claim, by the titles of its columns."""
    return [
        {
            "row": verdict.claim.row,
            "the paper says": verdict.claim.text,
            "paper": verdict.claim.paper,
            "here": _figure(verdict),
            "verdict": verdict.words,
        }
        for verdict in outcome.verdicts
    ]


def _figure(verdict: Verdict) -> str:
    """Our figure, in the paper's form."""
    _, is_loss = MEASURES[verdict.claim.measure]
    spread = "" if verdict.spread is None else f" (± {verdict.spread:.2g} over seeds)"
    values = f"{verdict.left:.4g} against {verdict.right:.4g}"
    if math.isnan(verdict.relative):
        return values + spread
    return f"{'perplexity ' if is_loss else ''}{100 * verdict.relative:+.2f} % ({values}){spread}"


def write_outcome(outcome: Outcome, directory: Path) -> None:
    """Write the records of the first seed, the verdicts as JSON, and the plot."""
    from p2ptrain.simulation.plot import save_plot  # matplotlib is an extra: the list of experiments needs none

    target = directory / outcome.reproduction.name
    for records in outcome.records[0].values():
        records.write(target / records.experiment.directory)
    verdicts = []
    for verdict in outcome.verdicts:
        figures = dataclasses.asdict(verdict)
        claim = figures.pop("claim")
        verdicts.append({**{name: claim[name] for name in ("row", "text", "paper", "measure")}, **figures})
    content = {"title": outcome.reproduction.title, "seeds": outcome.seeds, "claims": verdicts}
    (target / "verdicts.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_plot(outcome.reproduction.title, list(outcome.records[0].values()), target / "curves.png")


def as_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of these rows, with their keys as titles."""
    lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
