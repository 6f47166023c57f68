"""All settings of the command line, and their values, merged from flags, environment, TOML file and preset.

The source of each value is kept: only values that the user gave are compared with the settings of a run that is
joined. A preset applies only to a run that starts here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from p2ptrain.errors import ConfigError, RunMismatchError
from p2ptrain.settings.config import RunConfig, resolve_run
from p2ptrain.settings.files import read_text, user_path
from p2ptrain.settings.initial_peers import expand_ticket, read_initial_peers
from p2ptrain.settings.model_defaults import OF_RUN, model_defaults
from p2ptrain.settings.peer_config import NetworkConfig, PageConfig, PeerConfig
from p2ptrain.settings.presets import PRESETS, closed_defaults, implied_defaults, muon_defaults
from p2ptrain.settings.run_key import check_key_file, read_key, warn_if_shared
from p2ptrain.settings.setting import ENV_PREFIX, Setting, Value, settings_of, shortened
from p2ptrain.settings.ticket import Ticket, ticket_text

# What Kubernetes adds for a service whose name begins with "p2ptrain".
_OF_SERVICES = re.compile(
    r"\w+_(SERVICE_(HOST|PORT)(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=|PORT=(tcp|udp|sctp)://)", re.ASCII
)

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
DEFAULT = "default"
PRESET = "preset"
MODEL = "model"
BUILTIN_DATA = "stdlib"

RUN_SETTINGS = tuple(settings_of(RunConfig))
NETWORK_SETTINGS = tuple(settings_of(NetworkConfig))
TRAINING_SETTINGS = tuple(settings_of(PeerConfig))
PAGE_SETTINGS = tuple(settings_of(PageConfig))
# By their titles in the help and on the reference page.
SECTIONS = {
    "The run": RUN_SETTINGS,
    "The network": NETWORK_SETTINGS,
    "This machine": TRAINING_SETTINGS,
    "The page": PAGE_SETTINGS,
}
SETTINGS = {setting.name: setting for settings in SECTIONS.values() for setting in settings}


@dataclass(frozen=True)
class Settings:
    """The merged settings.

    Attributes:
        values: every setting of the table, by name.
        sources: source of each value: a flag, a variable, or "FILE: key" if the user gave it; else "default", "preset
            NAME", "model NAME", or the setting that changes the default, such as "averaging pairwise". Machine settings
            that follow from the model of the run, which may be another, are None here, with source "default".
        given: names of the settings that the user gave.
        ticket: the ticket that the user gave, if any; its run id and addresses are among the values.
        from_files: settings of the run that follow from files that the user gave, by field name of `RunConfig`.
    """

    values: Mapping[str, Value]
    sources: Mapping[str, str]
    given: Set[str]
    ticket: Ticket | None = None
    from_files: Mapping[str, Any] = field(default_factory=dict)

    def explicit(self, name: str) -> bool:
        """Whether the user gave this setting."""
        return name in self.given

    @property
    def with_model(self) -> str:
        """Source of defaults that follow from the model."""
        return f"{MODEL} {self.values[MODEL]}"

    def from_preset(self, name: str) -> bool:
        """Whether the value of this setting comes from the chosen preset."""
        return self.sources[name] == f"{PRESET} {self.values[PRESET]}"

    def explicit_run(self) -> dict[str, Any]:
        """The run's settings that the user gave, by field name of `RunConfig`."""
        given = {s.field_name: self.values[s.name] for s in RUN_SETTINGS if self.explicit(s.name)}
        if self.explicit("data"):
            given["data"] = BUILTIN_DATA if self.values["data"] == BUILTIN_DATA else "text"
        return {**given, **self.from_files}

    def with_ticket(self, ticket: Ticket, source: str) -> Settings:
        """These settings, as if the user had given the ticket. Raises ConfigError if they contradict it."""
        word = ticket_text(ticket)
        assert word is not None, "it has no address"
        values, sources = {**self.values, "initial_peers": (word,)}, {**self.sources, "initial_peers": source}
        given = {*self.given, "initial_peers"}
        used = _use_ticket(values, sources, given)
        return dataclasses.replace(self, values=values, sources=sources, given=given, ticket=used)

    def with_tokenizer(self, identity: str, vocab_size: int) -> Settings:
        """These settings, with the run's tokenizer, which follows from the user's files and flags."""
        return dataclasses.replace(self, from_files={"tokenizer": identity, "vocab_size": vocab_size})

    def resolve_run(self, adopted: RunConfig | None) -> RunConfig:
        """The run's settings: the adopted ones, checked against the user's; or those of a new run.

        Raises:
            RunMismatchError: the user gave a setting that differs from the adopted one.
        """
        if adopted is not None:
            self._check_data(adopted)
            origins = {s.field_name: self.sources[s.name] for s in SETTINGS.values()}
            if not self.explicit("tokenizer"):
                origins["tokenizer"] = f"{self.sources['data']} (its tokenizer)"
            origins["vocab_size"] = origins["tokenizer"]
            return resolve_run(self.explicit_run(), adopted, origins)
        defaults = {"model": SETTINGS["model"].default, "data": BUILTIN_DATA}
        chosen = {s.field_name: self.values[s.name] for s in RUN_SETTINGS if self.sources[s.name] != DEFAULT}
        try:
            return resolve_run({**defaults, **chosen, **self.explicit_run()}, None)
        except ConfigError as error:
            raise ConfigError(self._as_given(str(error))) from None

    def _check_data(self, run: RunConfig) -> None:
        """Raise RunMismatchError if a run trains on Python's own source and the user gave text, or the reverse."""
        theirs = {
            BUILTIN_DATA: "Python's own source; leave it out, or start a run with your own text under another --run-id",
            "text": "text that every peer brings; give your own text",
        }
        if self.explicit("data") and run.data in theirs and self.explicit_run()["data"] != run.data:
            given = f"{self.sources['data']} {self.values['data']}"
            raise RunMismatchError(f"{given}: run {run.run_id!r} trains on {theirs[run.data]}")

    def _as_given(self, text: str) -> str:
        """A message with field names replaced by the flag, variable or key that the user gave, or could give."""
        names = {s.field_name: self.sources[s.name] if self.explicit(s.name) else s.flag for s in RUN_SETTINGS}
        text = re.sub(rf"\b({'|'.join(names)}) = ", lambda found: f"{names[found[1]]} = ", text)
        return re.sub(r"(--\S+) = ", r"\1 ", text)

    def preset_differences(self, run: RunConfig) -> list[str]:
        """The settings in which this run differs from the chosen preset, as "NAME = the run's value"."""
        theirs = {s.name: getattr(run, s.field_name) for s in RUN_SETTINGS if self.from_preset(s.name)}
        return [f"{name} = {value!r}" for name, value in theirs.items() if value != self.values[name]]

    def network_config(self) -> NetworkConfig:
        """The network settings. Reads address files and the run key; raises ConfigError if one cannot be used."""
        values = self._fields(NETWORK_SETTINGS)
        values["initial_peers"] = read_initial_peers(values["initial_peers"])
        key = None if values["run_key"] is None else read_key(user_path(values["run_key"]))
        if self.ticket is not None and self.ticket.key is not None:
            if key not in (None, self.ticket.key):
                raise ConfigError(
                    f"--run-key {values['run_key']}: is not the key in the ticket; leave --run-key out, or ask for a "
                    "ticket of the same run"
                )
            key = self.ticket.key
        return NetworkConfig(**values, key=key)

    def peer_config(self) -> PeerConfig:
        return PeerConfig(network=self.network_config(), **self._fields(TRAINING_SETTINGS))

    def page_config(self) -> PageConfig:
        return PageConfig(**self._fields(PAGE_SETTINGS))

    def _fields(self, settings: Sequence[Setting]) -> dict[str, Any]:
        return {setting.field_name: self.values[setting.name] for setting in settings}


