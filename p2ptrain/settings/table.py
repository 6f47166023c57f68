"""The settings of the command line: one table that defines flags, environment variables, TOML keys and `config show`.

A value comes from its flag, else from its variable `P2PTRAIN_…`, else from the TOML file given with `-c`, else from the
chosen preset, else from the default of its dataclass in `config.py` or `peer_config.py`. The source of each value is
kept: only values that the user gave are compared with the settings of a run that is joined. A preset applies only to a
run that starts here.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.settings.config import RunConfig, resolve_run
from p2ptrain.settings.initial_peers import read_initial_peers
from p2ptrain.settings.peer_config import NetworkConfig, PageConfig, PeerConfig
from p2ptrain.settings.presets import PRESETS

ENV_PREFIX = "P2PTRAIN_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
DEFAULT = "default"
PRESET = "preset"
BUILTIN_DATA = "stdlib"

Value = str | int | float | tuple[str, ...] | None
Owner = type[RunConfig] | type[NetworkConfig] | type[PeerConfig] | type[PageConfig]


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: its TOML key; flag and variable follow from it.
        owner: the dataclass that it is a field of, which gives type, default and rule.
        metavar: placeholder of the value in the help.
        help: one line for `--help`; starts with a noun or a verb.
        field: name of the dataclass field, if it differs from `name`.
        founder_default: default of the command line, if it differs from the dataclass's (used by the Python API).
        beside: other fields that some values need, so that one value can be checked alone.
    """

    name: str
    owner: Owner
    metavar: str
    help: str
    field: str = ""
    founder_default: str = ""
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def field_name(self) -> str:
        return self.field or self.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def default(self) -> Value:
        default: Value = getattr(self.owner, self.field_name)  # a dataclass keeps its defaults as class attributes
        return self.founder_default or default

    @property
    def kind(self) -> type:
        """`str`, `int`, `float`, or `tuple` for a list of texts."""
        hint = typing.get_type_hints(self.owner)[self.field_name]
        if isinstance(hint, types.UnionType):
            (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        kind: type = typing.get_origin(hint) or hint
        return kind

    def parse(self, given: object, origin: str) -> Value:
        """Convert the value of a flag, variable or TOML key, and check its rule. Raises ConfigError naming `origin`."""
        value = _convert(given, self.kind, origin)
        if value == "":
            raise ConfigError(f"{origin}: is empty; give a value, or leave it out")
        fields: dict[str, Any] = {**self.beside, self.field_name: value}
        try:
            self.owner(**fields)
        except ConfigError as error:
            rule = str(error).removeprefix(f"{self.field_name} = {value!r}: ")
            raise ConfigError(f"{origin}: {value!r} {rule}") from error
        return value


RUN_SETTINGS = (
    Setting("run_id", RunConfig, "NAME", "Name of the run."),
    Setting("model", RunConfig, "NAME", "Built-in model, or package.module:factory.", founder_default="gpt-demo"),
    Setting("steps", RunConfig, "N", "Length of the run in inner steps; 0 for no end.", field="total_steps"),
    Setting("lr", RunConfig, "X", "Peak learning rate of the inner AdamW."),
    Setting("warmup_steps", RunConfig, "N", "Steps of linear learning rate warm-up."),
    Setting("weight_decay", RunConfig, "X", "Weight decay of matrices in the inner AdamW."),
    Setting("sync_every", RunConfig, "H", "Inner steps between two rounds (H in DiLoCo)."),
    Setting("fragment_fraction", RunConfig, "P", "Share of the weights sent at each step; 0 for none."),
    Setting("fragment_selection", RunConfig, "cyclic|fresh", "Walk a shuffled partition, or draw at random each step."),
    Setting("fragment_codec", RunConfig, "int8|fp16", "Encoding of fragments."),
    Setting(
        "fragment_schedule", RunConfig, "fixed|ramp|decay", "Keep P, ramp it per interval, or decay it in the run."
    ),
    Setting("fragment_delay", RunConfig, "N", "Steps to hold a fragment before sending it."),
    Setting("max_staleness", RunConfig, "X", "Discard fragments with P · delay above this; 0 keeps all."),
    Setting("topology", RunConfig, "push|pairs|groups|all", "Selection of the peers that get a fragment."),
    Setting("fan_out", RunConfig, "N", "Number of peers that get each fragment."),
    Setting("sync_schedule", RunConfig, "fixed|grow|shrink", "Keep H, or change it between H/2 and 3H/2 over the run."),
    Setting("averaging", RunConfig, "parts|gather", "Average in parts, or send all values to all peers."),
    Setting("round_codec", RunConfig, "none|fp16|int8|int4|topk", "Encoding of outer gradients."),
    Setting("round_density", RunConfig, "X", "Share of the values that codec topk sends."),
    Setting("prune_fraction", RunConfig, "X", "Share of each neuron's values to leave out (int8)."),
    Setting("round_weights", RunConfig, "tokens|equal|shard", "Weights of the outer gradients in the mean."),
    Setting("round_mean", RunConfig, "weighted|disjoint", "Weighted mean, or DiLoCo's disjoint merge."),
    Setting(
        "inner_moments",
        RunConfig,
        "local|averaged",
        "Keep Adam's moments, or average them (codec none).",
        beside={"round_codec": "none"},
    ),
    Setting("max_missed_rounds", RunConfig, "N", "Rounds in a row to miss before adopting the anchor."),
    Setting("round_timeout_s", RunConfig, "SECONDS", "Time limit for one attempt at a round."),
    Setting("outer_optimizer", RunConfig, "nesterov|sgdm|sgd|adam", "Outer optimizer."),
    Setting("outer_lr", RunConfig, "X", "Learning rate of the outer optimizer."),
    Setting("outer_lr_schedule", RunConfig, "constant|cosine", "Schedule of the outer learning rate."),
    Setting("outer_momentum", RunConfig, "X", "Momentum of the outer optimizer; Adam's first beta."),
    Setting("num_shards", RunConfig, "N", "Text shards, one per peer; 0: each peer reads all text."),
    Setting("sharding", RunConfig, "iid|unbalanced|clusters", "Split of the text: random, unequal, or by similarity."),
    Setting("run_seed", RunConfig, "N", "Seed of the initial weights, the fragments and the shards."),
)
NETWORK_SETTINGS = (
    Setting(
        "initial_peers", NetworkConfig, "ADDRESS|FILE",
        "Address of a peer of the run, or a file of addresses; repeatable.",
    ),
    Setting("host_maddrs", NetworkConfig, "ADDRESS", "Address to listen on; repeatable."),
    Setting("announce_maddrs", NetworkConfig, "ADDRESS", "Address to announce (port forwarding); repeatable."),
    Setting("identity", NetworkConfig, "FILE", "Private key file, created if missing. [default: in --out]"),
    Setting("startup_timeout_s", NetworkConfig, "SECONDS", "Time limit for the libp2p daemon to start."),
    Setting("peer_timeout_s", NetworkConfig, "SECONDS", "Seconds without a message before a peer is considered lost."),
    Setting("relay_peers", NetworkConfig, "N", "Peers behind NAT to relay traffic for; 0 for none."),
    Setting("write_addresses", PeerConfig, "FILE", "File to write this peer's addresses to, for --initial-peers."),
)  # fmt: skip
TRAINING_SETTINGS = (
    Setting("preset", PeerConfig, "NAME", f"A paper's settings as defaults of a new run: {', '.join(PRESETS)}."),
    Setting("data", PeerConfig, "stdlib|FILE|DIR", "Training text: Python's library source, or yours."),
    Setting("init_from", PeerConfig, "DIR|FILE", "Initial weights of a new run: checkpoint or .safetensors file."),
    Setting("batch_size", PeerConfig, "N", "Text windows per inner step."),
    Setting("device", PeerConfig, "DEVICE", "Device to train on: auto, cpu, cuda, cuda:1, mps."),
    Setting("threads", PeerConfig, "N", "CPU threads for torch; 0 for torch's own default."),
    Setting("out", PeerConfig, "DIR", "Directory for key, metrics, checkpoints. [default: p2ptrain-<run id>]"),
    Setting("metrics", PeerConfig, "FILE", "File of events, as JSON lines. [default: metrics.jsonl in --out]"),
    Setting("prometheus", PeerConfig, "[HOST:]PORT", "Serve Prometheus metrics there; HOST defaults to 127.0.0.1."),
    Setting("seed", PeerConfig, "N", "Seed of this peer's text sampling. [default: from its identity]"),
    Setting("shard", PeerConfig, "N", "Text shard to train on, from 0. [default: from its identity]"),
    Setting("eval_every", PeerConfig, "N", "Steps between two evaluations on held-out text."),
    Setting("checkpoint_minutes", PeerConfig, "MINUTES", "Minutes between two checkpoints."),
    Setting("dashboard", PeerConfig, "PORT", "Serve the run's dashboard on this port, for this machine's browsers."),
)
PAGE_SETTINGS = (
    Setting("host", PageConfig, "ADDRESS", "Address to serve the page on; 0.0.0.0 for all networks."),
    Setting("port", PageConfig, "PORT", "Port to serve the page on; 0 for any free one."),
    Setting("page_names", PageConfig, "NAME", "Host name to accept in browsers' requests; repeatable."),
)
SETTINGS = {setting.name: setting for setting in (*RUN_SETTINGS, *NETWORK_SETTINGS, *TRAINING_SETTINGS, *PAGE_SETTINGS)}


@dataclass(frozen=True)
class Settings:
    """The merged settings.

    Attributes:
        values: every setting of the table, by name.
        sources: source of each value: "default", "preset NAME", a flag, a variable, or "FILE: key".
    """

    values: Mapping[str, Value]
    sources: Mapping[str, str]

    def explicit(self, name: str) -> bool:
        """Whether the user gave this setting."""
        return self.sources[name] != DEFAULT and not self.from_preset(name)

    def from_preset(self, name: str) -> bool:
        """Whether the value of this setting comes from the chosen preset."""
        return self.sources[name] == f"{PRESET} {self.values[PRESET]}"

    def explicit_run(self) -> dict[str, Any]:
        """The run's settings that the user gave, by field name of `RunConfig`."""
        given = {s.field_name: self.values[s.name] for s in RUN_SETTINGS if self.explicit(s.name)}
        if self.explicit("data"):
            given["data"] = "stdlib" if self.values["data"] == BUILTIN_DATA else "text"
        return given

    def resolve_run(self, adopted: RunConfig | None) -> RunConfig:
        """The run's settings: the adopted ones, checked against the user's; or those of a new run.

        Raises:
            RunMismatchError: the user gave a setting that differs from the adopted one.
        """
        if adopted is not None:
            return resolve_run(self.explicit_run(), adopted)
        founder = {s.field_name: s.default for s in RUN_SETTINGS if s.founder_default}
        preset = {s.field_name: self.values[s.name] for s in RUN_SETTINGS if self.from_preset(s.name)}
        return resolve_run({**founder, "data": "stdlib", **preset, **self.explicit_run()}, None)

    def network_config(self) -> NetworkConfig:
        """The network settings. Reads address files; raises ConfigError when one cannot be used."""
        values = self._fields_of(NetworkConfig)
        return NetworkConfig(**{**values, "initial_peers": read_initial_peers(values["initial_peers"])})

    def peer_config(self) -> PeerConfig:
        return PeerConfig(network=self.network_config(), **self._fields_of(PeerConfig))

    def page_config(self) -> PageConfig:
        return PageConfig(**self._fields_of(PageConfig))

    def _fields_of(self, owner: Owner) -> dict[str, Any]:
        return {s.field_name: self.values[s.name] for s in SETTINGS.values() if s.owner is owner}


def merge(flags: Mapping[str, object], environ: Mapping[str, str], config_file: str | None = None) -> Settings:
    """Merge the sources: flag, then environment, then TOML file, then preset, then default.

    Args:
        flags: by setting name; None or an empty sequence where a flag was not given.
        environ: the process's environment. An empty variable counts as not given.
        config_file: path given with `-c`; None uses the variable P2PTRAIN_CONFIG.

    Raises:
        ConfigError: an unknown key or variable, or an invalid value.
    """
    variables = {name: text for name, text in environ.items() if name.startswith(ENV_PREFIX) and text}
    known = {setting.variable for setting in SETTINGS.values()} | {CONFIG_VARIABLE}
    for variable in sorted(variables):
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}; {did_you_mean(variable, known)}")
    config_file = config_file or variables.get(CONFIG_VARIABLE)
    keys = _read_keys(Path(config_file)) if config_file else {}

    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        given: object
        if flags.get(name) not in (None, ()):
            given, source = flags[name], setting.flag
        elif setting.variable in variables:
            given, source = variables[setting.variable], setting.variable
        elif name in keys:
            given, source = keys[name], f"{config_file}: {name}"
        else:
            values[name], sources[name] = setting.default, DEFAULT
            continue
        values[name], sources[name] = setting.parse(given, source), source
    if (preset := values[PRESET]) is not None:
        for name, value in PRESETS[str(preset)].items():
            if sources[name] == DEFAULT:
                values[name], sources[name] = value, f"{PRESET} {preset}"
    return Settings(values, sources)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Hint for an unknown name: the closest known name, or all of them."""
    # "sync-every" should find "sync_every", and "Lr" should find "lr".
    near = difflib.get_close_matches(name.replace("-", "_").lower(), [k.lower() for k in known], n=1)
    for candidate in known:
        if near and candidate.lower() == near[0]:
            return f"did you mean {candidate}?"
    return f"known are: {', '.join(sorted(known))}"


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def _read_keys(path: Path) -> dict[str, Any]:
    keys = read_toml(path)
    for key in keys:
        if key not in SETTINGS:
            raise ConfigError(f"{path}: unknown key {key!r}; {did_you_mean(key, SETTINGS)}")
    return keys


def _convert(given: object, kind: type, origin: str) -> Value:
    """Convert to the setting's type, without checking its rule. Flags and variables give text."""
    if kind is tuple:
        # Flags are tuples. No multiaddr contains a space or a comma, so one variable can hold several.
        if isinstance(given, (str, tuple)):
            text = given if isinstance(given, str) else " ".join(given)
            return tuple(text.replace(",", " ").split()) or ""
        if isinstance(given, list) and all(isinstance(item, str) for item in given):
            return tuple(given)
        raise ConfigError(f'{origin}: {given!r} is not a list of texts, such as ["a", "b"]')
    if kind is float and type(given) is int:
        return float(given)
    if type(given) is kind:
        return typing.cast(Value, given)
    if kind in (int, float) and isinstance(given, str):
        try:
            return typing.cast(Value, kind(given))
        except ValueError:
            pass
    wanted = {int: "a whole number, such as 200", float: "a number, such as 0.003", str: "a text in quotes"}[kind]
    raise ConfigError(f"{origin}: {given!r} is not {wanted}")
