"""A simulated experiment: settings of the run, peers, network and faults, from flags or TOML.

An experiment file has these settings in a flat TOML table, and variants as [[arm]] tables: see examples/simulate.toml.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig, resolve_run
from p2ptrain.settings.setting import POSITIVE, Rule, as_float, check, check_settings, count, number, setting
from p2ptrain.settings.table import did_you_mean, read_toml
from p2ptrain.simulation.schedule import KINDS, RandomFault, ScheduledEvent, check_schedule

# Settings of a run that a simulation takes; it does not use the others, or chooses them itself.
SIMULATED = {field.name for field in dataclasses.fields(RunConfig)} - {
    "run_id", "protocol_version", "model_layout", "total_steps", "run_seed", "data",
}  # fmt: skip
# The demo model, with settings tuned by simulation.
_RUN_DEFAULTS: dict[str, Any] = {"model": "gpt-demo", "fragment_fraction": 0.02, "sync_every": 100}

PROBABILITY = number("at least 0 and below 1", lambda x: 0 <= x < 1)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One simulated run. `run` has its settings; `name` names the variant in plots, and its directory.

    Times are in virtual seconds. Some flags of `p2ptrain simulate` (`name=`) are shorter than their fields.
    """

    # fmt: off
    run: RunConfig
    name: str = "run"
    peers: int = setting(8, number("from 1 to 1000", lambda peers: 1 <= peers <= 1000), metavar="K",
        help="Number of peers at the start; --schedule may let more join.")
    step_s: float = setting(0.1, POSITIVE, name="step_time", metavar="S",
        help="Virtual seconds of one inner step at speed 1.",
        why="A GPU's step of a mid-sized model; heartbeats, once a second, stay cheap compared to the steps.")
    latency_s: float = setting(0.02, number("0 to 10 seconds", lambda x: 0 <= x <= 10), name="latency", metavar="S",
        help="One-way latency of every packet in seconds.",
        why="Typical within a continent.")
    bandwidth_mbit: float = setting(0.0, number("0 (no limit) or more", lambda x: x >= 0), name="bandwidth",
        metavar="MBIT", help="Uplink of each peer in Mbit/s; 0 for no limit.")
    loss: float = setting(0.0, PROBABILITY, metavar="Q",
        help="Probability that a fragment is lost.")
    drop: float = setting(0.0, PROBABILITY, metavar="Q",
        help="Probability that a peer's outer gradient of a round is lost.")
    speeds: tuple[float, ...] = setting((), Rule("above 0", lambda speeds: all(map(POSITIVE.fits, speeds))),
        metavar="F,F,…", help="Relative speeds of the first peers, such as 1,0.5,0.25; the rest have 1.")
    schedule: tuple[ScheduledEvent, ...] = setting((), metavar="EVENT,…",
        help="Scheduled events; see above.")
    faults_per_hour: float = setting(0.0, number("0 or more", lambda x: x >= 0),
        help="Random faults per virtual hour.")
    faults: tuple[str, ...] = setting(KINDS, metavar="KIND,…", default_text="all",
        help="Kinds of random faults; see above.")
    fault_s: float = setting(20.0, POSITIVE, name="fault_time", metavar="S",
        help="Mean duration of a fault in virtual seconds.",
        why="A machine that restarts, or a connection that recovers (guess).")
    pretrain_steps: int = setting(0, count(0),
        help="Steps to train the initial model alone, with their own warm-up and cosine (DiLoCo, section 3.1).")
    data: str = setting("stdlib", metavar="SOURCE",
        help="Text: stdlib, a file or a directory.")
    batch_size: int = setting(4, count(1),
        help="Text windows per inner step.")
    eval_every: int = setting(100, count(1),
        help="Steps between two evaluations on held-out text.")
    seed: int = setting(0,
        help="Seed of weights, data, partners, and the order of simultaneous events.")
    # fmt: on

    def __post_init__(self) -> None:
        usable = self.name.isprintable() and self.name not in ("", ".", "..")
        check(usable, "name", self.name, "a text in one line that can name a directory")
        check_settings(self)
        known = bool(self.faults) and set(self.faults) <= set(KINDS)
        check(known, "faults", list(self.faults), f"some of {', '.join(KINDS)}")
        check(len(self.speeds) <= self.peers, "speeds", self.speeds, f"at most one for each of {self.peers} peers")
        check(self.run.total_steps >= 1, "steps", self.run.total_steps, "1 or more: a simulation has an end")
        check_schedule(self.schedule, peers=self.peers, steps=self.run.total_steps)

    @classmethod
    def of(cls, **settings: Any) -> Experiment:
        """Make an experiment from `steps`, fields of this class except `run`, and fields of RunConfig.

        Raises ConfigError for an unknown name or a bad value.
        """
        own = {field.name: field for field in dataclasses.fields(cls) if field.name != "run"}
        values: dict[str, Any] = {}
        run: dict[str, Any] = {**_RUN_DEFAULTS, "run_id": "simulation", "data": "stdlib"}
        for name, value in settings.items():
            if name == "steps":
                run["total_steps"] = value
            elif name in own:
                values[name] = _converted(name, value, own[name].default)
            elif name in SIMULATED:
                run[name] = value
            else:
                raise ConfigError(f"unknown setting {name!r}; {did_you_mean(name, {'steps', *own, *SIMULATED})}")
        run["run_seed"] = values.get("seed", 0)
        run["data"] = "stdlib" if values.get("data", "stdlib") == "stdlib" else "text"
        return cls(run=resolve_run(run, None), **values)

    @property
    def directory(self) -> str:
        """Name of the directory of this variant's records."""
        return self.name.replace("/", "-")

    @property
    def faults_drawn(self) -> tuple[RandomFault, ...]:
        """The random faults, drawn from the seed and ordered by their start; times between them are exponential.

        All kinds are equally likely. "crash": the peer vanishes, and later starts anew without its state. "pause":
        training and network stop and resume. "partition": up to half of the peers can reach only each other. "slow": a
        link of 2 Mbit/s both ways. A peer has one fault at a time, and at most half of the peers have one at once: a
        larger fault is left out, or affects fewer peers. The last interval has none, so that all peers take part in the
        last round.
        """
        rng = random.Random(f"storm/{self.seed}")
        last = self.run.total_steps - self.run.sync_every
        faults: list[RandomFault] = []
        free_from = [0] * self.peers
        time_s = 0.0
        while self.faults_per_hour > 0:
            time_s += rng.expovariate(self.faults_per_hour / 3600)
            kind, ends_s = rng.choice(self.faults), time_s + self.fault_s * rng.uniform(0.5, 1.5)
            begins, ends = round(time_s / self.step_s), round(ends_s / self.step_s) + 1
            if begins >= last:
                break
            free = [peer for peer in range(self.peers) if free_from[peer] <= begins]
            wanted = rng.randint(1, max(1, self.peers // 2)) if kind == "partition" else 1
            struck = min(wanted, len(free) - (self.peers + 1) // 2)
            if struck < 1 or ends >= last:
                continue
            peers = tuple(rng.sample(free, struck))
            for peer in peers:
                free_from[peer] = ends + 1
            faults.append(RandomFault(len(faults) + 1, kind, peers, begins, ends))
        return tuple(faults)

    @property
    def scheduled_events(self) -> list[ScheduledEvent]:
        """The schedule and the events of random faults, in order."""
        of_faults = [event for fault in self.faults_drawn for event in fault.scheduled_events]
        return sorted([*self.schedule, *of_faults], key=lambda event: event.step)

    def starts_late(self, peer: int) -> bool:
        """Whether a peer is absent at the start."""
        first = min((e for e in self.schedule if e.peer == peer), key=lambda e: e.step, default=None)
        return peer >= self.peers or (first is not None and first.action == "join")


def read_experiments(path: Path, **overrides: Any) -> tuple[str, list[Experiment]]:
    """The title and the variants of an experiment file; `overrides` replace its settings. Raises ConfigError."""
    return parse_experiments(read_toml(path), path, **overrides)


def parse_experiments(table: dict[str, Any], path: Path, **overrides: Any) -> tuple[str, list[Experiment]]:
    """Like `read_experiments`, for a file that is already parsed. Raises ConfigError, which names `path`."""
    title, variants = table.pop("title", path.stem), table.pop("arm", [{}])
    if not isinstance(title, str) or not isinstance(variants, list) or not all(isinstance(v, dict) for v in variants):
        raise ConfigError(f"{path}: title must be a text, and variants are written as [[arm]] tables")
    try:
        found = [Experiment.of(**{**table, **variant, **overrides}) for variant in variants]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [experiment.name for experiment in found]
    if len({experiment.directory for experiment in found}) < len(names):
        named = ", ".join(map(repr, names))
        raise ConfigError(f"{path}: variants ([[arm]] tables) named {named}; each needs a different name")
    return title, found


def _converted(name: str, value: Any, default: Any) -> Any:
    """Convert a value of TOML or Python to the type of a field. Raises ConfigError."""
    if name == "schedule" and isinstance(value, (list, tuple)):
        return tuple(_scheduled_event(item) for item in value)
    if name == "speeds" and isinstance(value, (list, tuple)):
        if not all(type(speed) in (int, float) for speed in value):
            raise ConfigError(f"speeds = {value!r}: must be numbers")
        return tuple(map(as_float, value))
    if name == "faults" and isinstance(value, (list, tuple)) and all(isinstance(kind, str) for kind in value):
        return tuple(value)
    if isinstance(default, float) and type(value) is int:
        return as_float(value)
    if type(value) is not type(default):
        raise ConfigError(f"{name} = {value!r}: must be of type {type(default).__name__}")
    return value


def _scheduled_event(item: object) -> ScheduledEvent:
    if isinstance(item, ScheduledEvent):
        return item
    if isinstance(item, str):
        return ScheduledEvent.parse(item)
    if isinstance(item, Mapping) and set(item) <= {"step", "action", "peer", "value"} and len(item) >= 3:
        try:
            return ScheduledEvent(**item)
        except TypeError as error:
            raise ConfigError(f"schedule {dict(item)}: {error}") from None
    raise ConfigError(f"schedule {item!r}: must be a text such as 300:crash:2")