def merge(flags: Mapping[str, object], environ: Mapping[str, str], config_file: str | None = None) -> Settings:
    """Merge the sources: flag, then environment, then TOML file, then preset, then default.

    Args:
        flags: by setting name; None or an empty sequence where a flag was not given.
        environ: the process's environment. An empty variable counts as not given.
        config_file: path given with `-c`; None uses the variable P2PTRAIN_CONFIG.

    Raises:
        ConfigError: an unknown key or variable, or an invalid value.
    """
    variables = {
        name: text
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX) and text and not _OF_SERVICES.match(f"{name}={text}")
    }
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
            if isinstance(given, str) and setting.kind in (int, float):
                raise ConfigError(f"{source}: {shortened(given)} is a text; write the number without quotes")
        else:
            values[name], sources[name] = setting.default, DEFAULT
            continue
        values[name], sources[name] = setting.parse(given, source), source
    explicit = {name for name, source in sources.items() if source != DEFAULT}
    preset, of_preset = PRESETS.get(str(values[PRESET]), {}), f"{PRESET} {values[PRESET]}"
    # Defaults of pairs and of topk come before a preset's, whose outer optimizer may be meant for other rounds; but not
    # before those of a preset of pairs, which topk would turn into rounds.
    kept = preset if "averaging" in preset else {}
    for source, defaults in list(implied_defaults(values)):
        _imply(values, sources, source, {name: value for name, value in defaults.items() if name not in kept})
    _imply(values, sources, of_preset, preset)
    _imply(values, sources, "inner_optimizer muon", muon_defaults(values))
    _imply_from_model(values, sources)
    if values["run_key"] is not None:
        check_key_file(str(values["run_key"]))
        warn_if_shared(user_path(str(values["run_key"])))
    ticket = _use_ticket(values, sources, explicit)
    has_key = values["run_key"] is not None or (ticket is not None and ticket.key is not None)
    if has_key or values["allow"] is not None:
        _imply(values, sources, "run_key" if has_key else "allow", closed_defaults(values))
    return Settings(values, sources, explicit, ticket)


