"""What is simulated: a run's settings, the peers, their network, and what happens to them. From flags or TOML.

An experiment file is a flat TOML table of settings, and may hold several *arms* that differ in some of them:

    title = "DiLoCo with and without SPARTA"
    peers = 8
    steps = 600
    sync_every = 300

    [[arm]]
    name = "DiLoCo"
    fragment_fraction = 0.0

    [[arm]]
    name = "with SPARTA"
    fragment_fraction = 0.02
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig
from p2ptrain.settings.table import did_you_mean
from p2ptrain.simulation.fault_injection import KINDS, Fault, draw_storm
from p2ptrain.simulation.scheduled_event import ScheduledEvent, check_schedule

# Settings of a run that a simulation has no use for, or chooses itself.
_NOT_OURS = {"run_id", "protocol_version", "model_layout", "total_steps", "run_seed", "data"}
# ALGORITHMS.md, section 4: the demo model and its settings, tuned by simulation.
_RUN_DEFAULTS: dict[str, Any] = {"model": "gpt-demo", "fragment_fraction": 0.02, "sync_every": 100}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One simulated run.

    Attributes:
        run: the settings that a real run would have, hashed and checked as there.
        name: of this arm, for plots; its directory is named after it.
        peers: how many train from the start; those that the schedule lets join come on top.
        step_s: virtual seconds that one inner step takes at speed 1.
        latency_s: one way, of every packet.
        bandwidth_mbit: of every peer's uplink, in Mbit/s; 0 for no limit.
        loss: share of the fragments that do not arrive.
        drop: probability that a peer's outer gradient of a round is lost; it goes on from its own weights.
        speeds: relative speeds of the first peers; the others have 1.
        schedule: what happens when, each of it before the run's last step.
        faults_per_hour: how many faults strike the peers an hour of virtual time; see `storm.draw_storm`.
        faults: their kinds.
        fault_s: how long one lasts on average, in virtual seconds.
        pretrain_steps: steps that the first model is trained alone before the run (DiLoCo, section 3.1), with a warm-up
            and cosine of its own.
        data: "stdlib", or the path of a text file or a directory of them.
        batch_size: windows of text per inner step.
        eval_every: steps between two measurements on held-out text.
        seed: of everything: first weights, data, partners, the order of what happens at one instant.
    """

    run: RunConfig
    name: str = "run"
    peers: int = 8
    # A GPU's step of a mid-sized model; heartbeats come once a second, so they stay cheap beside the steps.
    step_s: float = 0.1
    # Within a continent.
    latency_s: float = 0.02
    bandwidth_mbit: float = 0.0
    loss: float = 0.0
    drop: float = 0.0
    speeds: tuple[float, ...] = ()
    schedule: tuple[ScheduledEvent, ...] = ()
    faults_per_hour: float = 0.0
    faults: tuple[str, ...] = KINDS
    # A machine that is started anew, or a line that comes back (guess).
    fault_s: float = 20.0
    pretrain_steps: int = 0
    data: str = "stdlib"
    batch_size: int = 4
    eval_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _check(
            self.name.isprintable() and self.name not in ("", ".", ".."), "name", self.name,
            "a text in one line that can name a directory",
        )  # fmt: skip
        _check(self.peers >= 1 and self.peers <= 1000, "peers", self.peers, "from 1 to 1000")
        _check(0 < self.step_s < math.inf, "step_s", self.step_s, "above 0")
        _check(0 <= self.latency_s < math.inf, "latency_s", self.latency_s, "0 or more seconds")
        _check(0 <= self.bandwidth_mbit < math.inf, "bandwidth_mbit", self.bandwidth_mbit, "0 (no limit) or more")
        _check(0 <= self.loss < 1, "loss", self.loss, "at least 0 and below 1")
        _check(0 <= self.drop < 1, "drop", self.drop, "at least 0 and below 1")
        _check(len(self.speeds) <= self.peers, "speeds", self.speeds, f"at most one for each of {self.peers} peers")
        _check(all(0 < speed < math.inf for speed in self.speeds), "speeds", self.speeds, "above 0")
        _check(0 <= self.faults_per_hour < math.inf, "faults_per_hour", self.faults_per_hour, "0 or more")
        _check(
            bool(self.faults) and set(self.faults) <= set(KINDS), "faults", list(self.faults),
            f"some of {', '.join(KINDS)}",
        )  # fmt: skip
        _check(0 < self.fault_s < math.inf, "fault_s", self.fault_s, "above 0")
        _check(self.pretrain_steps >= 0, "pretrain_steps", self.pretrain_steps, "0 or more")
        _check(self.batch_size >= 1, "batch_size", self.batch_size, "1 or more")
        _check(self.eval_every >= 1, "eval_every", self.eval_every, "1 or more")
        _check(self.run.total_steps >= 1, "steps", self.run.total_steps, "1 or more: a simulation has an end")
        check_schedule(self.schedule, peers=self.peers, steps=self.run.total_steps)

    @classmethod
    def of(cls, **settings: Any) -> Experiment:
        """From settings by name: fields of this class but `run`, `steps`, and settings of a run. Raises ConfigError."""
        own = {field.name: field for field in dataclasses.fields(cls) if field.name != "run"}
        of_run = {field.name for field in dataclasses.fields(RunConfig)} - _NOT_OURS
        values: dict[str, Any] = {}
        run: dict[str, Any] = {**_RUN_DEFAULTS, "run_id": "simulation", "data": "stdlib"}
        for name, value in settings.items():
            if name == "steps":
                run["total_steps"] = value
            elif name in own:
                values[name] = _converted(name, value, own[name].default)
            elif name in of_run:
                run[name] = value
            else:
                raise ConfigError(f"unknown setting {name!r}; {did_you_mean(name, {'steps', *own, *of_run})}")
        run["run_seed"] = values.get("seed", 0)
        run["data"] = "stdlib" if values.get("data", "stdlib") == "stdlib" else "text"
        return cls(run=RunConfig.from_dict(run), **values)

    @property
    def directory(self) -> str:
        """Name of the directory of this arm's records."""
        return self.name.replace("/", "-")

    @property
    def storm(self) -> tuple[Fault, ...]:
        """The faults that strike, in order. The last interval is calm: everybody is there for the last round."""
        return draw_storm(
            peers=self.peers, kinds=self.faults, faults_per_hour=self.faults_per_hour, fault_s=self.fault_s,
            step_s=self.step_s, steps=self.run.total_steps - self.run.sync_every, seed=self.seed,
        )  # fmt: skip

    @property
    def scheduled_events(self) -> list[ScheduledEvent]:
        """All that is done to peers, by schedule or storm, in order."""
        of_storm = [scheduled_event for fault in self.storm for scheduled_event in fault.scheduled_events]
        return sorted([*self.schedule, *of_storm], key=lambda scheduled_event: scheduled_event.step)

    def starts_late(self, peer: int) -> bool:
        """Whether a peer is not there at the start."""
        first = next((h for h in sorted(self.schedule, key=lambda h: h.step) if h.peer == peer), None)
        return peer >= self.peers or (first is not None and first.action == "join")


