"""The settings that a run agrees on. What is one machine's own business is in `peer_config`.

`RunConfig` must be equal on every peer: its hash, the run digest, is checked in the first frame of every stream.
A joiner takes it over from the run and may repeat settings, but not contradict them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import ConfigError, RunMismatchError
from p2ptrain.settings.config_rules import check, check_choice, check_count, check_positive, is_finite

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
        check(
            bool(self.run_id) and len(self.run_id) <= 128 and self.run_id.isprintable() and "/" not in self.run_id,
            "run_id", self.run_id, "1 to 128 printable characters without '/'",
        )  # fmt: skip
        # A joiner shows these two on its terminal, and they come from a stranger.
        check(
            self.model.isprintable() and len(self.model) <= 128,
            "model", self.model, "at most 128 printable characters",
        )  # fmt: skip
        check_choice("data", self.data, DATA_KINDS)
        check_count("total_steps", self.total_steps, 0, "(0: the run has no end)")
        check_positive("lr", self.lr)
        check_count("warmup_steps", self.warmup_steps, 0)
        check(is_finite(self.weight_decay) and self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        check_count("sync_every", self.sync_every, 1, "(inner steps between two rounds)")
        check(
            is_finite(self.fragment_fraction) and 0 <= self.fragment_fraction <= 1,
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
            check_choice(name, getattr(self, name), choices)
        check_count("fragment_delay", self.fragment_delay, 0)
        check(
            is_finite(self.max_staleness) and self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 or more"
        )
        check_count("fan_out", self.fan_out, 1)
        check_count("max_missed_rounds", self.max_missed_rounds, 0)
        check_positive("round_timeout_s", self.round_timeout_s)
        check(
            is_finite(self.round_density) and 0 < self.round_density <= 1,
            "round_density", self.round_density, "above 0 and at most 1 (0.02 is 2 %)",
        )  # fmt: skip
        check(
            is_finite(self.prune_fraction) and 0 <= self.prune_fraction < 1,
            "prune_fraction", self.prune_fraction, "at least 0 and below 1 (0.5 is 50 %)",
        )  # fmt: skip
        check(
            self.prune_fraction == 0 or self.round_codec == "int8",
            "prune_fraction", self.prune_fraction, f"0 with round_codec = {self.round_codec!r}: only int8 can prune",
        )  # fmt: skip
        # A second moment that a codec rounds to zero makes Adam divide by nearly nothing.
        exact = self.round_codec == "none" and self.round_mean == "weighted"
        check(
            self.inner_moments == "local" or exact,
            "inner_moments", self.inner_moments, "local unless round_codec = 'none' and round_mean = 'weighted'",
        )  # fmt: skip
        check_positive("outer_lr", self.outer_lr)
        check(
            is_finite(self.outer_momentum) and 0 <= self.outer_momentum < 1,
            "outer_momentum", self.outer_momentum, "at least 0 and below 1",
        )  # fmt: skip
        check_count("num_shards", self.num_shards, 0, "(0: every peer trains on all of the text)")
        check_choice("sharding", self.sharding, SHARDINGS)
        check_count("run_seed", self.run_seed, 0)

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


def agrees(explicit: Mapping[str, Any], run: RunConfig) -> bool:
    """Whether no setting that the user gave differs from the run's."""
    try:
        resolve_run(explicit, run)
    except RunMismatchError:
        return False
    return True


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