def _imply(
    values: dict[str, Value], sources: dict[str, str], source: str, defaults: Mapping[str, str | int | float]
) -> None:
    """Use these values for the settings that still have their defaults."""
    for name, value in defaults.items():
        if sources[name] == DEFAULT:
            values[name], sources[name] = value, source


def _imply_from_model(values: dict[str, Value], sources: dict[str, str]) -> None:
    """Defaults of the run that follow from the model."""
    model = str(values[MODEL])
    defaults = model_defaults(model)
    _imply(values, sources, f"{MODEL} {model}", {name: getattr(defaults, name) for name in OF_RUN})
    if values["inner_optimizer"] == "muon":
        lr = cast(float, values["lr"])
        _imply(values, sources, f"{MODEL} {model}", {"muon_lr": defaults.muon_times * lr})


def _use_ticket(values: dict[str, Value], sources: dict[str, str], explicit: set[str]) -> Ticket | None:
    """Replace a ticket among the initial peers by what it holds. Raises ConfigError."""
    given = values["initial_peers"]
    assert isinstance(given, tuple)
    addresses, ticket = expand_ticket(given)
    if ticket is None:
        return None
    source = sources["initial_peers"]
    values["initial_peers"] = addresses
    if sources["run_id"] not in (DEFAULT, source) and values["run_id"] != ticket.run_id:
        raise ConfigError(
            f"{sources['run_id']}: {shortened(values['run_id'])} is not the run of the ticket, "
            f"{shortened(ticket.run_id)}; leave it out, or give another ticket"
        )
    values["run_id"], sources["run_id"] = ticket.run_id, source
    explicit.add("run_id")
    if ticket.founder and sources["founder"] != DEFAULT and values["founder"] != ticket.founder:
        raise ConfigError(
            f"{sources['founder']}: {values['founder']} is not the founder in the ticket, {ticket.founder}; leave it "
            "out, or give another ticket"
        )
    if ticket.founder:
        founder = SETTINGS["founder"].parse(ticket.founder, "the ticket's founder")
        values["founder"], sources["founder"] = founder, source
        explicit.add("founder")
    return ticket


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
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read: a number has too many digits, or lists are too deep; correct the file"
        ) from error


def _read_keys(path: Path) -> dict[str, Any]:
    keys = read_toml(path)
    for key, value in keys.items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: [{key}] is a table; write all keys at the top level, without [tables]")
        if key not in SETTINGS:
            raise ConfigError(f"{path}: unknown key {key!r}; {did_you_mean(key, SETTINGS)}")
    return keys
