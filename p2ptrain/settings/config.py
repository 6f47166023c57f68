"""The settings that a run agrees on. Settings of one machine are in `peer_config`.

`RunConfig` must be equal on every peer: its hash, the run digest, is checked in the first frame of every stream.
A joiner adopts it from the run. Settings that the user gives as well must agree with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import ConfigError, RunMismatchError
from p2ptrain.settings.presets import MODELS, closed_defaults, implied_defaults, muon_defaults
from p2ptrain.settings.setting import (
    FROM_MODEL,
    POSITIVE,
    as_float,
    check,
    check_settings,
    choice,
    count,
    number,
    setting,
    shortened,
    text,
)

PROTOCOL_VERSION = 1

# What a setting means if a peer does not state it, where that is not its default. When a default changes, its old value
# is added here. A new setting that is not off by default gets what older versions do. Entries never change.
BASELINE: Mapping[str, Any] = {"outer_momentum": 0.9}
# These settings are always sent and hashed.
ALWAYS_STATED = ("run_id", "protocol_version")

AVERAGINGS = ("parts", "gather", "pairwise")
ROUND_MEANS = ("weighted", "disjoint", "clipped", "trimmed", "geometric")
# Four times the largest published vocabulary. The table of embeddings grows with it.
MAX_VOCAB_SIZE = 2**20
# A run's texts come from other peers, and are shown on the terminal.
RUN_ID = text(
    "1 to 128 printable characters without '/'",
    lambda run_id: 1 <= len(run_id) <= 128 and run_id.isprintable() and "/" not in run_id,
)
MODEL = text("at most 128 printable characters", lambda model: len(model) <= 128 and model.isprintable())
# Another peer's setting must not take all memory of this machine.
CONTEXT = number("a whole number, 0 to 1048576 (0: the model's)", lambda n: type(n) is int and 0 <= n <= 2**20, 1024)
# A smaller share is less than a block of any model, and needs more slots than a message can hold.
FRACTION = number("0, or from 1e-9 to 1 (0.005 is 0.5 %)", lambda x: x == 0 or 1e-9 <= x <= 1, 0.005)
# Beyond float32, torch's optimizers raise errors of their own.
RATE = number("a finite number above 0, at most 1e6", lambda x: 0 < x <= 1e6)
MUON_RATE = number("a finite number, 0 to 1e6", lambda x: 0 <= x <= 1e6)
NOT_NEGATIVE = number("a finite number, 0 or more", lambda x: x >= 0)
# Partners send each other weights, for which int4, int2, topk and pruning are too coarse. Pairs take the plain mean, so
# a robust one would apply to the last round only.
PAIRWISE_ALLOWS: Mapping[str, tuple[object, ...]] = {
    "outer_optimizer": ("sgdm",),
    "round_codec": ("int8", "fp16", "none"),
    "prune_fraction": (0,),
    "sync_schedule": ("fixed",),
    "outer_lr_schedule": ("constant",),
    "inner_moments": ("local",),
    "round_mean": ("weighted",),
    "round_sections": (1,),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that every peer of a run shares, hashed into the run digest."""

    # fmt: off
    run_id: str = setting("p2ptrain", RUN_ID,
        help="Name of the run.",
        why="A first run needs no name. Several runs on one bootstrap node need different names.")
    # Version of frames and round protocol; peers of other versions are refused.
    protocol_version: int = PROTOCOL_VERSION
    # "" for a model given through the Python API.
    model: str = setting("", MODEL, names=tuple(MODELS), cli_default="gpt-demo",
        help="Built-in model, hf:NAME, or package.module:factory.",
        why="Learns something within minutes on one slow core. The built-in models and their parameters: "
        + ", ".join(f"{name} ({size})" for name, size in MODELS.items())
        + ". Their tables have a row for each id of the tokenizer; these numbers are with 98 for the first two, "
        "50,257 for gpt2-124m and 32,000 for the others.")
    # Number of trained parameters and tensors, and the hex SHA-256 of names, shapes, dtypes, which are trained, and
    # frozen values.
    model_layout: str = ""
    # "stdlib" or "text" (every peer brings its own text files), or "" with the Python API.
    data: str = ""
    # "chars", "bytes", "ids" (tokens are prepared, and no peer needs text), or the hex SHA-256 of a tokenizer.json.
    tokenizer: str = "chars"
    vocab_size: int = 98
    context: int = setting(0, CONTEXT, default_text="the model's",
        help="Tokens of a window: the model's longest sequence (block_size).",
        why="Memory and computing of attention grow with its square. Models of transformers allow what their "
        "configuration says, at most; your own models set theirs.")
    total_steps: int = setting(2000, count(0, "(0: the run has no end)"), name="steps", default_text=FROM_MODEL,
        help="Length of the run in inner steps; 0 for no end.",
        why="2,000 steps of the demo model take a few minutes on a laptop. 20,000 for large ones (a guess: 1.3 billion "
        "tokens of each peer).")
    inner_optimizer: str = setting("adamw", choice("adamw", "muon"),
        help="Inner optimizer; muon: for hidden matrices, AdamW else.",
        why="DiLoCo's. Muon was 0.33 nats better after 500 steps with four peers (measured), but takes more computing.")
    lr: float = setting(3e-3, RATE, default_text=FROM_MODEL,
        help="Peak learning rate of the inner AdamW.",
        why="0.003 for the demo model: tuned, with 50 steps of warm-up (simulated, k = 8). The others have their "
        "papers' rates.")
    # 0 means 4 x lr. The command line always sets it, as its default depends on the model.
    muon_lr: float = setting(0.0, MUON_RATE, default_text="from the model, 2 or 4 x --lr",
        help="Peak learning rate of Muon's matrices.",
        why="2 x --lr for GPT-2, DiLoCo's models, Llamas and those of transformers: torch scales Muon's updates so "
        "that AdamW's rate can be used (Moonlight, arXiv 2502.16982), and long runs want less than short ones. 4 x for "
        "the demo model and your own: flat from 4 to 8 times in short runs (simulated).")
    schedule: str = setting("cosine", choice("cosine", "wsd", "constant"),
        help="Learning rates after the warm-up.",
        why="Cosine to a tenth, as nanoGPT. wsd: at the peak until it decays to zero in the last fifth; constant: "
        "at the peak.")
    warmup_steps: int = setting(50, count(0), default_text=FROM_MODEL,
        help="Steps of linear learning rate warm-up.",
        why="50: tuned for the demo model, with the learning rate (simulated, k = 8).")
    beta2: float = setting(0.95, number("at least 0 and below 1", lambda x: 0 <= x < 1), default_text=FROM_MODEL,
        help="Second beta of the inner AdamW.",
        why="0.95, as nanoGPT for GPT-2. For gpt-small, with few tokens a step, 0.99, as in its shakespeare_char.")
    weight_decay: float = setting(0.1, NOT_NEGATIVE,
        help="Weight decay of matrices in the inner optimizer.",
        why="DiLoCo, table 5.")
    grad_clip: float = setting(1.0, NOT_NEGATIVE, default_text="1.0",
        help="Norm to clip gradients to; 0 for none.",
        why="As nanoGPT and DiLoCo.")
    sync_every: int = setting(200, count(1, "(inner steps between two rounds)"), metavar="H", default_text=FROM_MODEL,
        help="Inner steps between two rounds (H in DiLoCo).",
        why="500 for large models: DiLoCo's trade-off between loss and bytes (section 3.1). 200 for the demo model, "
        "whose runs are shorter.")
    sync_schedule: str = setting("fixed", choice("fixed", "grow", "shrink"),
        help="Keep H, or change it between H/2 and 3H/2 over the run.",
        why="Both papers keep H fixed; SPARTA leaves schedules open.")
    round_sections: int = setting(1, number("a whole number, 1 to 64", lambda x: type(x) is int and 1 <= x <= 64),
        help="Sections of the model; each round averages one, in turn.",
        why="Whole rounds, as in DiLoCo. On a slow link give 5, and a fifth of H: a round has a fifth of the bytes and "
        "lands sooner. Where whole rounds took half of their interval, they cost 0.06 nats and five sections 0.02 "
        "(simulated; docs/evidence/late.md). Sections are whole tensors, and the last round averages all.")
    fragment_fraction: float = setting(0.005, FRACTION,
        metavar="P", help="Share of the weights sent at each step; 0 for none.",
        why="0.5 %: the larger of the SPARTA paper's two settings.")
    fragment_selection: str = setting("cyclic", choice("cyclic", "fresh"),
        help="Walk a shuffled partition, or draw at random each step.",
        why="Cyclic keeps peers a little closer than fresh draws, at the same bytes (reproduced: s10).")
    fragment_codec: str = setting("int8", choice("int8", "fp16"),
        help="Encoding of fragments.",
        why="int8, with a scale per block, has half the bytes of fp16.")
    fragment_schedule: str = setting("fixed", choice("fixed", "ramp", "decay"),
        help="Keep P, ramp it per interval, or decay it in the run.",
        why="A ramp from 0 to 2P, as SPARTA proposes, gave the same loss (reproduced: s9); decay is from 2P to 0.")
    fragment_delay: int = setting(0, count(0),
        help="Steps to hold a fragment before sending it.",
        why="A delay (SPARTA's asynchronous mode) never helps. It shows the cost of a slow link.")
    max_staleness: float = setting(0.15, NOT_NEGATIVE,
        help="Discard fragments with P · delay above this; 0 keeps all.",
        why="p · delay = 0.1 costs 0.009 nats (reproduced: s3, one seed). The limit is a guess.")
    topology: str = setting("push", choice("push", "pairs", "groups", "all"),
        help="Selection of the peers that get a fragment.",
        why="A push to a random peer needs no coordination, and mixes as fast per byte as pairs do. SPARTA's is all.")
    fan_out: int = setting(1, count(1),
        help="Number of peers that get each fragment.",
        why="The fewest bytes: two peers take twice as many.")
    averaging: str = setting("parts", choice(*AVERAGINGS),
        default_text="parts, with topk gather",
        help="Average in parts, all-to-all, or in random pairs.",
        why="In parts, each member averages one part for all, and its bytes do not grow with the number of members. "
        "Gather suits two or three peers, and up to 19 with topk. Pairwise (NoLoCo) is experimental: random pairs, no "
        "rounds but the last, and peers that are close, not equal. With it, the outer optimizer, its learning rate and "
        "its momentum default to those of the preset noloco; int4, int2, topk and means other than weighted are "
        "refused.")
    round_codec: str = setting("int8", choice("int8", "int4", "int2", "fp16", "none", "topk"),
        default_text="int8, with muon int4",
        help="Encoding of outer gradients.",
        why="A quarter of fp32's bytes at the same loss (reproduced: codecs). int4 too, at an eighth; untested on "
        "large models. With --inner-optimizer muon the default is int4, but int8 with pairs or pruning. topk is "
        "SparseLoCo's, for AdamW and many rounds: better in 59, worse in 23 (docs/evidence/late.md).")
    round_density: float = setting(0.02, number("above 0 and at most 1 (0.02 is 2 %)", lambda x: 0 < x <= 1),
        default_text="0.02, with topk 0.015625",
        help="Share of the values that codec topk sends.",
        why="64 of each group of 4,096 values. SparseLoCo: 1 to 3 %.")
    prune_fraction: float = setting(0.0, number("at least 0 and below 1 (0.5 is 50 %)", lambda x: 0 <= x < 1),
        help="Share of each neuron's values to leave out (int8).",
        why="Off: pruning half of the values (DiLoCo, table 6) cost 2.2 % of perplexity (reproduced: d14).")
    round_weights: str = setting("tokens", choice("tokens", "equal", "shard"),
        help="Weights of the outer gradients in the mean.",
        why="By tokens trained on: with unequal speeds the loss fell from 2.448 to 2.426 (reproduced: "
        "speeds). DiLoCo, section 6.1, weights by the size of the shard.")
    round_mean: str = setting("weighted", choice(*ROUND_MEANS),
        default_text="weighted, with topk disjoint",
        help="Mean of outer gradients; the last three tolerate a minority of liars.",
        why="Both papers' mean. The disjoint merge was better here (reproduced: d18), but worse in DiLoCo, "
        "section 6.1, with larger models. With topk it is a mean over those who sent a value, as SparseLoCo's. Clipped "
        "(CenteredClip), trimmed and geometric (RFA) bound what a minority of lying members can do, and cost nothing "
        "that was measured without any.")
    round_guard: str = setting("exclude", choice("exclude", "clip", "off"),
        default_text="exclude, in closed runs clip",
        help="Leave out, scale down or accept far too large outer gradients.",
        why="Above 3 x the median norm a member is left out; of two members, none is, and the other is scaled down. "
        "Honest norms differ less where most members have like data: they grow with the steps of an interval, and "
        "tokens count for up to twice their median. Clip scales such a member down, and keeps one whose data is unlike "
        "that of most. Two of eight that lie can then stop training (measured), so it is the default only with "
        "--run-key or --allow, where members are trusted, and with the weighted mean.")
    audit_rate: float = setting(0.1, number("between 0 and 1 (0.1 is one round in ten)", lambda x: 0 <= x <= 1),
        help="Fraction of rounds in which one reducer's work is checked.",
        why="A reducer that lies in every round is found after ten on average; each audit moves one part once more. "
        "0 also turns off the hashing of outer gradients.")
    inner_moments: str = setting("local", choice("local", "averaged"),
        help="Keep Adam's moments, or average them (codec none).",
        why="DiLoCo saw no significant gain from averaging (appendix), which takes three times the bytes.")
    max_missed_rounds: int = setting(1, count(0),
        help="Rounds in a row to miss before adopting the anchor.",
        why="After one missed round a peer goes on (the paper's rule, best with Nesterov); after two it has drifted "
        "too far. Each section is counted alone.")
    max_contributors: int = setting(64, number("a whole number, 2 to 64", lambda x: type(x) is int and 2 <= x <= 64),
        help="Most peers that contribute to a round; larger swarms draw them.",
        why="A mean of 64 gains little from more, and all of them link to each other. The others take the round over.")
    round_timeout_s: float = setting(1800.0, POSITIVE, metavar="SECONDS",
        help="Time limit for one attempt at a round, and for the wait for the run's last round.",
        why="124M parameters in int8 take nine minutes each way at 2 Mbit/s, the slowest link that we test. After half "
        "of it, members with complete outer gradients go on without the rest.")
    outer_optimizer: str = setting("nesterov", choice("nesterov", "sgdm", "sgd", "adam"),
        default_text="nesterov, in pairs sgdm, with topk sgd",
        help="Outer optimizer.",
        why="The best of DiLoCo's figure 6.")
    outer_lr: float = setting(0.7, POSITIVE,
        default_text="0.7, with topk 1.0",
        help="Learning rate of the outer optimizer.",
        why="DiLoCo, table 5, for Nesterov. The others there: sgd 0.5, sgdm 0.3, adam 0.3. With momentum 0.6, 0.7 was "
        "as good as 0.9 with 0.4 (simulated).")
    outer_lr_schedule: str = setting("constant", choice("constant", "cosine"),
        help="Schedule of the outer learning rate.",
        why="DiLoCo saw no effect of a cosine. In runs of 20 rounds it cost 11 % of perplexity (reproduced: d10).")
    outer_momentum: float = setting(0.6, number("at least 0 and below 1", lambda x: 0 <= x < 1),
        default_text="0.6, in pairs 0.5",
        help="Momentum of the outer optimizer; Adam's first beta.",
        why="With 12 rounds 0.024 nats better than DiLoCo's 0.9 (table 5), which the papers' presets keep; with Muon "
        "inside as good. With H from 25 to 50 it was 0.03 to 0.1 nats better than a plain average (simulated).")
    num_shards: int = setting(0, count(0, "(0: every peer trains on all of the text)"),
        help="Text shards, one per peer; 0: each peer reads all text.",
        why="Off: when a peer leaves, its shard is no longer trained on. Some of the papers' experiments need shards.")
    sharding: str = setting("iid", choice("iid", "unbalanced", "clusters"),
        help="Split of the text: random, unequal, or by similarity.",
        why="DiLoCo's experiments default to clusters (k-means of blocks of text), \"the more challenging use case\"; "
        "iid needs no training beforehand.")
    run_seed: int = setting(0, count(0),
        help="Seed of the initial weights, the fragments and the shards.",
        why="Any number. Runs that are compared should share it.")
    # fmt: on

    def __post_init__(self) -> None:
        check_settings(self)
        codec, layout = self.round_codec, self.model_layout
        is_known = re.fullmatch(r"chars|bytes|ids|[0-9a-f]{64}", self.tokenizer) is not None
        self._check("data", self.data in ("stdlib", "text", ""), "one of stdlib, text, ''")
        self._check("tokenizer", is_known, "chars, bytes, ids or the SHA-256 of a tokenizer.json")
        is_vocabulary = 2 <= self.vocab_size <= MAX_VOCAB_SIZE
        self._check("vocab_size", is_vocabulary, f"a number of ids from 2 to {MAX_VOCAB_SIZE:,}")
        is_printable = len(layout) <= 128 and layout.isprintable()
        self._check("model_layout", is_printable, "at most 128 printable characters")
        # Which settings go together.
        can_prune = self.prune_fraction == 0 or codec == "int8"
        self._check("prune_fraction", can_prune, f"0 with round_codec = {codec!r}: only int8 can prune")
        # Other means do not scale with a member's weight.
        can_clip = self.round_guard != "clip" or self.round_mean == "weighted"
        rule = f"exclude or off with round_mean = {self.round_mean!r}: only the weighted mean can clip"
        self._check("round_guard", can_clip, rule)
        can_trim = self.round_mean != "trimmed" or codec != "topk"
        rule = "another mean with round_codec = 'topk': few members send a value at one position, and all are trimmed"
        self._check("round_mean", can_trim, rule)
        # A second moment that a codec rounds to zero makes Adam divide by nearly nothing.
        is_exact = self.inner_moments == "local" or (codec == "none" and self.round_mean == "weighted")
        self._check("inner_moments", is_exact, "local unless round_codec = 'none' and round_mean = 'weighted'")
        is_used = self.muon_lr == 0 or self.inner_optimizer == "muon"
        self._check("muon_lr", is_used, f"left out with inner_optimizer = {self.inner_optimizer!r}")
        has_moments = self.inner_moments == "local" or self.inner_optimizer == "adamw"
        rule = "local with inner_optimizer = 'muon': only Adam's are averaged"
        self._check("inner_moments", has_moments, rule)
        allows = self.round_sections == 1 or (self.inner_moments == "local" and self.outer_optimizer != "adam")
        self._check("round_sections", allows, "1 with inner_moments = 'averaged' or outer_optimizer = 'adam'")
        # Delayed fragments are kept in memory: those of 1 / p steps are a whole model.
        share = self.fragment_fraction
        fits = self.fragment_delay * share <= 1 + 1e-9
        rule = f"at most {1 / (share or 1):.0f} with fragment_fraction = {share:g}: more than a whole model would wait"
        self._check("fragment_delay", fits, rule)
        if self.is_pairwise:
            for name, allowed in PAIRWISE_ALLOWS.items():
                rule = f"{' or '.join(map(str, allowed))} with averaging = 'pairwise'"
                self._check(name, getattr(self, name) in allowed, rule)

    def _check(self, name: str, ok: bool, rule: str) -> None:
        check(ok, name, getattr(self, name), rule)

    @property
    def is_pairwise(self) -> bool:
        """Whether random pairs take outer steps, and the run has one round, at its end."""
        return self.averaging == "pairwise"

    @property
    def digest(self) -> str:
        """Hex SHA-256 of `stated()` in a canonical form: equal exactly if all settings mean the same.

        Settings at their baseline are left out, so that versions with different settings can be in one run, unless it
        uses a setting that one of them lacks.
        """
        canonical = json.dumps(self.stated(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def is_over_at(self, run_step: int) -> bool:
        """Whether the run has a length, and ends at this step or before."""
        return 0 < self.total_steps <= run_step

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
        """Build from untrusted values. Raises ConfigError on unknown keys, wrong types, bad values, another version."""
        run = cls(**cls.checked(values))
        is_ours = run.protocol_version == PROTOCOL_VERSION
        check(is_ours, "protocol_version", run.protocol_version, f"{PROTOCOL_VERSION} with this version of p2ptrain")
        return run

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values, each checked by itself, but not whether they go together.

        Raises ConfigError on unknown keys, wrong types or bad values.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        fields: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"unknown run setting {shortened(name)}; known are: {', '.join(sorted(known))}")
            expected, kind = type(known[name].default), type(value)
            if kind is not expected and not (expected is float and kind is int):
                raise ConfigError(f"run setting {name} = {shortened(value)} must be of type {expected.__name__}")
            fields[name] = as_float(value) if expected is float else value
            if (rule := known[name].metadata.get("rule")) is not None:
                check(rule.fits(fields[name]), name, fields[name], rule.text)
        return fields


def agrees(explicit: Mapping[str, Any], run: RunConfig) -> bool:
    """Whether all settings that the user gave agree with the run's."""
    return all(getattr(run, name) == value for name, value in explicit.items())


def resolve_run(
    explicit: Mapping[str, Any],
    adopted: RunConfig | None,
    origins: Mapping[str, str] | None = None,
    *,
    is_closed: bool = False,
) -> RunConfig:
    """The run's settings: those of the live run, or defaults plus what the user gave.

    Args:
        explicit: the settings that the user gave, by field name of `RunConfig`. With a live run, they need not go
            together with the defaults.
        adopted: the settings of the live run, or None when there is none yet.
        origins: what errors call the settings, such as "--lr"; by default their field names.
        is_closed: whether this peer has a run key or an allow list, which changes defaults of a new run.

    Raises:
        RunMismatchError: an explicit setting differs from the run's.
        ConfigError: an explicit setting is invalid.
    """
    if adopted is None:
        defaults = {
            name: value for _, implied in reversed(list(implied_defaults(explicit))) for name, value in implied.items()
        }
        closed = closed_defaults({**defaults, **explicit}) if is_closed else {}
        return RunConfig.from_dict({**defaults, **muon_defaults(explicit), **closed, **explicit})
    for name, ours in RunConfig.checked(explicit).items():
        theirs = getattr(adopted, name)
        if ours != theirs:
            raise RunMismatchError(
                f"{(origins or {}).get(name, name)}: you gave {ours!r}, but run {adopted.run_id!r} trains with "
                f"{theirs!r}; leave it out to adopt the run's setting, or choose another --run-id"
            )
    return adopted
