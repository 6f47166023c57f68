"""Finds and runs the experiments in `papers/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import did_you_mean, read_toml
from p2ptrain.simulation.experiment import Experiment, parse_experiments
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.reproduction.claims import Claim, Verdict
from p2ptrain.simulation.variants import simulate_variants

DIRECTORY = Path(__file__).parent / "papers"


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
    variants = reproduction.variants
    all_records = simulate_variants([with_seed(variant, seed) for seed in seeds for variant in variants], on_progress)
    by_seed = tuple(
        {variant.name: records for variant, records in zip(variants, all_records[i * len(variants) :], strict=False)}
        for i in range(len(seeds))
    )
    verdicts = tuple(claim.judge(by_seed) for claim in reproduction.claims)
    return Outcome(reproduction, tuple(seeds), by_seed, verdicts)


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The same experiment from another seed."""
    run = dataclasses.replace(experiment.run, run_seed=seed)
    return dataclasses.replace(experiment, seed=seed, run=run)
