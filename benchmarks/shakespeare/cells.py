"""The runs that are compared, and the settings of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PEERS, BATCH, CONTEXT = 4, 12, 64
# Ten rounds in 500 steps. A round took less than a tenth of it on idle cores, as `p2ptrain estimate` advises.
H = 50
SEEDS = (0, 1, 2)
# Evaluations of a run, beside the one of its end.
CURVE_POINTS = 20
# Of nanoGPT's config/train_shakespeare_char.py, with the changes of its README for a CPU. Muon's rate is the default:
# 4 x --lr.
NANOGPT = {
    "lr": 1e-3, "warmup_steps": 100, "schedule": "cosine", "beta2": 0.99, "weight_decay": 0.1, "grad_clip": 1.0
}  # fmt: skip
# Measured in simulations with H from 25 to 50; DiLoCo's 0.9 overshoots with so few rounds.
OUTER = {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.6}

# A large batch is what data parallel computes, in one process: the mean gradient of four peers' windows at every step.
ALONE, LARGE, PARALLEL, TOGETHER = "alone", "large batch", "data parallel", "peers"
# The nodes and the protocol of four peers, in one process, on a network in memory and in virtual time.
SIMULATED = "simulated peers"
# The two of the grid that are run first: the defaults, and what was best at equal bytes in simulations.
FIRST = (("adamw", "int8", 0.005), ("muon", "int4", 0.005))
# The four methods of the picture of bytes are data parallel, the first of FIRST, simulated, and its two halves.
ROUNDS_ALONE, GOSSIP_ALONE = ("adamw", "int8", 0.0), ("adamw", "", 0.005)
GRID = tuple(itertools.product(("adamw", "muon"), ("int8", "int4"), (0.0, 0.005, 0.02)))


@dataclass(frozen=True, order=True)
class Cell:
    """One run. `codec` of rounds and `p` are of peers only; without a codec they average once, at the end."""

    arm: str
    optimizer: str
    steps: int
    seed: int
    codec: str = ""
    p: float = 0.0

    @property
    def name(self) -> str:
        """Its directory, and its run id."""
        peers = f"-{self.codec or 'gossip'}-p{100 * self.p:g}" if self.is_swarm else ""
        return f"{self.arm.replace(' ', '-')}-{self.optimizer}-{self.steps}{peers}-seed{self.seed}"

    @property
    def is_swarm(self) -> bool:
        """Whether it is of four peers of a run."""
        return self.arm in (TOGETHER, SIMULATED)

    @property
    def peers(self) -> int:
        return PEERS if self.arm == PARALLEL or self.is_swarm else 1

    @property
    def batch(self) -> int:
        """Windows of a process in a step."""
        return PEERS * BATCH if self.arm == LARGE else BATCH

    @property
    def eval_every(self) -> int:
        return self.steps // CURVE_POINTS

    @property
    def settings(self) -> dict[str, object]:
        """The settings of the run, by their names in `RunConfig`."""
        found: dict[str, object] = {
            "total_steps": self.steps, "inner_optimizer": self.optimizer, "run_seed": self.seed, **NANOGPT
        }  # fmt: skip
        if self.codec:
            return {
                **found, "sync_every": H, "round_codec": self.codec, "fragment_fraction": self.p, **OUTER
            }  # fmt: skip
        # One round at the end, which is a plain average, and leaves the weights of a peer alone as they are.
        return {**found, "sync_every": self.steps, "round_codec": "none", "fragment_fraction": self.p}


def stages() -> Iterator[tuple[int, list[Cell]]]:
    """All runs, in the order of their importance. The number of a stage is its `--stage`."""
    rest = [cell for cell in GRID if cell not in FIRST]
    # What one of four peers has without the others' help: 500 steps; and as many tokens as all four together: 2000.
    yield 1, [*_apart(ALONE, 2000), *_apart(ALONE, 500)]
    yield 2, _apart(LARGE, 500)
    yield 3, _together(500, FIRST)
    yield 4, _together(2000, FIRST)
    yield 5, _together(500, rest)
    yield 6, _apart(PARALLEL, 500)
    # At four times the tokens, for comparison with the fourth stage.
    yield 7, _apart(LARGE, 2000)
    yield 8, _together(2000, rest)
    # Simulated: all of stages 3 and 5, and stage 4.
    yield 9, _together(500, [*FIRST, *rest], SIMULATED)
    yield 10, _together(2000, FIRST, SIMULATED)
    yield 11, _together(2000, [ROUNDS_ALONE, GOSSIP_ALONE], SIMULATED)


def _apart(arm: str, steps: int) -> list[Cell]:
    return [Cell(arm, optimizer, steps, seed) for seed in SEEDS for optimizer in ("adamw", "muon")]


def _together(steps: int, grid: Sequence[tuple[str, str, float]], arm: str = TOGETHER) -> list[Cell]:
    return [Cell(arm, optimizer, steps, seed, codec, p) for seed in SEEDS for optimizer, codec, p in grid]
