"""The settings of the command line: one table, from which flags, environment, TOML keys and `config show` are made.

A setting is given by its flag, else by its variable `P2PTRAIN_…`, else in the TOML file of `-c`, else by the preset
that was chosen, else it has the default of its dataclass in `config.py` or `peer_config.py`. Where each value came from
is kept: only what the user gave himself is compared with the settings of a run that is joined. A preset's values are
for a founder.
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
        metavar: what stands for the value in the help.
        help: one sentence.
        field: name of the field, where that is not `name`.
        founder_default: the command line's own default, where the dataclass's is meant for the Python API.
        beside: fields that some of its values need, so that a value can be checked before the others are known.
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
        """Convert a flag's, a variable's or TOML's value, and check its rule. Raises ConfigError naming `origin`."""
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
    Setting("run_id", RunConfig, "NAME", "Name of the run to join or to start."),
    Setting("model", RunConfig, "NAME", "Built-in model, or package.module:factory.", founder_default="gpt-demo"),
    Setting("steps", RunConfig, "N", "Length of the run in inner steps; 0 for no end.", field="total_steps"),
    Setting("lr", RunConfig, "X", "Peak learning rate of the inner AdamW."),
    Setting("warmup_steps", RunConfig, "N", "Steps of linear warm-up of the learning rate."),
    Setting("weight_decay", RunConfig, "X", "Weight decay of matrices in the inner AdamW."),
    Setting("sync_every", RunConfig, "H", "Inner steps between two rounds (DiLoCo)."),
    Setting("fragment_fraction", RunConfig, "P", "Share of the weights pushed at every step (SPARTA); 0 for none."),
    Setting("fragment_selection", RunConfig, "cyclic|fresh", "Walk a shuffled partition, or draw anew at each step."),
    Setting("fragment_codec", RunConfig, "int8|fp16", "How fragments travel."),
    Setting("fragment_schedule", RunConfig, "fixed|ramp|decay", "P over an interval (0 to 2P) or the run (2P to 0)."),
    Setting("fragment_delay", RunConfig, "N", "Steps that a fragment waits before it is sent."),
    Setting("max_staleness", RunConfig, "X", "Fragments with P times delay beyond this are discarded; 0 keeps all."),
    Setting("topology", RunConfig, "push|pairs|groups|all", "Whom fragments are pushed to."),
    Setting("fan_out", RunConfig, "N", "Peers that one fragment is pushed to."),
    Setting("sync_schedule", RunConfig, "fixed|grow|shrink", "H over the run: from a half to one and a half, or back."),
    Setting("averaging", RunConfig, "parts|gather", "How outer gradients become one mean."),
    Setting("round_codec", RunConfig, "none|fp16|int8|int4|topk", "How the outer gradients of a round travel."),
    Setting("round_density", RunConfig, "X", "Share of the values that topk sends."),
    Setting("prune_fraction", RunConfig, "X", "Share of each neuron's outer gradient that is not sent (int8)."),
    Setting("round_weights", RunConfig, "tokens|equal|shard", "What an outer gradient counts by in the mean."),
    Setting("round_mean", RunConfig, "weighted|disjoint", "How outer gradients are merged."),
    Setting(
        "inner_moments",
        RunConfig,
        "local|averaged",
        "Whether rounds average Adam's moments too; needs codec none.",
        beside={"round_codec": "none"},
    ),
    Setting("max_missed_rounds", RunConfig, "N", "A peer left out of more rounds in a row adopts the anchor."),
    Setting("round_timeout_s", RunConfig, "SECONDS", "The longest that an attempt at a round may take."),
    Setting("outer_optimizer", RunConfig, "nesterov|sgdm|sgd|adam", "What takes the outer step."),
    Setting("outer_lr", RunConfig, "X", "Learning rate of the outer step."),
    Setting("outer_lr_schedule", RunConfig, "constant|cosine", "The outer learning rate over the run."),
    Setting("outer_momentum", RunConfig, "X", "Momentum of the outer step; Adam's first beta."),
    Setting(
        "num_shards", RunConfig, "N", "Parts of the text, of which each peer trains on one; 0 for all on all of it."
    ),
    Setting("sharding", RunConfig, "iid|unbalanced|clusters", "What goes into one part: by chance, or what is alike."),
    Setting("run_seed", RunConfig, "N", "Seed of the initial weights, the fragments and the shards."),
)
NETWORK_SETTINGS = (
    Setting(
        "initial_peers", NetworkConfig, "ADDRESS|FILE",
        "Address of a peer of the run, or a file with one a line; may be repeated. Without any, a new run starts.",
    ),
    Setting("host_maddrs", NetworkConfig, "ADDRESS", "Address to listen on; may be repeated."),
    Setting("announce_maddrs", NetworkConfig, "ADDRESS", "Address to tell others (port forwarding); may be repeated."),
    Setting("identity", NetworkConfig, "FILE", "This peer's private key, made when missing. [default: in --out]"),
    Setting("startup_timeout_s", NetworkConfig, "SECONDS", "How long the libp2p daemon may take to start."),
    Setting("peer_timeout_s", NetworkConfig, "SECONDS", "The longest that a silent peer counts as there."),
    Setting("relay_peers", NetworkConfig, "N", "Peers behind NAT that others may reach through this one; 0 for none."),
    Setting("write_addresses", PeerConfig, "FILE", "Write this peer's addresses there, for others' --initial-peers."),
)  # fmt: skip
TRAINING_SETTINGS = (
    Setting(
        "preset", PeerConfig, "NAME", f"A paper's settings for a new run, which yours go over: {', '.join(PRESETS)}."
    ),
    Setting("data", PeerConfig, "stdlib|FILE|DIR", "Text to train on: Python's own library source, or your own."),
    Setting("init_from", PeerConfig, "DIR|FILE", "First weights of a new run: a checkpoint, or a .safetensors file."),
    Setting("batch_size", PeerConfig, "N", "Windows of text per inner step."),
    Setting("device", PeerConfig, "DEVICE", "auto, cpu, cuda, cuda:1, mps …"),
    Setting("threads", PeerConfig, "N", "CPU threads for torch; 0 leaves it to torch."),
    Setting("out", PeerConfig, "DIR", "Identity, metrics and checkpoints. [default: p2ptrain-<run id>]"),
    Setting("metrics", PeerConfig, "FILE", "One JSON line per event. [default: metrics.jsonl in --out]"),
    Setting("prometheus", PeerConfig, "[HOST:]PORT", "Serve figures for Prometheus there; on 127.0.0.1 without HOST."),
    Setting("seed", PeerConfig, "N", "Seed of this peer's own share of the text. [default: from its identity]"),
    Setting("shard", PeerConfig, "N", "Part of the text to train on, from 0. [default: from its identity]"),
    Setting("eval_every", PeerConfig, "N", "Steps between two measurements on the held-out text."),
    Setting("checkpoint_minutes", PeerConfig, "MINUTES", "Time between two checkpoints."),
    Setting(
        "dashboard", PeerConfig, "PORT", "Serve a page that shows the run on this port, to this machine's browsers."
    ),
)
PAGE_SETTINGS = (
    Setting("host", PageConfig, "ADDRESS", "Address to serve the page on; 0.0.0.0 shows it to everybody."),
    Setting("port", PageConfig, "PORT", "Port to serve the page on; 0 for any free one."),
    Setting("page_names", PageConfig, "NAME", "Name of this machine by which browsers ask for the page; repeatable."),
)
SETTINGS = {setting.name: setting for setting in (*RUN_SETTINGS, *NETWORK_SETTINGS, *TRAINING_SETTINGS, *PAGE_SETTINGS)}


