"""All settings: sources, their order, and invalid values."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import click
import pytest

from p2ptrain.cli.dashboard import dashboard
from p2ptrain.cli.join import join
from p2ptrain.errors import ConfigError, RunMismatchError
from p2ptrain.settings.access import EXAMPLE
from p2ptrain.settings.config import RunConfig, resolve_run
from p2ptrain.settings.model_defaults import MODEL_DEFAULTS
from p2ptrain.settings.peer_config import ENDPOINT, NetworkConfig, PageConfig, PeerConfig
from p2ptrain.settings.presets import CLOSED_DEFAULTS, MUON_DEFAULTS, PAIR_DEFAULTS, PRESETS, TOPK_DEFAULTS
from p2ptrain.settings.run_key import SECRET_BYTES, make_key_file, read_key
from p2ptrain.settings.setting import Setting, settings_of
from p2ptrain.settings.table import DEFAULT, RUN_SETTINGS, SETTINGS, merge
from p2ptrain.settings.ticket import Ticket, ticket_text
from p2ptrain.training.inner_optimizer import MUON_TIMES
from p2ptrain.training.models import PRESETS as MODELS

# For each setting a value other than its default, as text and converted.
EXAMPLES: dict[str, tuple[str, object]] = {
    "run_id": ("novels", "novels"),
    "model": ("gpt-small", "gpt-small"),
    "context": ("512", 512),
    "steps": ("77", 77),
    "inner_optimizer": ("muon", "muon"),
    "lr": ("0.5", 0.5),
    "muon_lr": ("0.02", 0.02),
    "schedule": ("wsd", "wsd"),
    "grad_clip": ("0.5", 0.5),
    "warmup_steps": ("7", 7),
    "beta2": ("0.99", 0.99),
    "weight_decay": ("0.25", 0.25),
    "sync_every": ("9", 9),
    "fragment_fraction": ("0.25", 0.25),
    "fragment_selection": ("fresh", "fresh"),
    "fragment_codec": ("fp16", "fp16"),
    "fragment_schedule": ("ramp", "ramp"),
    "fragment_delay": ("3", 3),
    "max_staleness": ("0.5", 0.5),
    "topology": ("pairs", "pairs"),
    "fan_out": ("2", 2),
    "round_sections": ("5", 5),
    "sync_schedule": ("grow", "grow"),
    "averaging": ("gather", "gather"),
    "round_codec": ("none", "none"),
    "round_density": ("0.5", 0.5),
    "prune_fraction": ("0.5", 0.5),
    "round_weights": ("shard", "shard"),
    "round_mean": ("disjoint", "disjoint"),
    "round_guard": ("clip", "clip"),
    "audit_rate": ("0.25", 0.25),
    "inner_moments": ("averaged", "averaged"),
    "max_missed_rounds": ("4", 4),
    "max_contributors": ("16", 16),
    "round_timeout_s": ("90.5", 90.5),
    "outer_optimizer": ("adam", "adam"),
    "outer_lr_schedule": ("cosine", "cosine"),
    "outer_lr": ("1.5", 1.5),
    "outer_momentum": ("0.5", 0.5),
    "num_shards": ("8", 8),
    "sharding": ("clusters", "clusters"),
    "run_seed": ("3", 3),
    "initial_peers": ("/ip4/10.0.0.1/tcp/1/p2p/QmA", ("/ip4/10.0.0.1/tcp/1/p2p/QmA",)),
    "founder": ("Qm" + "a" * 44, "Qm" + "a" * 44),
    "anchor": ("A" * 64, "A" * 64),
    "host_maddrs": ("/ip4/127.0.0.1/tcp/0", ("/ip4/127.0.0.1/tcp/0",)),
    "lan": ("off", "off"),
    "announce_maddrs": ("/ip4/10.0.0.2/tcp/2", ("/ip4/10.0.0.2/tcp/2",)),
    "identity": ("id.key", "id.key"),
    "startup_timeout_s": ("3.5", 3.5),
    "peer_timeout_s": ("4.5", 4.5),
    "gossip_budget": ("0.5", 0.5),
    "bulk": ("off", "off"),
    "bulk_port": ("4002", 4002),
    "relay_peers": ("0", 0),
    "run_key": ("friends.key", "friends.key"),
    "allow": ("members.txt", "members.txt"),
    "deny": ("banned.txt", "banned.txt"),
    "relay_mbit": ("12.5", 12.5),
    "write_addresses": ("addresses.txt", "addresses.txt"),
    "preset": ("diloco", "diloco"),
    "data": ("texts", "texts"),
    "tokenizer": ("hub:gpt2", "hub:gpt2"),
    "init_from": ("weights.safetensors", "weights.safetensors"),
    "batch_tokens": ("2048", 2048),
    "micro_batch": ("4", "4"),
    "dtype": ("bfloat16", "bfloat16"),
    "compile": ("on", "on"),
    "fsdp": ("on", "on"),
    "device": ("cpu", "cpu"),
    "threads": ("1", 1),
    "worker_threads": ("4", 4),
    "out": ("here", "here"),
    "metrics": ("m.jsonl", "m.jsonl"),
    "prometheus": ("0.0.0.0:9100", "0.0.0.0:9100"),
    "log": ("wandb", "wandb"),
    "sample_every": ("500", 500),
    "seed": ("5", 5),
    "shard": ("6", 6),
    "eval_every": ("11", 11),
    "eval_tokens": ("65536", 65536),
    "checkpoint_minutes": ("2.5", 2.5),
    "dashboard": ("0.0.0.0:8081", "0.0.0.0:8081"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("8082", 8082),
    "page_names": ("workshop", ("workshop",)),
}


def _toml(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_field_of_the_configuration_is_a_setting_or_is_not_for_users() -> None:
    owners = (RunConfig, NetworkConfig, PeerConfig, PageConfig)
    fields = {(owner, field.name) for owner in owners for field in dataclasses.fields(owner)}
    settings = {(owner, setting.field_name) for owner in owners for setting in settings_of(owner)}
    not_for_users = {
        (RunConfig, "protocol_version"),
        (RunConfig, "model_layout"),
        (RunConfig, "data"),  # follows from the peer's own
        (RunConfig, "tokenizer"),  # as data
        (RunConfig, "vocab_size"),
        (NetworkConfig, "remembered_peers"),  # kept in the out directory
        (NetworkConfig, "key"),  # the content of the file `run_key`
        (PeerConfig, "network"),
    }
    assert settings == fields - not_for_users
    assert EXAMPLES.keys() == SETTINGS.keys()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_has_flag_variable_and_toml_key(setting: Setting, tmp_path: Path) -> None:
    text, value = EXAMPLES[setting.name]
    assert setting.default != value

    params = [*join.params, *dashboard.params]
    flags = {flag for option in params if isinstance(option, click.Option) for flag in option.opts}
    assert setting.flag in flags
    given = merge({setting.name: (text,) if setting.kind is tuple else text}, {})
    assert given.values[setting.name] == value
    assert given.sources[setting.name] == setting.flag

    given = merge({}, {setting.variable: text})
    assert given.values[setting.name] == value
    assert given.sources[setting.name] == setting.variable == "P2PTRAIN_" + setting.name.upper()

    literal = text if setting.kind in (int, float) else f'["{text}"]' if setting.kind is tuple else f'"{text}"'
    path = _toml(tmp_path / "c.toml", f"{setting.name} = {literal}")
    given = merge({}, {}, path)
    assert given.values[setting.name] == value
    assert given.sources[setting.name] == f"{path}: {setting.name}"

    given = merge({}, {})
    assert given.values[setting.name] == setting.default
    assert not given.explicit(setting.name)


def test_flag_wins_over_environment_over_toml_over_default(tmp_path: Path) -> None:
    path = _toml(tmp_path / "c.toml", "steps = 1\nsync_every = 1\nbatch_tokens = 1")
    environ = {"P2PTRAIN_STEPS": "2", "P2PTRAIN_SYNC_EVERY": "2", "P2PTRAIN_CONFIG": path, "PATH": "/bin"}
    merged = merge({"steps": "3", "sync_every": None}, environ)
    assert [merged.values[name] for name in ("steps", "sync_every", "batch_tokens", "threads")] == [3, 2, 1, 0]
    other = _toml(tmp_path / "d.toml", "batch_tokens = 9")
    assert merge({}, environ, other).values["batch_tokens"] == 9


def test_the_home_directory_is_known_in_toml_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert SETTINGS["out"].parse("~/novels", "out") == "/home/me/novels"
    assert SETTINGS["out"].parse("not~/mine", "out") == "not~/mine"


def test_several_addresses_fit_in_one_variable() -> None:
    merged = merge({}, {"P2PTRAIN_HOST_MADDRS": "/ip4/127.0.0.1/tcp/1, /ip4/127.0.0.1/tcp/2"})
    assert merged.values["host_maddrs"] == ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2")


def test_an_empty_variable_is_not_given_but_an_empty_flag_is_an_error() -> None:
    assert not merge({}, {"P2PTRAIN_LR": ""}).explicit("lr")
    # As in: --initial-peers "$FORGOTTEN", which must not start a new run.
    with pytest.raises(ConfigError, match="--initial-peers: is empty"):
        merge({"initial_peers": ("",)}, {})


def test_an_unknown_variable_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"P2PTRAIN_SYNC_EVRY; did you mean P2PTRAIN_SYNC_EVERY\?"):
        merge({}, {"P2PTRAIN_SYNC_EVRY": "5"})


@pytest.mark.parametrize(("key", "hint"), [("sync-every", "sync_every"), ("Lr", "lr"), ("stepps", "steps")])
def test_an_unknown_toml_key_is_an_error_with_a_hint(key: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'; did you mean {hint}\?"):
        merge({}, {}, _toml(tmp_path / "c.toml", f"{key} = 5"))
    with pytest.raises(ConfigError, match="unknown key 'qqqqqq'; known are: allow, anchor, announce_maddrs, "):
        merge({}, {}, _toml(tmp_path / "c.toml", "qqqqqq = 5"))


def test_a_config_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        merge({}, {}, str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"not valid TOML"):
        merge({}, {}, _toml(tmp_path / "c.toml", "steps = = 5"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("outer_lr = 1" + "0" * 400, "outer_lr: 10{199}… must be a finite number above 0"),
        ("max_staleness = -1" + "0" * 400, "max_staleness: -10{198}… must be a finite number, 0 or more"),
        ("sync_every = 1" + "0" * 400, "sync_every: 10{199}… must be a whole number, 1 or more"),
        ("sync_every = 1" + "0" * 5000, "cannot be read: a number has too many digits"),
        ("model = " + "[" * 100_000, "cannot be read: .* lists are too deep"),
        ("model = [" + "1, " * 9999 + "]", "model: .{200}… is not a text in quotes"),
        (f'run_id = "{"x" * 9999}"', "run_id: .{200}… must be 1 to 128 printable characters"),
        (r'out = "a\u0000b"', r"out: 'a\\x00b' contains a null character; remove it"),
        (r'initial_peers = ["ok", "a\u0000"]', r"initial_peers: \('ok', 'a\\x00'\) contains a null character"),
    ],
    ids=range(9),
)
def test_an_odd_file_is_refused_with_its_name_and_in_short(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"c.toml: {message}") as caught:
        merge({}, {}, _toml(tmp_path / "c.toml", line))
    assert len(str(caught.value)) < 500


def test_an_endpoint_in_toml_may_be_a_number(tmp_path: Path) -> None:
    for name in ("dashboard", "prometheus"):
        for port in ("0", "8081", "65535"):
            assert merge({}, {}, _toml(tmp_path / "c.toml", f"{name} = {port}")).values[name] == port
        for wrong in ("-1", "65536", "true", "9999999"):
            with pytest.raises(ConfigError, match=f"c.toml: {name}: "):
                merge({}, {}, _toml(tmp_path / "c.toml", f"{name} = {wrong}"))


def test_a_shell_completes_the_choices_of_a_setting_or_the_names_that_it_is_given() -> None:
    for setting in SETTINGS.values():
        if setting.rule is not None and setting.rule.choices:
            assert setting.names == setting.rule.choices
    assert SETTINGS["topology"].names == ("push", "pairs", "groups", "all")
    assert SETTINGS["model"].names == tuple(MODELS)
    assert SETTINGS["lr"].names == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("lr", "fast", "--lr: 'fast' is not a number, such as 0.003"),
        ("lr", "-1", "--lr: -1.0 must be a finite number above 0, at most 1e6"),
        ("steps", "1.5", "--steps: '1.5' is not a whole number, such as 200"),
        ("dashboard", "[::1", f"--dashboard: '[::1' must be {ENDPOINT.text}"),
        ("dashboard", "abc", f"--dashboard: 'abc' must be {ENDPOINT.text}"),
        ("steps", "-3", "--steps: -3 must be a whole number, 0 or more (0: the run has no end)"),
        ("round_codec", "int3", "--round-codec: 'int3' must be one of int8, int4, int2, fp16, none, topk"),
    ],
)
def test_a_bad_value_is_refused_with_its_origin_value_and_rule(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merge({name: text}, {})
    assert str(caught.value) == message


@pytest.mark.parametrize("line", ["steps = true", "steps = 1.5", 'lr = ["a"]', "host_maddrs = 5", "data = 5"])
def test_a_toml_value_of_the_wrong_type_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"c.toml: {line.split()[0]}: .* is not a"):
        merge({}, {}, _toml(tmp_path / "c.toml", line))


def test_a_port_that_cannot_be_is_refused_with_the_range_of_ports() -> None:
    with pytest.raises(ConfigError, match=r"--prometheus: '99999' must be .* with a port from 0 to 65535"):
        merge({"prometheus": "99999"}, {})


def test_a_number_in_quotes_in_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c.toml: sync_every: '3' is a text; write the number without quotes"):
        merge({}, {}, _toml(tmp_path / "c.toml", 'sync_every = "3"'))


def test_a_toml_table_is_refused_with_the_place_of_the_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c.toml: \[run\] is a table; write all keys at the top level"):
        merge({}, {}, _toml(tmp_path / "c.toml", "[run]\nlr = 0.1"))


def test_a_new_run_has_the_command_lines_defaults() -> None:
    run = merge({}, {}).resolve_run(None)
    assert (run.model, run.data, run.total_steps) == ("gpt-demo", "stdlib", RunConfig.total_steps)
    assert merge({"data": "texts", "model": "gpt-small"}, {}).resolve_run(None).data == "text"


def test_only_what_was_given_is_compared_with_a_live_run() -> None:
    live = RunConfig(model="gpt-small", data="text", sync_every=5)
    assert merge({"batch_tokens": "1"}, {}).resolve_run(live) == live
    assert merge({"data": "my-texts"}, {}).resolve_run(live) == live
    with pytest.raises(RunMismatchError, match="--data stdlib: run 'p2ptrain' trains on text that every peer brings"):
        merge({"data": "stdlib"}, {}).resolve_run(live)
    with pytest.raises(RunMismatchError, match="P2PTRAIN_DATA my-texts: run 'p2ptrain' trains on Python's own source"):
        merge({}, {"P2PTRAIN_DATA": "my-texts"}).resolve_run(dataclasses.replace(live, data="stdlib"))
    with pytest.raises(RunMismatchError, match=r"P2PTRAIN_SYNC_EVERY: you gave 6, .*5"):
        merge({}, {"P2PTRAIN_SYNC_EVERY": "6"}).resolve_run(live)


def test_the_peers_half_holds_what_was_given(tmp_path: Path) -> None:
    path = tmp_path / "addresses of friends"
    path.write_text("/ip4/10.0.0.1/tcp/1/p2p/QmA\n", encoding="utf-8")
    config = merge({"initial_peers": (str(path),), "threads": "1", "seed": "4"}, {}).peer_config()
    assert config.network.initial_peers == ("/ip4/10.0.0.1/tcp/1/p2p/QmA",)
    assert (config.threads, config.seed, config.batch_tokens) == (1, 4, PeerConfig.batch_tokens)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_run_that_can_be_founded(preset: str) -> None:
    assert PRESETS[preset].keys() <= {setting.name for setting in RUN_SETTINGS}
    merged = merge({"preset": preset}, {})
    run = merged.resolve_run(None)
    assert run.model in MODELS
    for name, value in PRESETS[preset].items():
        assert getattr(run, SETTINGS[name].field_name) == value
        assert type(value) is SETTINGS[name].kind
        assert merged.sources[name] == f"preset {preset}"


def test_dilocos_preset_is_table_5() -> None:
    run = merge({"preset": "diloco"}, {}).resolve_run(None)
    assert (run.lr, run.warmup_steps, run.weight_decay) == (4e-4, 1000, 0.1)
    assert (run.sync_every, run.outer_lr, run.outer_momentum) == (500, 0.7, 0.9)
    assert run.fragment_fraction == 0
    assert MODELS[run.model].context == 1024


def test_a_preset_lies_between_the_defaults_and_what_is_given(tmp_path: Path) -> None:
    path = _toml(tmp_path / "c.toml", 'preset = "diloco"\nwarmup_steps = 11')
    merged = merge({"lr": "0.5"}, {"P2PTRAIN_SYNC_EVERY": "77"}, path)
    run = merged.resolve_run(None)
    assert (run.lr, run.sync_every, run.warmup_steps, run.outer_lr) == (0.5, 77, 11, 0.7)
    assert (run.model, run.round_codec) == ("diloco-150m", RunConfig.round_codec)
    assert [merged.sources[name] for name in ("lr", "sync_every", "model", "round_codec")] == [
        "--lr", "P2PTRAIN_SYNC_EVERY", "preset diloco", DEFAULT,
    ]  # fmt: skip
    # A flag's preset wins over the file's.
    assert merge({"preset": "sparta-124m"}, {}, path).resolve_run(None).model == "gpt2-124m"


def test_a_joiners_preset_contradicts_nothing() -> None:
    live = RunConfig(model="gpt-small", data="stdlib", sync_every=5)
    assert merge({"preset": "diloco"}, {}).resolve_run(live) == live
    assert not merge({"preset": "diloco"}, {}).explicit("model")
    with pytest.raises(RunMismatchError, match=r"--lr: you gave 0\.25"):
        merge({"preset": "diloco", "lr": "0.25"}, {}).resolve_run(live)


def test_pairs_alone_have_the_outer_optimizer_that_they_need() -> None:
    noloco, outer = PRESETS["noloco"], ("outer_optimizer", "outer_lr", "outer_momentum")
    for flags in ({}, {"preset": "diloco"}):
        merged = merge({"averaging": "pairwise", **flags}, {})
        run = merged.resolve_run(None)
        assert [getattr(run, name) for name in outer] == [noloco[name] for name in outer]
        assert {merged.sources[name] for name in outer} == {"averaging pairwise"}
        # Given was only that pairs average.
        assert merged.explicit_run() == {"averaging": "pairwise"}
        live = RunConfig(averaging="pairwise", outer_optimizer="sgdm", outer_lr=0.25)
        assert merged.resolve_run(live) == live
        assert resolve_run({"averaging": "pairwise"}, None).outer_momentum == noloco["outer_momentum"]
    assert merge({"averaging": "pairwise", "outer_lr": "0.25"}, {}).resolve_run(None).outer_lr == 0.25
    with pytest.raises(ConfigError, match="--outer-optimizer 'nesterov': must be sgdm with --averaging 'pairwise'"):
        merge({"averaging": "pairwise", "outer_optimizer": "nesterov"}, {}).resolve_run(None)
    assert merge({"averaging": "gather"}, {}).resolve_run(None).outer_optimizer == RunConfig.outer_optimizer
    with pytest.raises(ConfigError, match="--round-codec 'topk'"):
        merge({"preset": "noloco", "round_codec": "topk"}, {}).resolve_run(None)


def test_topk_has_the_mean_and_the_outer_step_that_it_needs(tmp_path: Path) -> None:
    for flags in ({}, {"preset": "diloco"}, {"inner_optimizer": "muon"}):
        merged = merge({"round_codec": "topk", **flags}, {})
        run = merged.resolve_run(None)
        assert TOPK_DEFAULTS.items() <= run.to_dict().items()
        assert {merged.sources[name] for name in TOPK_DEFAULTS} == {"round_codec topk"}
        # Given was only the codec.
        assert "averaging" not in merged.explicit_run()
        assert merged.resolve_run(live := dataclasses.replace(run, outer_lr=0.5)) == live
    for is_closed in (False, True):
        run = resolve_run({"round_codec": "topk"}, None, is_closed=is_closed)
        assert TOPK_DEFAULTS.items() <= run.to_dict().items()
        assert run.round_guard == "exclude"  # the disjoint mean cannot clip
    assert merge({"round_codec": "topk", "allow": "members.txt"}, {}).resolve_run(None).round_guard == "exclude"
    given = merge({"round_codec": "topk", "averaging": "parts", "round_mean": "weighted"}, {}).resolve_run(None)
    assert (given.averaging, given.round_mean, given.outer_lr) == ("parts", "weighted", 1.0)


def test_rounds_are_int4_with_muon_inside_unless_something_else_is_given() -> None:
    merged = merge({"inner_optimizer": "muon"}, {})
    assert (merged.values["round_codec"], merged.sources["round_codec"]) == ("int4", "inner_optimizer muon")
    assert merged.resolve_run(None).round_codec == resolve_run({"inner_optimizer": "muon"}, None).round_codec == "int4"
    # Given was only the inner optimizer: a run with another codec is joined.
    live = RunConfig(inner_optimizer="muon", round_codec="fp16", model="gpt-demo", data="stdlib")
    assert merged.resolve_run(live) == live
    for flags, codec in (
        ({"round_codec": "int8"}, "int8"), ({"prune_fraction": "0.5"}, "int8"), ({"averaging": "pairwise"}, "int8"),
        ({"preset": "noloco"}, "int8"), ({"preset": "diloco"}, "int4"), ({"inner_optimizer": "adamw"}, "int8"),
    ):  # fmt: skip
        merged = merge({"inner_optimizer": "muon", **flags}, {})
        assert merged.values["round_codec"] == merged.resolve_run(None).round_codec == codec


def test_closed_runs_scale_down_unless_the_founder_says_otherwise(tmp_path: Path) -> None:
    key_file = tmp_path / "run.key"
    make_key_file(key_file, b"k" * SECRET_BYTES)
    key = read_key(key_file)
    ticket = ticket_text(Ticket("r", (f"/ip4/10.0.0.1/tcp/1/p2p/{EXAMPLE}",), "", key))
    for flags, source in (
        ({"run_key": str(key_file)}, "run_key"), ({"allow": "members.txt"}, "allow"),
        ({"initial_peers": (ticket,)}, "run_key"),
    ):  # fmt: skip
        merged = merge(flags, {})
        assert (merged.values["round_guard"], merged.sources["round_guard"]) == ("clip", source)
        assert merged.resolve_run(None).round_guard == "clip"
        assert merged.resolve_run(None).stated()["round_guard"] == "clip"
        # It is not given: a run with another guard is joined, and so is one of a founder with other flags.
        assert "round_guard" not in merged.explicit_run()
        for guard in ("exclude", "off"):
            live = RunConfig(run_id=merged.resolve_run(None).run_id, model="gpt-demo", data="stdlib", round_guard=guard)
            assert merged.resolve_run(live) == live
        for given, guard in (({"round_guard": "off"}, "off"), ({"round_mean": "trimmed"}, "exclude")):
            assert merge({**flags, **given}, {}).resolve_run(None).round_guard == guard
    with pytest.raises(RunMismatchError, match=r"--round-guard: you gave 'exclude', .* trains with 'clip'"):
        merge({"round_guard": "exclude"}, {}).resolve_run(RunConfig(round_guard="clip"))
    assert merge({}, {}).resolve_run(None).round_guard == "exclude"
    for is_closed, guard in ((True, "clip"), (False, "exclude")):
        assert resolve_run({}, None, is_closed=is_closed).round_guard == guard
        assert resolve_run({"round_guard": "off"}, None, is_closed=is_closed).round_guard == "off"


def test_the_help_says_the_defaults_that_follow_from_other_settings() -> None:
    dependent = {
        "with muon": MUON_DEFAULTS, "in pairs": PAIR_DEFAULTS, "with topk": TOPK_DEFAULTS,
        "in closed runs": CLOSED_DEFAULTS,
    }  # fmt: skip
    for name in {name for defaults in dependent.values() for name in defaults}:
        setting = SETTINGS[name]
        others = [
            f", {when} {of[name]}" for when, of in dependent.items() if of.get(name, setting.default) != setting.default
        ]
        assert setting.default_text == "".join([str(setting.default), *others])


def test_settings_that_do_not_go_together_are_called_as_the_user_gave_them(tmp_path: Path) -> None:
    path = _toml(tmp_path / "c.toml", 'round_codec = "topk"')
    with pytest.raises(ConfigError) as caught:
        merge({}, {"P2PTRAIN_ROUND_MEAN": "trimmed"}, path).resolve_run(None)
    told = f"P2PTRAIN_ROUND_MEAN = 'trimmed': must be another mean with {path}: round_codec = 'topk': few members"
    assert str(caught.value).startswith(told)
    with pytest.raises(ConfigError, match=r"^--prune-fraction 0\.5: must be 0 with --round-codec 'none': only int8"):
        merge({"prune_fraction": "0.5", "round_codec": "none"}, {}).resolve_run(None)
    # What to give is called by its flag.
    with pytest.raises(ConfigError, match=r"^--inner-moments 'averaged': must be local unless --round-codec 'none'"):
        merge({"inner_moments": "averaged"}, {}).resolve_run(None)


def test_a_run_has_the_defaults_of_its_model_unless_something_else_is_given(tmp_path: Path) -> None:
    merged = merge({"model": "gpt2-124m", "inner_optimizer": "muon"}, {})
    run = merged.resolve_run(None)
    # The sources are beside the table.
    assert (run.lr, run.warmup_steps, run.total_steps, run.sync_every, run.beta2) == (6e-4, 700, 20_000, 500, 0.95)
    assert run.muon_lr == 2 * 6e-4
    assert merged.sources["lr"] == merged.sources["muon_lr"] == "model gpt2-124m"
    # Given were only two: a joiner adopts the rest.
    live = RunConfig(model="gpt2-124m", inner_optimizer="muon", lr=0.25, muon_lr=0.5, sync_every=7, data="stdlib")
    assert merged.resolve_run(live) == live
    path = _toml(tmp_path / "c.toml", "sync_every = 11")
    given = merge({"preset": "diloco", "lr": "0.5", "inner_optimizer": "muon"}, {"P2PTRAIN_BETA2": "0.25"}, path)
    run = given.resolve_run(None)
    assert (run.lr, run.beta2, run.sync_every, run.total_steps, run.muon_lr) == (0.5, 0.25, 11, 88_000, 1.0)
    # Which run a joiner finds, and so which model, is not known yet.
    assert [merged.values[name] for name in ("batch_tokens", "eval_tokens", "eval_every")] == [None] * 3


def test_every_built_in_model_has_defaults_and_the_demos_are_those_of_the_api() -> None:
    assert MODEL_DEFAULTS.keys() == MODELS.keys()
    for model in ("gpt-demo", "my.models:tiny"):
        run = merge({"model": model}, {}).resolve_run(None)
        assert run == RunConfig(model=model, data="stdlib")
        muon = merge({"model": model, "inner_optimizer": "muon"}, {}).resolve_run(None)
        assert muon.muon_lr == MUON_TIMES * muon.lr
    for model, lr in (("hf:gpt2", 6e-4), ("hf:gpt2:pretrained", 5e-5)):
        assert merge({"model": model}, {}).resolve_run(None).lr == lr
    large = {name for name, shape in MODELS.items() if replace(shape, vocab_size=32_000).num_parameters > 50e6}
    assert {name for name, defaults in MODEL_DEFAULTS.items() if defaults.eval_every == 500} == large


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--preset: 'dilocco' must be one of diloco, sparta-124m, noloco"):
        merge({"preset": "dilocco"}, {})


def test_what_kubernetes_adds_for_a_service_of_our_name_is_no_setting() -> None:
    ours = {
        "P2PTRAIN_PORT": "tcp://10.0.0.1:4001", "P2PTRAIN_SERVICE_HOST": "10.0.0.1", "P2PTRAIN_SERVICE_PORT": "4001",
        "P2PTRAIN_SERVICE_PORT_P2P": "4001", "P2PTRAIN_PORT_4001_TCP": "tcp://10.0.0.1:4001",
        "P2PTRAIN_PORT_4001_TCP_PROTO": "tcp", "P2PTRAIN_BOOTSTRAP_PORT_4001_TCP_ADDR": "10.0.0.1",
        "P2PTRAIN_BOOTSTRAP_PORT": "tcp://10.0.0.1:4001",
    }  # fmt: skip
    assert merge({}, ours).sources == merge({}, {}).sources
    assert merge({}, {"P2PTRAIN_PORT": "4001"}).values["port"] == 4001
