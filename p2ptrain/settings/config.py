"""The settings that a run agrees on. Settings of one machine are in `peer_config`.

`RunConfig` must be equal on every peer: its hash, the run digest, is checked in the first frame of every stream.
A joiner adopts it from the run. Settings that the user gives as well must agree with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import ConfigError, RunMismatchError
from p2ptrain.settings.config_rules import check, check_choice, check_count, check_number, check_positive

PROTOCOL_VERSION = 1

# The meaning of a setting that a peer leaves out, if that is not its default. When a default changes, its old value is
# added here; so is what older versions do, for a new setting that is not off by default. Entries never change.
BASELINE: Mapping[str, Any] = {}
# Sent and hashed even if at the baseline.
ALWAYS_STATED = ("run_id", "protocol_version")

AVERAGINGS = ("parts", "gather")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "data": ("stdlib", "text", ""),
    "fragment_selection": ("cyclic", "fresh"),
    "fragment_codec": ("int8", "fp16"),
    "fragment_schedule": ("fixed", "ramp", "decay"),
    "topology": ("push", "pairs", "groups", "all"),
    "sync_schedule": ("fixed", "grow", "shrink"),
    "averaging": AVERAGINGS,
    "round_codec": ("int8", "int4", "fp16", "none", "topk"),
    "round_weights": ("tokens", "equal", "shard"),
    "round_mean": ("weighted", "disjoint"),
    "inner_moments": ("local", "averaged"),
    "outer_optimizer": ("nesterov", "sgdm", "sgd", "adam"),
    "outer_lr_schedule": ("constant", "cosine"),
    "sharding": ("iid", "unbalanced", "clusters"),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that every peer of a run shares, hashed into the run digest.

    `table.py` describes each setting in a line; the comment above a default is its reason. In addition:

    Attributes:
        run_id: peers of other runs on the same DHT are ignored.
        protocol_version: version of frames and round protocol; peers of other versions are refused.
        model: "" for a model given through the Python API.
        model_layout: hex hash of every parameter's name, shape, dtype and, if frozen, value.
        data: "stdlib" or "text" (every peer brings its own text files), or "" with the Python API.
        sync_every: H (DiLoCo, Algorithm 1).
        sync_schedule: "grow" or "shrink": H goes from 0.5 H to 1.5 H over the run, or back.
        fragment_fraction: p (SPARTA, Algorithm 1).
        fragment_selection: "cyclic" walks a shuffled partition; "fresh" draws at each step, as in the paper.
        fragment_schedule: "ramp": 0 to 2p over each interval (SPARTA); "decay": 2p to 0 over the run.
        fragment_delay: the paper's asynchronous mode.
        topology: "push" to random peers, "pairs", "groups", or "all" (the paper's full average).
        averaging: "parts": each member averages one part for all members; "gather": every member sends its outer
            gradient to every other member (for two or three peers, and for "topk").
        prune_fraction: share of each neuron's values that is not sent (DiLoCo, table 6).
        round_weights: outer gradients are weighted by the "tokens" trained on, "equal", or by the size of the peer's
            "shard" (DiLoCo, section 6.1; equal without shards).
        round_mean: "weighted", or the "disjoint" merge of DiLoCo's section 6.1.
        inner_moments: "averaged": rounds also average the inner Adam's moments (DiLoCo, appendix).
        round_timeout_s: after half of it, members with complete outer gradients go on without the rest.
        outer_optimizer: see DiLoCo, figure 6.
        sharding: "iid" (random blocks of text), "unbalanced" (the same, of unequal sizes) or "clusters" (similar
            blocks, by k-means). See `data/shards.py`.
    """

    # A first run needs no name. Several runs on one bootstrap node need different names.
    run_id: str = "p2ptrain"
    protocol_version: int = PROTOCOL_VERSION
    # The command line's default learns something within minutes on one slow core.
    model: str = ""
    model_layout: str = ""
    data: str = ""
    # 2,000 steps of the demo model take a few minutes on a laptop.
    total_steps: int = 2000
    # 3e-3 with 50 steps of warm-up: tuned for the demo model (simulated, k = 8). Weight decay: DiLoCo, table 5.
    lr: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    # DiLoCo, section 3.1, uses 500 as its trade-off between loss and bytes; the demo model's runs are shorter.
    sync_every: int = 200
    # Both papers keep H fixed; SPARTA leaves schedules open.
    sync_schedule: str = "fixed"
    # 0.5 %: the larger of the SPARTA paper's two settings.
    fragment_fraction: float = 0.005
    # Cyclic has 0.41 x the disagreement of fresh draws at the same bytes (simulated).
    fragment_selection: str = "cyclic"
    # int8 with a scale per block does not raise the loss (measured); int4 does.
    fragment_codec: str = "int8"
    # A ramp gave the same loss (reproduced: s9).
    fragment_schedule: str = "fixed"
    # A delay never helps. It shows the cost of a slow link.
    fragment_delay: int = 0
    # p · delay = 0.05 costs 0.01 nats, 0.15 costs 0.03 (simulated).
    max_staleness: float = 0.15
    # A push to a random peer needs no coordination, and mixes as fast per byte as pairs do.
    topology: str = "push"
    fan_out: int = 1
    # A member's bytes do not grow with the number of members.
    averaging: str = "parts"
    # A quarter of fp32's bytes at the same loss (reproduced: codecs). int4 too, at an eighth; untested on large models.
    round_codec: str = "int8"
    # SparseLoCo: 1 to 3 %.
    round_density: float = 0.02
    # Off: pruning half of the values cost 1.3 % of perplexity (reproduced: d14).
    prune_fraction: float = 0.0
    # With unequal speeds the loss fell from 2.341 to 2.300 (measured).
    round_weights: str = "tokens"
    # Both papers' mean. The disjoint merge was better here (reproduced: d18), but worse in DiLoCo, with larger models.
    round_mean: str = "weighted"
    # DiLoCo saw no significant gain from averaging, which takes three times the bytes.
    inner_moments: str = "local"
    # After one missed round a peer goes on (the paper's rule, best with Nesterov); after two it has drifted too far.
    max_missed_rounds: int = 1
    # 124M parameters in int8 take nine minutes each way at 2 Mbit/s, the slowest link that we test.
    round_timeout_s: float = 1800.0
    # DiLoCo, table 5: Nesterov, 0.7 and 0.9. The others there: sgd 0.5, sgdm 0.3 and 0.9, adam 0.3 and 0.9.
    outer_optimizer: str = "nesterov"
    outer_lr: float = 0.7
    # DiLoCo saw no effect of a cosine. In runs of 20 rounds it cost 9 % of perplexity (reproduced: d10).
    outer_lr_schedule: str = "constant"
    # As outer_lr.
    outer_momentum: float = 0.9
    # Off: when a peer leaves, nobody trains on its shard. Some of the papers' experiments need shards.
    num_shards: int = 0
    # DiLoCo's experiments default to clusters, "the more challenging use case"; iid needs no training beforehand.
    sharding: str = "iid"
    # Any number. Runs that are compared should share it.
    run_seed: int = 0

    def __post_init__(self) -> None:
        check(
            bool(self.run_id) and len(self.run_id) <= 128 and self.run_id.isprintable() and "/" not in self.run_id,
            "run_id", self.run_id, "1 to 128 printable characters without '/'",
        )  # fmt: skip
        # From another peer, and shown on the terminal, like run_id.
        check(
            self.model.isprintable() and len(self.model) <= 128, "model", self.model, "at most 128 printable characters"
        )
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_count("total_steps", self.total_steps, 0, "(0: the run has no end)")
        check_positive("lr", self.lr)
        check_count("warmup_steps", self.warmup_steps, 0)
        check_number("weight_decay", self.weight_decay, lambda x: x >= 0, "0 or more")
        check_count("sync_every", self.sync_every, 1, "(inner steps between two rounds)")
        fraction = self.fragment_fraction
        check_number("fragment_fraction", fraction, lambda x: 0 <= x <= 1, "between 0 and 1 (0.005 is 0.5 %)")
        check_count("fragment_delay", self.fragment_delay, 0)
        check_number("max_staleness", self.max_staleness, lambda x: x >= 0, "0 or more")
        check_count("fan_out", self.fan_out, 1)
        check_count("max_missed_rounds", self.max_missed_rounds, 0)
        check_positive("round_timeout_s", self.round_timeout_s)
        check_number("round_density", self.round_density, lambda x: 0 < x <= 1, "above 0 and at most 1 (0.02 is 2 %)")
        pruned = self.prune_fraction
        check_number("prune_fraction", pruned, lambda x: 0 <= x < 1, "at least 0 and below 1 (0.5 is 50 %)")
        can_prune = pruned == 0 or self.round_codec == "int8"
        check(can_prune, "prune_fraction", pruned, f"0 with round_codec = {self.round_codec!r}: only int8 can prune")
        # A second moment that a codec rounds to zero makes Adam divide by nearly nothing.
        exact = self.round_codec == "none" and self.round_mean == "weighted"
        check(
            self.inner_moments == "local" or exact,
            "inner_moments", self.inner_moments, "local unless round_codec = 'none' and round_mean = 'weighted'",
        )  # fmt: skip
        check_positive("outer_lr", self.outer_lr)
        check_number("outer_momentum", self.outer_momentum, lambda x: 0 <= x < 1, "at least 0 and below 1")
        check_count("num_shards", self.num_shards, 0, "(0: every peer trains on all of the text)")
        check_count("run_seed", self.run_seed, 0)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of `stated()` in a canonical form: equal exactly if all settings mean the same.

        Settings at their baseline are left out. So versions with different settings can meet, unless the run uses a
        setting that one of them lacks.
        """
        canonical = json.dumps(self.stated(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def data_seed(self, peer_id: str) -> int:
        """A seed for a peer's share of the data: the same after a restart with the same identity."""
        return int.from_bytes(hashlib.sha256(f"{self.run_seed}/{peer_id}".encode()).digest()[:6], "big")

    def shard_of(self, peer_id: str) -> int:
        """A peer's shard if the user gives none: the same after a restart. The run must have shards."""
        digest = hashlib.sha256(f"{self.run_seed}/shard/{peer_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.num_shards

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, for display and records."""
        return dataclasses.asdict(self)

    def stated(self) -> dict[str, Any]:
        """The settings that differ from their baseline, as sent to other peers."""
        baseline = self.baseline()
        return {n: value for n, value in self.to_dict().items() if n in ALWAYS_STATED or value != baseline[n]}

    @classmethod
    def from_stated(cls, values: Mapping[str, Any]) -> RunConfig:
        """Read `stated()` or `to_dict()` of any version. Raises ConfigError as `from_dict` does."""
        return cls.from_dict({**cls.baseline(), **values})

    @classmethod
    def baseline(cls) -> dict[str, Any]:
        """The meaning of every setting that is not stated."""
        return {**{field.name: field.default for field in dataclasses.fields(cls)}, **BASELINE}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Build from untrusted values. Raises ConfigError on unknown keys, wrong types or bad values."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"unknown run setting {name!r}; known are: {', '.join(sorted(known))}")
            expected = type(known[name].default)
            if type(value) is not expected and not (expected is float and type(value) is int):
                raise ConfigError(f"run setting {name} = {value!r} must be of type {expected.__name__}")
        fields: dict[str, Any] = {
            name: float(value) if type(known[name].default) is float else value for name, value in values.items()
        }
        return cls(**fields)


def agrees(explicit: Mapping[str, Any], run: RunConfig) -> bool:
    """Whether all settings that the user gave agree with the run's."""
    try:
        resolve_run(explicit, run)
    except RunMismatchError:
        return False
    return True


def resolve_run(explicit: Mapping[str, Any], adopted: RunConfig | None) -> RunConfig:
    """The run's settings: those of the live run, or defaults plus what the user gave.

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
                "leave it out to adopt the run's setting, or choose another --run-id"
            )
    return adopted