def read_experiments(path: Path, **overrides: Any) -> tuple[str, list[Experiment]]:
    """The title and the arms of an experiment file; `overrides` are settings that win over the file's.

    Raises ConfigError.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from None
    return parse_experiments(table, path, **overrides)


def parse_experiments(table: dict[str, Any], path: Path, **overrides: Any) -> tuple[str, list[Experiment]]:
    """As `read_experiments`, from a file that has been read. Raises ConfigError naming `path`."""
    title, arms = table.pop("title", path.stem), table.pop("arm", [{}])
    if not isinstance(title, str) or not isinstance(arms, list) or not all(isinstance(arm, dict) for arm in arms):
        raise ConfigError(f"{path}: title must be a text, and arms are written as [[arm]] tables")
    try:
        found = [Experiment.of(**{**table, **arm, **overrides}) for arm in arms]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [experiment.name for experiment in found]
    if len({experiment.directory for experiment in found}) < len(names):
        raise ConfigError(f"{path}: the arms are named {', '.join(map(repr, names))}: each needs a name of its own")
    return title, found


def _converted(name: str, value: Any, default: Any) -> Any:
    """A field's value from TOML's or Python's types. Raises ConfigError."""
    if name == "schedule" and isinstance(value, (list, tuple)):
        return tuple(_scheduled_event(item) for item in value)
    if name == "speeds" and isinstance(value, (list, tuple)):
        if not all(type(speed) in (int, float) for speed in value):
            raise ConfigError(f"speeds = {value!r}: must be numbers")
        return tuple(map(float, value))
    if name == "faults" and isinstance(value, (list, tuple)) and all(isinstance(kind, str) for kind in value):
        return tuple(value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
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


def _check(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r}: must be {rule}")