@dataclass(frozen=True)
class Settings:
    """The merged settings.

    Attributes:
        values: every setting of the table, by name.
        sources: where each came from: "default", "preset NAME", a flag, a variable, or "FILE: key".
    """

    values: Mapping[str, Value]
    sources: Mapping[str, str]

    def explicit(self, name: str) -> bool:
        """Whether the user gave this setting himself."""
        return self.sources[name] != DEFAULT and not self.from_preset(name)

    def from_preset(self, name: str) -> bool:
        """Whether this setting has its value from the chosen preset."""
        return self.sources[name] == f"{PRESET} {self.values[PRESET]}"

    def explicit_run(self) -> dict[str, Any]:
        """The run's settings that the user gave, by field name of `RunConfig`."""
        given = {s.field_name: self.values[s.name] for s in RUN_SETTINGS if self.explicit(s.name)}
        if self.explicit("data"):
            given["data"] = "stdlib" if self.values["data"] == BUILTIN_DATA else "text"
        return given

    def resolve_run(self, adopted: RunConfig | None) -> RunConfig:
        """The run's settings: those adopted, checked against what the user gave; or those of a new run.

        Raises:
            RunMismatchError: the user gave a setting that differs from the adopted one.
        """
        if adopted is not None:
            return resolve_run(self.explicit_run(), adopted)
        founder = {s.field_name: s.default for s in RUN_SETTINGS if s.founder_default}
        preset = {s.field_name: self.values[s.name] for s in RUN_SETTINGS if self.from_preset(s.name)}
        return resolve_run({**founder, "data": "stdlib", **preset, **self.explicit_run()}, None)

    def network_config(self) -> NetworkConfig:
        """The network half. Files of addresses are read now; raises ConfigError when one cannot be used."""
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
        config_file: path given with `-c`; falls back to the variable P2PTRAIN_CONFIG.

    Raises:
        ConfigError: an unknown key or variable, or a value that breaks its setting's rule.
    """
    variables = {name: text for name, text in environ.items() if name.startswith(ENV_PREFIX) and text}
    known = {setting.variable for setting in SETTINGS.values()} | {CONFIG_VARIABLE}
    for variable in sorted(variables):
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}; {did_you_mean(variable, known)}")
    config_file = config_file or variables.get(CONFIG_VARIABLE)
    keys = _read_toml(Path(config_file)) if config_file else {}

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
    """The hint of a message about an unknown name: the nearest known one, or all of them."""
    # "sync-every" should find "sync_every", and "Lr" "lr".
    near = difflib.get_close_matches(name.replace("-", "_").lower(), [k.lower() for k in known], n=1)
    for candidate in known:
        if near and candidate.lower() == near[0]:
            return f"did you mean {candidate}?"
    return f"known are: {', '.join(sorted(known))}"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}; check the path given with -c") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error
    for key in keys:
        if key not in SETTINGS:
            raise ConfigError(f"{path}: unknown key {key!r}; {did_you_mean(key, SETTINGS)}")
    return keys


def _convert(given: object, kind: type, origin: str) -> Value:
    """Convert to the setting's type, without checking its rule. Text comes from flags and variables."""
    if kind is tuple:
        # Flags are tuples. No multiaddr contains a blank or a comma, so that one variable can hold several.
        if isinstance(given, (str, tuple)):
            text = given if isinstance(given, str) else " ".join(given)
            return tuple(text.replace(",", " ").split()) or ""
        if isinstance(given, list) and all(isinstance(item, str) for item in given):
            return tuple(given)
        raise ConfigError(f'{origin}: {given!r} is not a list of texts, such as ["a", "b"]')
    if kind is str and isinstance(given, str):
        return given
    if kind is float and type(given) is int:
        return float(given)
    if type(given) is kind and kind in (int, float):
        return typing.cast(Value, given)
    if kind in (int, float) and isinstance(given, str):
        try:
            return typing.cast(Value, kind(given))
        except ValueError:
            pass
    wanted = {int: "a whole number, such as 200", float: "a number, such as 0.003", str: "a text in quotes"}[kind]
    raise ConfigError(f"{origin}: {given!r} is not {wanted}")
