"""Settings of the run and the machine: rules, digest, and settings given by a joiner."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest

from p2ptrain.errors import ConfigError, RunMismatchError
from p2ptrain.settings.config import PROTOCOL_VERSION, RunConfig, agrees, resolve_run
from p2ptrain.settings.link import Link
from p2ptrain.settings.peer_config import NetworkConfig, PageConfig, PeerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", ""),
        ("run_id", "a/b"),
        ("run_id", "x" * 129),
        ("model", "gpt\x1b[2J"),
        ("model", "x" * 129),
        ("data", "imagenet"),
        ("context", -1),
        ("context", 2**20 + 1),
        ("total_steps", -1),
        ("total_steps", 2**63),
        ("total_steps", 1.5),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr", 1e7),
        ("muon_lr", 1e308),
        ("warmup_steps", -1),
        ("beta2", 1.0),
        ("weight_decay", -0.1),
        ("sync_every", 0),
        ("sync_every", True),
        ("fragment_fraction", 1.01),
        ("fragment_fraction", -0.01),
        ("fragment_fraction", 1e-10),
        ("fragment_fraction", 5e-324),
        ("fragment_selection", "random"),
        ("fragment_codec", "none"),
        ("round_codec", "int3"),
        ("round_density", 0.0),
        ("prune_fraction", 1.0),
        ("fragment_schedule", "ramps"),
        ("fragment_delay", -1),
        ("fragment_delay", 201),
        ("fragment_delay", 2**62),
        ("max_staleness", -0.1),
        ("topology", "ring"),
        ("fan_out", 0),
        ("sync_schedule", "slow"),
        ("round_weights", "size"),
        ("round_mean", "median"),
        ("round_guard", "median"),
        ("audit_rate", 1.5),
        ("inner_moments", "averaged"),
        ("inner_moments", "shared"),
        ("max_missed_rounds", -1),
        ("max_contributors", 1),
        ("max_contributors", 65),
        ("round_timeout_s", 0.0),
        ("outer_optimizer", "lion"),
        ("outer_lr_schedule", "linear"),
        ("outer_lr", 0.0),
        ("outer_momentum", 1.0),
        ("num_shards", -1),
        ("num_shards", 2.0),
        ("sharding", "random"),
        ("run_seed", -1),
        ("run_id", 5),
        ("model", None),
        ("data", []),
        ("lr", None),
        ("lr", "0.1"),
        ("fragment_fraction", True),
    ],
)
def test_a_bad_run_setting_is_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        RunConfig(**{field: value})
    assert repr(value) in str(caught.value)
    assert "must be" in str(caught.value)


LARGEST = sys.float_info.max
BELOW_ONE = math.nextafter(1.0, 0.0)
ABOVE_ZERO = math.nextafter(0.0, 1.0)
# The first and the last value that each setting may have.
RANGES: list[tuple[type, str, float, float]] = [
    (RunConfig, "vocab_size", 2, 2**20), (RunConfig, "context", 0, 2**20), (RunConfig, "total_steps", 0, 2**63 - 1),
    (RunConfig, "lr", ABOVE_ZERO, 1e6), (RunConfig, "warmup_steps", 0, 2**63 - 1),
    (RunConfig, "beta2", 0.0, BELOW_ONE), (RunConfig, "weight_decay", 0.0, LARGEST),
    (RunConfig, "grad_clip", 0.0, LARGEST), (RunConfig, "sync_every", 1, 2**63 - 1),
    (RunConfig, "fragment_delay", 0, 200), (RunConfig, "max_staleness", 0.0, LARGEST),
    (RunConfig, "fan_out", 1, 2**63 - 1), (RunConfig, "round_density", ABOVE_ZERO, 1.0),
    (RunConfig, "prune_fraction", 0.0, BELOW_ONE), (RunConfig, "audit_rate", 0.0, 1.0),
    (RunConfig, "max_missed_rounds", 0, 2**63 - 1), (RunConfig, "max_contributors", 2, 64),
    (RunConfig, "round_timeout_s", ABOVE_ZERO, LARGEST), (RunConfig, "outer_lr", ABOVE_ZERO, LARGEST),
    (RunConfig, "outer_momentum", 0.0, BELOW_ONE), (RunConfig, "num_shards", 0, 2**63 - 1),
    (RunConfig, "run_seed", 0, 2**63 - 1),
    (NetworkConfig, "bulk_port", 0, 65535), (NetworkConfig, "startup_timeout_s", ABOVE_ZERO, LARGEST),
    (NetworkConfig, "peer_timeout_s", 3.0, LARGEST), (NetworkConfig, "gossip_budget", ABOVE_ZERO, 1.0),
    (NetworkConfig, "relay_peers", 0, 2**63 - 1), (NetworkConfig, "relay_mbit", ABOVE_ZERO, LARGEST),
    (PeerConfig, "batch_tokens", 1, 2**63 - 1), (PeerConfig, "threads", 0, 2**63 - 1),
    (PeerConfig, "worker_threads", 0, 2**63 - 1), (PeerConfig, "sample_every", 0, 2**63 - 1),
    (PeerConfig, "seed", 0, 2**63 - 1), (PeerConfig, "shard", 0, 2**63 - 1), (PeerConfig, "eval_every", 1, 2**63 - 1),
    (PeerConfig, "eval_tokens", 1, 2**63 - 1), (PeerConfig, "checkpoint_minutes", ABOVE_ZERO, LARGEST),
    (Link, "rate_mbit", 0.01, 1e6), (Link, "rate_up_mbit", 0.01, 1e6), (Link, "rtt_ms", 0.0, 60_000.0),
    (Link, "peers", 2, 1000), (Link, "step_ms", 1e-3, 1e6), (Link, "cores", 1, 2**63 - 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field", "first", "last"), RANGES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_number_may_have_both_ends_of_its_range_and_nothing_beyond(
    config: Any, field: str, first: float, last: float
) -> None:
    for allowed in (first, last):
        assert getattr(config(**{field: allowed}), field) == allowed
    below, above = (
        (first - 1, last + 1)
        if isinstance(first, int)
        else (math.nextafter(first, -math.inf), math.nextafter(last, math.inf))
    )
    for refused in (below, above):
        with pytest.raises(ConfigError, match=f"{field} = .*: must be"):
            config(**{field: refused})


def test_a_share_of_the_weights_is_none_or_from_one_in_a_billion_to_all() -> None:
    for share in (0.0, 1e-9, 1.0):
        assert RunConfig(fragment_fraction=share).fragment_fraction == share
    for share in (math.nextafter(0.0, -1.0), ABOVE_ZERO, math.nextafter(1e-9, 0.0), math.nextafter(1.0, 2.0)):
        with pytest.raises(ConfigError, match=r"fragment_fraction = .*: must be 0, or from 1e-9 to 1"):
            RunConfig(fragment_fraction=share)


def test_the_learning_rate_of_muon_is_for_muon() -> None:
    for rate in (0.0, 1e6):
        assert RunConfig(inner_optimizer="muon", muon_lr=rate).muon_lr == rate
    for rate in (-ABOVE_ZERO, math.nextafter(1e6, 2e6)):
        with pytest.raises(ConfigError, match="muon_lr"):
            RunConfig(inner_optimizer="muon", muon_lr=rate)
    with pytest.raises(ConfigError, match=r"muon_lr = 0\.1: must be left out with inner_optimizer = 'adamw'"):
        RunConfig(muon_lr=0.1)


@pytest.mark.parametrize("length", [1, 128])
def test_a_run_id_has_1_to_128_printable_characters(length: int) -> None:
    assert RunConfig(run_id="é" * length).run_id == "é" * length
    assert RunConfig(model="m" * 128, model_layout="f" * 128).model == "m" * 128
    for layout in ("f" * 129, "f\n"):
        with pytest.raises(ConfigError, match="model_layout"):
            RunConfig(model_layout=layout)


PAIRWISE: dict[str, Any] = {"averaging": "pairwise", "outer_optimizer": "sgdm"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("outer_optimizer", "nesterov"), ("outer_optimizer", "adam"), ("round_codec", "int4"), ("round_codec", "int2"),
        ("round_codec", "topk"), ("prune_fraction", 0.5), ("sync_schedule", "grow"), ("outer_lr_schedule", "cosine"),
        ("round_mean", "disjoint"), ("round_mean", "clipped"),
    ],
)  # fmt: skip
def test_random_pairs_refuse_settings_that_would_spoil_their_weights(field: str, value: object) -> None:
    assert RunConfig(**{**PAIRWISE, field: getattr(RunConfig(**PAIRWISE), field)}).is_pairwise
    with pytest.raises(ConfigError, match=f"{field} = .* with averaging = 'pairwise'"):
        RunConfig(**{**PAIRWISE, field: value})


def test_a_trimmed_mean_of_sparse_gradients_is_refused() -> None:
    """Few members send a value at the same position, so that all of them would be trimmed."""
    with pytest.raises(ConfigError, match=r"round_mean = 'trimmed'.*topk"):
        RunConfig(round_mean="trimmed", round_codec="topk")
    assert RunConfig(round_mean="clipped", round_codec="topk").round_mean == "clipped"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_tokens", 0),
        ("threads", -1),
        ("worker_threads", -1),
        ("eval_every", 0),
        ("eval_tokens", 0),
        ("checkpoint_minutes", 0.0),
        ("seed", -1),
        ("preset", "dilocoo"),
    ],
)
def test_a_bad_peer_setting_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {value!r}"):
        PeerConfig(**{field: value})


@pytest.mark.parametrize("field", ["outer_lr", "outer_momentum", "max_staleness", "sync_every"])
@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_no_float_can_hold_is_refused_and_shown_in_short(field: str, digits: int, sign: int) -> None:
    value = sign * 10**digits
    with pytest.raises(ConfigError, match=f"{field} = .*: must be") as caught:
        RunConfig(**{field: value})
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match=f"{field} = .*: must be"):
        RunConfig.from_dict({field: value})


@pytest.mark.parametrize("values", [{"x" * 9999: 1}, {"sync_every": "x" * 9999}, {"model": "x" * 9999}])
def test_a_long_foreign_setting_is_shown_in_short(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="xxx…") as caught:
        RunConfig.from_dict(values)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("port", [-1, 65536, "8080", True])
def test_a_port_is_a_number_in_its_range(port: object) -> None:
    with pytest.raises(ConfigError, match=f"port = {port!r}: must be from 0 to 65535"):
        PageConfig(port=port)


@pytest.mark.parametrize("prometheus", [9100, "9" * 5000, "host:" + "9" * 5000])
def test_an_endpoint_is_a_text_with_a_port_in_its_range(prometheus: object) -> None:
    with pytest.raises(ConfigError, match=r"prometheus = .*: must be PORT or HOST:PORT"):
        PeerConfig(prometheus=prometheus)
    with pytest.raises(ConfigError, match=r"dashboard = .*: must be PORT or HOST:PORT"):
        PeerConfig(dashboard=prometheus)


def test_a_peer_that_shows_life_every_second_cannot_be_lost_sooner() -> None:
    with pytest.raises(ConfigError, match=r"peer_timeout_s = 2\.5"):
        NetworkConfig(peer_timeout_s=2.5)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan"), "2 %", True])
def test_gossip_takes_a_part_of_a_core(share: object) -> None:
    with pytest.raises(ConfigError, match=r"gossip_budget = .*: must be above 0 and at most 1, all cores"):
        NetworkConfig(gossip_budget=share)
    assert NetworkConfig(gossip_budget=1).gossip_budget == 1


def test_direct_connections_have_a_port_of_their_own() -> None:
    taken = ("/ip4/0.0.0.0/tcp/4001",)
    with pytest.raises(ConfigError, match=r"bulk_port = 4001: must be another one than that of host_maddrs"):
        NetworkConfig(host_maddrs=taken, bulk_port=4001)
    assert NetworkConfig(host_maddrs=taken, bulk_port=40012).bulk_port == 40012
    assert NetworkConfig(host_maddrs=taken, bulk_port=4001, bulk="off").without_bulk.bulk == "off"


def test_a_peer_relays_for_some_or_none() -> None:
    assert NetworkConfig(relay_peers=0).relay_peers == 0
    with pytest.raises(ConfigError, match="relay_peers = -1"):
        NetworkConfig(relay_peers=-1)


def test_a_peer_must_listen_somewhere() -> None:
    with pytest.raises(ConfigError, match="host_maddrs"):
        NetworkConfig(host_maddrs=())


@pytest.mark.parametrize("version", [0, 2, 2**70])
def test_a_run_of_another_protocol_version_is_refused(version: int) -> None:
    with pytest.raises(ConfigError, match=f"protocol_version = {version}: must be 1 with this version of p2ptrain"):
        RunConfig.from_stated({"run_id": "r", "protocol_version": version})


def test_the_digest_covers_every_field_and_nothing_else() -> None:
    run = RunConfig()
    other: dict[type, object] = {str: "fp16", int: 17, float: 0.25}
    for field in dataclasses.fields(RunConfig):
        choices = {
            "fragment_selection": "fresh", "data": "text", "sharding": "clusters", "fragment_schedule": "ramp",
            "topology": "all", "sync_schedule": "grow", "round_weights": "equal", "round_mean": "disjoint",
            "outer_optimizer": "adam", "outer_lr_schedule": "cosine", "inner_moments": "averaged",
            "averaging": "gather", "round_guard": "clip", "tokenizer": "bytes",
            "inner_optimizer": "muon", "schedule": "wsd",
        }  # fmt: skip
        value = choices.get(field.name, other[type(field.default)])
        needed = {"inner_moments": {"round_codec": "none"}, "muon_lr": {"inner_optimizer": "muon"}}
        before = dataclasses.replace(run, **needed.get(field.name, {}))
        assert dataclasses.replace(before, **{field.name: value}).digest != before.digest, field.name
    assert RunConfig().digest == run.digest
    assert RunConfig.from_dict(run.to_dict()) == run


# The meaning of each setting that a peer leaves out. A new setting gets a line with the behaviour of older versions.
# Lines never change: when a default changes, `config.BASELINE` gets the value that is here.
MEANT = {
    "run_id": "p2ptrain", "protocol_version": 1, "model": "", "model_layout": "", "data": "", "tokenizer": "chars",
    "vocab_size": 98, "total_steps": 2000, "inner_optimizer": "adamw", "lr": 0.003, "muon_lr": 0.0,
    "schedule": "cosine", "warmup_steps": 50, "beta2": 0.95, "weight_decay": 0.1, "grad_clip": 1.0, "sync_every": 200,
    "sync_schedule": "fixed", "fragment_fraction": 0.005, "fragment_selection": "cyclic", "fragment_codec": "int8",
    "fragment_schedule": "fixed", "fragment_delay": 0, "max_staleness": 0.15, "topology": "push", "fan_out": 1,
    "round_codec": "int8", "round_density": 0.02, "prune_fraction": 0.0, "round_weights": "tokens",
    "round_mean": "weighted", "round_guard": "exclude", "audit_rate": 0.1, "averaging": "parts",
    "inner_moments": "local", "max_missed_rounds": 1, "max_contributors": 64,
    "round_timeout_s": 1800.0, "outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_lr_schedule": "constant",
    "outer_momentum": 0.9, "num_shards": 0, "sharding": "iid", "run_seed": 0,
    "context": 0, "round_sections": 1,
}  # fmt: skip


def test_what_an_unstated_setting_means_never_changes() -> None:
    assert {**RunConfig.baseline(), "protocol_version": 1} == MEANT


def test_only_what_differs_is_stated_and_hashed() -> None:
    # The last default has changed since the baseline.
    always = {"run_id": "p2ptrain", "protocol_version": PROTOCOL_VERSION, "outer_momentum": 0.6}
    assert RunConfig().stated() == always
    assert RunConfig.from_stated({"run_id": "p2ptrain"}).outer_momentum == 0.9
    run = RunConfig(run_id="r", lr=0.5, model_layout="ab", outer_momentum=0.0)
    assert run.stated() == {
        "run_id": "r", "protocol_version": PROTOCOL_VERSION, "lr": 0.5, "model_layout": "ab", "outer_momentum": 0.0
    }  # fmt: skip
    for stated in (run.stated(), run.to_dict()):
        assert RunConfig.from_stated(stated) == run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Newer(RunConfig):
    """Settings of a later version, with a new setting and a changed default."""

    outer_lr: float = 0.5
    quantum: bool = False


def test_a_setting_that_a_later_version_adds_changes_no_digest_until_it_is_used() -> None:
    newer, older = Newer(outer_lr=0.6), RunConfig(outer_lr=0.6)
    assert newer.digest == older.digest
    assert RunConfig.from_stated(newer.stated()) == older
    assert Newer.from_stated(older.stated()) == newer
    used = dataclasses.replace(newer, quantum=True)
    assert used.digest != older.digest
    with pytest.raises(ConfigError, match="unknown run setting 'quantum'"):
        RunConfig.from_stated(used.stated())


def test_a_default_that_a_later_version_changes_means_the_same_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.settings.config.BASELINE", {"outer_lr": 0.7})
    assert Newer().outer_lr != RunConfig().outer_lr
    assert Newer().digest != RunConfig().digest
    for value in (0.5, 0.7, 0.9):
        newer, older = Newer(outer_lr=value), RunConfig(outer_lr=value)
        assert newer.digest == older.digest
        assert Newer.from_stated(older.stated()) == newer
        assert RunConfig.from_stated(newer.stated()) == older


def test_foreign_settings_are_checked_for_names_and_types() -> None:
    assert RunConfig.from_dict({"lr": 1}).lr == 1.0
    with pytest.raises(ConfigError, match="unknown run setting 'lrr'"):
        RunConfig.from_dict({"lrr": 1.0})
    with pytest.raises(ConfigError, match="sync_every = '5' must be of type int"):
        RunConfig.from_dict({"sync_every": "5"})
    with pytest.raises(ConfigError, match="sync_every = True must be of type int"):
        RunConfig.from_dict({"sync_every": True})


def test_a_joiner_takes_over_what_it_does_not_give() -> None:
    live = RunConfig(lr=0.001, sync_every=50)
    assert resolve_run({}, live) == live
    assert resolve_run({"lr": 0.001}, live) == live


def test_a_contradiction_names_the_field_and_both_values() -> None:
    live = RunConfig(lr=0.001, sync_every=50)
    with pytest.raises(RunMismatchError, match=r"sync_every: you gave 200, .* trains with 50"):
        # Also if the given value is the default.
        resolve_run({"sync_every": RunConfig.sync_every}, live)


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ({"averaging": "pairwise"}, RunConfig(averaging="pairwise", outer_optimizer="sgdm")),
        ({"inner_moments": "averaged"}, RunConfig(inner_moments="averaged", round_codec="none")),
        ({"round_guard": "clip"}, RunConfig()),
        ({"prune_fraction": 0.5, "run_id": "p2ptrain"}, RunConfig(prune_fraction=0.25)),
        ({"averaging": "pairwise"}, RunConfig()),
        ({"round_codec": "topk"}, RunConfig(round_codec="topk", max_contributors=3)),
    ],
)
def test_what_a_joiner_gives_is_compared_with_the_run_and_not_with_defaults(
    given: dict[str, Any], run: RunConfig
) -> None:
    is_same = given.items() <= run.to_dict().items()
    assert agrees(given, run) == is_same
    if is_same:
        assert resolve_run(given, run) == run
    else:
        with pytest.raises(RunMismatchError, match="you gave"):
            resolve_run(given, run)
    with pytest.raises(ConfigError, match="round_mean = 'mean': must be one of"):
        resolve_run({"round_mean": "mean"}, run)


def test_a_peers_data_is_its_own_and_the_same_after_a_restart() -> None:
    seeds = {(run_seed, peer): RunConfig(run_seed=run_seed).data_seed(peer) for run_seed in (0, 1) for peer in "ab"}
    assert len(set(seeds.values())) == 4
    assert RunConfig(run_seed=1, lr=1.0).data_seed("b") == seeds[1, "b"]


def test_a_peers_shard_is_the_same_after_a_restart_and_any_of_them() -> None:
    run = RunConfig(num_shards=8)
    shards = [run.shard_of(f"Qm{number}") for number in range(400)]
    assert shards == [run.shard_of(f"Qm{number}") for number in range(400)]
    assert all(20 < shards.count(shard) < 90 for shard in range(8))
    assert shards != [RunConfig(num_shards=8, run_seed=1).shard_of(f"Qm{number}") for number in range(400)]


def test_only_int8_can_prune() -> None:
    assert RunConfig(prune_fraction=0.5).prune_fraction == 0.5
    with pytest.raises(ConfigError, match="only int8 can prune"):
        RunConfig(prune_fraction=0.5, round_codec="fp16")
