"""Finding, running and telling the experiments of `papers/`, which are a part of the package."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.settings.table import did_you_mean
from p2ptrain.simulation.experiment import Experiment, parse_experiments
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.reproduction.claims import Claim, Verdict
from p2ptrain.simulation.variants import simulate_variants

DIRECTORY = Path(__file__).parent / "papers"


@dataclass(frozen=True)
class Reproduction:
    """One experiment of a paper.

    Attributes:
        name: of its file.
        title: in words.
        note: what differs from the paper, and why.
        arms: what is simulated.
        claims: what the paper says of them.
        headline: also run with three seeds by `make reproduce-full`.
    """

    name: str
    title: str
    note: str
    arms: tuple[Experiment, ...]
    claims: tuple[Claim, ...]
    headline: bool


@dataclass(frozen=True)
class Outcome:
    """A reproduction that was run: records by seed and arm, and the verdicts."""

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
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    claims, note, headline = table.pop("claim", []), table.pop("note", ""), table.pop("headline", False)
    title, arms = parse_experiments(table, path)
    try:
        read = tuple(Claim.read(claim, [arm.name for arm in arms]) for claim in claims)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Reproduction(path.stem, title, note, tuple(arms), read, headline)


def run_reproduction(
    reproduction: Reproduction, seeds: Sequence[int], on_progress: Callable[[int, int], None] = lambda arm, step: None
) -> Outcome:
    """Simulate all arms with all seeds, and judge the claims."""
    arms = reproduction.arms
    all_records = simulate_variants([with_seed(arm, seed) for seed in seeds for arm in arms], on_progress)
    by_seed = tuple(
        {arm.name: records for arm, records in zip(arms, all_records[i * len(arms) :], strict=False)}
        for i in range(len(seeds))
    )
    verdicts = tuple(claim.judge(by_seed) for claim in reproduction.claims)
    return Outcome(reproduction, tuple(seeds), by_seed, verdicts)


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The same experiment from another seed."""
    run = dataclasses.replace(experiment.run, run_seed=seed)
    return dataclasses.replace(experiment, seed=seed, run=run)
