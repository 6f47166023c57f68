"""The two halves of a configuration: what a run agrees on, and what is one machine's own business.

`RunConfig` must be equal on every peer: its hash, the run digest, is checked in the first frame of every stream.
A joiner takes it over from the run and may repeat settings, but not contradict them. `PeerConfig` never leaves the
machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import ConfigError, RunMismatchError
from p2ptrain.settings.endpoint import parse_endpoint
from p2ptrain.settings.presets import PRESETS

PROTOCOL_VERSION = 1

# What a setting means where a peer does not state it, if that is not its default: the default that it was added with,
# once the default has changed; what older versions do, for a new setting that is not off by default. No entry changes.
BASELINE: Mapping[str, Any] = {}
# Told and hashed whatever their value.
ALWAYS_STATED = ("run_id", "protocol_version")

DATA_KINDS = ("stdlib", "text", "")
FRAGMENT_CODECS = ("int8", "fp16")
AVERAGINGS = ("parts", "gather")
ROUND_CODECS = ("int8", "int4", "fp16", "none", "topk")
FRAGMENT_SELECTIONS = ("cyclic", "fresh")
FRAGMENT_SCHEDULES = ("fixed", "ramp", "decay")
TOPOLOGIES = ("push", "pairs", "groups", "all")
SYNC_SCHEDULES = ("fixed", "grow", "shrink")
OUTER_OPTIMIZERS = ("nesterov", "sgdm", "sgd", "adam")
OUTER_LR_SCHEDULES = ("constant", "cosine")
ROUND_WEIGHTS = ("tokens", "equal", "shard")
ROUND_MEANS = ("weighted", "disjoint")
INNER_MOMENTS = ("local", "averaged")
SHARDINGS = ("iid", "unbalanced", "clusters")


def _finite(value: float) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _check(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r}: must be {rule}")


def _check_count(name: str, value: int, least: int, note: str = "") -> None:
    # The upper bound is that of a signed 64-bit integer on the wire.
    ok = type(value) is int and least <= value < 2**63
    _check(ok, name, value, f"a whole number, {least} or more {note}".rstrip())


def _check_positive(name: str, value: float) -> None:
    _check(_finite(value) and value > 0, name, value, "a finite number above 0")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    _check(value in choices, name, value, "one of " + ", ".join(choice or "''" for choice in choices))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that every peer of a run shares, hashed into the run digest.

    Attributes:
        run_id: name of the run; peers of other runs on the same DHT are never seen.
        protocol_version: version of frames and round protocol; peers of another version are refused.
        model: built-in name, `package.module:factory`, or "" for a model given through the Python API.
        model_layout: hex hash of every parameter's name, shape, dtype and, where frozen, value.
        data: "stdlib" or "text" (every peer brings its own text files), or "" under the Python API.
        total_steps: length of the run in inner steps; 0 means it has no end.
        lr: peak learning rate of the inner AdamW.
        warmup_steps: linear warm-up of the inner learning rate.
        weight_decay: of the inner AdamW, on matrices only.
        sync_every: H, inner steps between rounds (DiLoCo, Algorithm 1).
        sync_schedule: "fixed", or H that grows from a half to one and a half, or shrinks, over the run.
        fragment_fraction: p, share of the parameters pushed at every inner step (SPARTA, Algorithm 1); 0 turns
            gossip off.
        fragment_selection: "cyclic" walks a shuffled partition, "fresh" draws anew at each step as the paper does.
        fragment_codec: how fragments travel.
        fragment_schedule: "fixed"; "ramp", from 0 to 2p over each interval (SPARTA); "decay", 2p to 0 over the run.
        fragment_delay: steps that a fragment waits before it is sent: the paper's asynchronous mode, made visible.
        max_staleness: fragments with p · delay beyond this are discarded; 0 keeps all.
        topology: whom fragments are pushed to: "push" to random peers, "pairs" that exchange, "groups", or "all" (the
            paper's full average).
        fan_out: peers that one fragment is pushed to.
        averaging: how outer gradients become one mean: "parts", of which each member averages one for all, or
            "gather": every member sends all of its own to every other (for two or three peers, and for "topk").
        round_codec: how outer gradients travel.
        round_density: share of the values that "topk" sends.
        prune_fraction: share of each neuron's values that is not sent (DiLoCo, table 6); for int8.
        round_weights: outer gradients count by the "tokens" that they were trained on, "equal", or by the size of the
            peer's "shard" (DiLoCo, section 6.1; equal where there are none).
        round_mean: "weighted", or the "disjoint" merge of DiLoCo's section 6.1.
        inner_moments: "local", or "averaged": rounds average the inner Adam's moments too (DiLoCo, appendix).
        max_missed_rounds: a peer left out more often than this in a row adopts the anchor.
        round_timeout_s: the longest that an attempt at a round may take. After half of it those whose outer gradients
            are whole go on without the others. The run's, because all wait for whoever leads.
        outer_optimizer: "nesterov", "sgdm", "sgd" or "adam" (DiLoCo, figure 6).
        outer_lr: learning rate of the outer step.
        outer_lr_schedule: "constant", or "cosine" to 0 over the run.
        outer_momentum: its momentum; Adam's first beta.
        num_shards: parts that the training text is cut into, of which each peer trains on one; 0: on all of it.
        sharding: what goes together: "iid" (blocks of text at random), "unbalanced" (the same, in sizes that differ)
            or "clusters" (blocks that are alike, by k-means). See `data/shards.py`.
        run_seed: seeds the initial weights, the fragment partition and the shards.
    """

    # A first run needs no name. Who wants two on one bootstrap node gives them names.
    run_id: str = "p2ptrain"
    protocol_version: int = PROTOCOL_VERSION
    # The command line has a model of its own as default, which learns something within minutes on one slow core.
    model: str = ""
    model_layout: str = ""
    data: str = ""
    # 2,000 steps of the demo model are a few minutes on a laptop: a first run that ends by itself.
    total_steps: int = 2000
    # 3e-3 with 50 steps of warm-up: tuned for the demo model (simulated, k = 8). Weight decay: DiLoCo, table 5.
    lr: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    # DiLoCo, section 3.1: 500 is the paper's trade-off between loss and bytes; the demo model's runs are short.
    sync_every: int = 200
    # Both papers keep H. The other two are SPARTA's open question.
    sync_schedule: str = "fixed"
    # 0.5 %: the larger of the SPARTA paper's two settings.
    fragment_fraction: float = 0.005
    # Cyclic: 0.41 x the disagreement of fresh draws at the same bytes (measured in simulation).
    fragment_selection: str = "cyclic"
    # int8 raw weights with a scale per block cost no loss (measured); int4 does.
    fragment_codec: str = "int8"
    # A ramp ended with the same loss (reproduced: s9).
    fragment_schedule: str = "fixed"
    # Waiting never helps. It shows what a slow link would cost.
    fragment_delay: int = 0
    # p · delay = 0.05 costs 0.01 nats, 0.15 costs 0.03 (measured in simulation).
    max_staleness: float = 0.15
    # One push to a random peer needs no agreement with anybody, and mixes as fast per byte as pairs do.
    topology: str = "push"
    fan_out: int = 1
    # The bytes that a member sends do not grow with their number.
    averaging: str = "parts"
    # A quarter of fp32's bytes at no loss (reproduced: codecs); so was int4, at an eighth, not tried on a large model.
    round_codec: str = "int8"
    # SparseLoCo: 1 to 3 %.
    round_density: float = 0.02
    # Half of the values pruned saved bytes and cost 1.3 % of perplexity (reproduced: d14): not unasked.
    prune_fraction: float = 0.0
    # Measured with unequal speeds: 2.341 → 2.300.
    round_weights: str = "tokens"
    # Both papers' mean. The disjoint merge was better here (reproduced: d18) and worse in DiLoCo, on larger models.
    round_mean: str = "weighted"
    # DiLoCo saw no significant gain from averaging them, at three times the bytes.
    inner_moments: str = "local"
    # Left out once a peer goes on (the paper's rule, and best with Nesterov); twice, it has drifted too far.
    max_missed_rounds: int = 1
    # 124M parameters in int8 take nine minutes each way at 2 Mbit/s, the slowest link that we test.
    round_timeout_s: float = 1800.0
    # DiLoCo, table 5: Nesterov, 0.7 and 0.9. The others there: sgd 0.5, sgdm 0.3 and 0.9, adam 0.3 and 0.9.
    outer_optimizer: str = "nesterov"
    outer_lr: float = 0.7
    # DiLoCo saw no change from a cosine. In runs of 20 rounds it cost 9 % of perplexity (reproduced: d10).
    outer_lr_schedule: str = "constant"
    # As outer_lr.
    outer_momentum: float = 0.9
    # In a swarm that anybody may leave, shards of absent peers would never be seen. The papers' settings want them.
    num_shards: int = 0
    # DiLoCo's experiments default to clusters, "the more challenging use case"; iid costs no training beforehand.
    sharding: str = "iid"
    # Any number does: runs that are to be compared share it.
    run_seed: int = 0

    def __post_init__(self) -> None:
        _check(
            bool(self.run_id) and len(self.run_id) <= 128 and self.run_id.isprintable() and "/" not in self.run_id,
            "run_id", self.run_id, "1 to 128 printable characters without '/'",
        )  # fmt: skip
        # A joiner shows these two on its terminal, and they come from a stranger.
        _check(
            self.model.isprintable() and len(self.model) <= 128,
            "model", self.model, "at most 128 printable characters",
        )  # fmt: skip
        _check_choice("data", self.data, DATA_KINDS)
        _check_count("total_steps", self.total_steps, 0, "(0: the run has no end)")
        _check_positive("lr", self.lr)
        _check_count("warmup_steps", self.warmup_steps, 0)
        _check(_finite(self.weight_decay) and self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _check_count("sync_every", self.sync_every, 1, "(inner steps between two rounds)")
        _check(
            _finite(self.fragment_fraction) and 0 <= self.fragment_fraction <= 1,
            "fragment_fraction", self.fragment_fraction, "between 0 and 1 (0.005 is 0.5 %)",
        )  # fmt: skip
        for name, choices in (
            ("fragment_selection", FRAGMENT_SELECTIONS),
            ("fragment_codec", FRAGMENT_CODECS),
            ("fragment_schedule", FRAGMENT_SCHEDULES),
            ("topology", TOPOLOGIES),
            ("sync_schedule", SYNC_SCHEDULES),
            ("averaging", AVERAGINGS),
            ("round_codec", ROUND_CODECS),
            ("round_weights", ROUND_WEIGHTS),
            ("round_mean", ROUND_MEANS),
            ("inner_moments", INNER_MOMENTS),
            ("outer_optimizer", OUTER_OPTIMIZERS),
            ("outer_lr_schedule", OUTER_LR_SCHEDULES),
        ):
            _check_choice(name, getattr(self, name), choices)
        _check_count("fragment_delay", self.fragment_delay, 0)
        _check(
            _finite(self.max_staleness) and self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 or more"
        )
        _check_count("fan_out", self.fan_out, 1)
        _check_count("max_missed_rounds", self.max_missed_rounds, 0)
        _check_positive("round_timeout_s", self.round_timeout_s)
        _check(
            _finite(self.round_density) and 0 < self.round_density <= 1,
            "round_density", self.round_density, "above 0 and at most 1 (0.02 is 2 %)",
        )  # fmt: skip
        _check(
            _finite(self.prune_fraction) and 0 <= self.prune_fraction < 1,
            "prune_fraction", self.prune_fraction, "at least 0 and below 1 (0.5 is 50 %)",
        )  # fmt: skip
        _check(
            self.prune_fraction == 0 or self.round_codec == "int8",
            "prune_fraction", self.prune_fraction, f"0 with round_codec = {self.round_codec!r}: only int8 can prune",
        )  # fmt: skip
        # A second moment that a codec rounds to zero makes Adam divide by nearly nothing.
        exact = self.round_codec == "none" and self.round_mean == "weighted"
        _check(
            self.inner_moments == "local" or exact,
            "inner_moments", self.inner_moments, "local unless round_codec = 'none' and round_mean = 'weighted'",
        )  # fmt: skip
        _check_positive("outer_lr", self.outer_lr)
        _check(
            _finite(self.outer_momentum) and 0 <= self.outer_momentum < 1,
            "outer_momentum", self.outer_momentum, "at least 0 and below 1",
        )  # fmt: skip
        _check_count("num_shards", self.num_shards, 0, "(0: every peer trains on all of the text)")
        _check_choice("sharding", self.sharding, SHARDINGS)
        _check_count("run_seed", self.run_seed, 0)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of `stated()` in a canonical form: equal exactly where all settings mean the same.

        Leaving out what is at its baseline lets versions meet that know different settings, as long as the run uses
        none that one of them does not know.
        """
        canonical = json.dumps(self.stated(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def data_seed(self, peer_id: str) -> int:
        """A seed for a peer's share of the data: the same after a restart with the same identity."""
        return int.from_bytes(hashlib.sha256(f"{self.run_seed}/{peer_id}".encode()).digest()[:6], "big")

    def shard_of(self, peer_id: str) -> int:
        """A peer's shard where the user names none: the same after a restart. The run must have shards."""
        digest = hashlib.sha256(f"{self.run_seed}/shard/{peer_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.num_shards

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, for people and records."""
        return dataclasses.asdict(self)

    def stated(self) -> dict[str, Any]:
        """The settings that differ from their baseline: what other versions have to be told."""
        baseline = self.baseline()
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name in ALWAYS_STATED or value != baseline[name]
        }

    @classmethod
    def from_stated(cls, values: Mapping[str, Any]) -> RunConfig:
        """The settings that any version stated, or wrote down in full. Raises ConfigError as `from_dict` does."""
        return cls.from_dict({**cls.baseline(), **values})

    @classmethod
    def baseline(cls) -> dict[str, Any]:
        """What every setting means where it is not stated."""
        return {**{field.name: field.default for field in dataclasses.fields(cls)}, **BASELINE}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Build from untrusted values. Raises ConfigError on unknown keys, wrong types or bad values."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"unknown run setting {name!r}; known are: {', '.join(sorted(known))}")
            expected = type(known[name].default)
            if expected is float and type(value) is int:
                continue
            if type(value) is not expected:
                raise ConfigError(f"run setting {name} = {value!r} must be of type {expected.__name__}")
        fields: dict[str, Any] = {
            name: float(value) if type(known[name].default) is float else value for name, value in values.items()
        }
        return cls(**fields)


def resolve_run(explicit: Mapping[str, Any], adopted: RunConfig | None) -> RunConfig:
    """Settle the run's settings: those of the run that was found, or defaults plus what the user gave.

    Args:
        explicit: the settings that the user gave, by field name of `RunConfig`.
        adopted: the settings of the live run, or None when there is none yet.

    Raises:
        RunMismatchError: an explicit setting differs from the run's.
        ConfigError: an explicit setting is invalid.
    """
    if adopted is None:
        return RunConfig.from_dict(explicit)
    given = RunConfig.from_dict(explicit)
    for name in explicit:
        ours, theirs = getattr(given, name), getattr(adopted, name)
        if ours != theirs:
            raise RunMismatchError(
                f"{name}: you gave {ours!r}, but run {adopted.run_id!r} trains with {theirs!r}; "
                f"leave it out to take over the run's setting, or choose another --run-id"
            )
    return adopted


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """How this machine meets the network. See libp2p's multiaddr notation for addresses.

    Attributes:
        initial_peers: multiaddrs of peers or bootstrap nodes to join through; empty to start a new swarm.
        remembered_peers: multiaddrs of peers met before, to join through as well. The user did not choose them, so
            nothing that they answer keeps this peer from starting.
        host_maddrs: addresses to listen on.
        announce_maddrs: addresses to tell others instead of those found out (behind port forwarding, in containers).
        identity: file with this peer's private key, made when missing; None for a new identity at each start.
        startup_timeout_s: how long the libp2p daemon may take to start.
        peer_timeout_s: the longest that a silent peer counts as there. It is lost sooner where its link used to be
            quick: this is the upper bound of what is learnt.
        relay_peers: peers behind NAT that may be reached through this machine, if it has a public address; 0 for none.
    """

    # Without anybody to join, a new run starts.
    initial_peers: tuple[str, ...] = ()
    # `p2ptrain join` keeps them in its directory.
    remembered_peers: tuple[str, ...] = ()
    # All interfaces: others on the network are to reach us. Port 0: any free one.
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    # The addresses of this machine's network cards, and what others see, are told unasked.
    announce_maddrs: tuple[str, ...] = ()
    # With the rest of what this peer keeps, so that the same command again is the same peer.
    identity: str | None = None
    # hivemind's 15 s is too short on busy machines (a known complaint); errors are due within 30 s.
    startup_timeout_s: float = 25.0
    # Half a minute: a laptop that swaps or a route that changes is back by then (guess).
    peer_timeout_s: float = 30.0
    # Each circuit takes up to 2 MB of buffers here, and what it carries comes in and goes out (guess).
    relay_peers: int = 32

    def __post_init__(self) -> None:
        _check(len(self.host_maddrs) > 0, "host_maddrs", self.host_maddrs, "at least one address to listen on")
        _check_positive("startup_timeout_s", self.startup_timeout_s)
        _check(
            _finite(self.peer_timeout_s) and self.peer_timeout_s >= 3,
            "peer_timeout_s", self.peer_timeout_s, "at least 3 (a peer shows life every second)",
        )  # fmt: skip
        _check_count("relay_peers", self.relay_peers, 0)


@dataclass(frozen=True, kw_only=True)
class PageConfig:
    """Where this machine serves the page that shows the run.

    Attributes:
        host: address or name to serve on.
        port: TCP port to serve on; 0 for any free one.
        page_names: names under which browsers may ask for the page, beside addresses and localhost.
    """

    # Whoever can reach the page sees the run: that is for the user to decide.
    host: str = "127.0.0.1"
    # Where people look for a page of their own machine.
    port: int = 8080
    # Addresses and localhost are enough, and a page of somebody else's cannot be asked for under its name.
    page_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(0 <= self.port < 65536, "port", self.port, "from 0 to 65535 (0: any free one)")


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """This machine's own business: nothing here has to be equal on another peer.

    Attributes:
        network: how this machine meets the others.
        preset: name of the settings that a run founded here takes where the user gives none; see `presets.py`.
        data: "stdlib", or the path of a text file or of a directory of text files.
        init_from: checkpoint directory or .safetensors file with the first weights of a run that is founded here.
        batch_size: windows of text per inner step.
        device: "auto" (a GPU when torch sees one), or a torch device such as "cpu" or "cuda:1".
        threads: CPU threads for torch; 0 leaves the choice to torch.
        out: directory for identity, metrics and checkpoints; None for `p2ptrain-<run id>`.
        metrics: file that gets one JSON line per event; None for `metrics.jsonl` in the out directory.
        prometheus: PORT (on loopback) or HOST:PORT to serve figures for Prometheus on; None for nowhere.
        seed: of this peer's stream of training windows; None derives it from the identity.
        shard: the part of the text to train on, in runs that have parts; None chooses one by the identity.
        eval_every: inner steps of the run between two measurements on the held-out text.
        checkpoint_minutes: time between two checkpoints; one more is written when training stops.
        write_addresses: file that gets the addresses of this peer, one a line, for others' `--initial-peers`.
        dashboard: port on which this peer serves the page that shows the run; None for no page.
    """

    network: NetworkConfig = NetworkConfig()
    # The defaults are the demo model's. A paper's are for models of its size.
    preset: str | None = None
    # On every machine that can run this program, and English enough to show a model that learns.
    data: str = "stdlib"
    # Random weights, from run_seed.
    init_from: str | None = None
    # Tuned with the demo model, for one slow core.
    batch_size: int = 4
    # A GPU where torch sees one.
    device: str = "auto"
    # torch takes every core. Where several peers share a machine, 1 each is faster.
    threads: int = 0
    # One directory a run, below the current one; a second peer there takes the next free number.
    out: str | None = None
    # With the rest of what this peer keeps.
    metrics: str | None = None
    # Nothing is served that nobody asked for.
    prometheus: str | None = None
    # Peers differ, and each goes on with its own text after a restart.
    seed: int | None = None
    # As the seed: no two people need agree, though two peers may come to share one.
    shard: int | None = None
    # One evaluation of the demo model takes as long as about six of its steps: 100 keeps it near 5 %. A guess else.
    eval_every: int = 100
    # A guess: ten minutes of one peer's work is little in a swarm, which keeps the weights anyway.
    checkpoint_minutes: float = 10.0
    # For scripts and containers; people copy the line that is printed.
    write_addresses: str | None = None
    # No port is opened unasked.
    dashboard: int | None = None

    def __post_init__(self) -> None:
        if self.preset is not None:
            _check_choice("preset", self.preset, tuple(PRESETS))
        _check_count("batch_size", self.batch_size, 1)
        _check_count("threads", self.threads, 0, "(0: torch decides)")
        _check_count("eval_every", self.eval_every, 1)
        _check_positive("checkpoint_minutes", self.checkpoint_minutes)
        if self.dashboard is not None:
            _check(0 <= self.dashboard < 65536, "dashboard", self.dashboard, "from 0 to 65535 (0: any free one)")
        _check(
            self.prometheus is None or parse_endpoint(self.prometheus) is not None,
            "prometheus", self.prometheus, "PORT or HOST:PORT, such as 9100 or 0.0.0.0:9100",
        )  # fmt: skip
        if self.seed is not None:
            _check_count("seed", self.seed, 0)
        if self.shard is not None:
            _check_count("shard", self.shard, 0)
