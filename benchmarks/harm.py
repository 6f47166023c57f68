"""`python -m benchmarks.harm`: what lying members cost, by attack and by the mean that rounds use.

Eight simulated peers train the demo model, with the nodes of `p2ptrain join` in virtual time. Liars run the same nodes:
only what they encode for a round or a fragment is replaced, so everything they send is well formed. A run has 300 steps
with H = 25: 12 rounds and 21 s of one core, long enough for the loss to fall from 4.6 to 2.6 nats, and all runs fit
into an hour. Its result is the held-out loss of the honest peers after the last round, whose outcome all adopt.

Each run is one line of `docs/understand/security/harm.jsonl`; runs that are there are not repeated. After a change of
what rounds or fragments do, remove the file. `--report` makes the table of `docs/understand/security.md` and its
picture of the lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks import kept_runs
from p2ptrain.algorithms.codec import Codec
from p2ptrain.protocol.exchange.types import Push, Snapshot
from p2ptrain.protocol.gossip import Gossip
from p2ptrain.protocol.rounds.moving.snapshot import OwnContribution, SnapshotTaker
from p2ptrain.simulation.experiment import Experiment
from p2ptrain.simulation.swarm import simulate

PEERS, STEPS, H, FRACTION = 8, 300, 25, 0.02
# Rounds by which stale weights are behind.
STALE_ROUNDS = 3
# Sign-flipped weights go this many times the honest peers' distance away, at the last round, from their own. Receivers
# refuse what is farther than 4 × the recent median distance of fragments.
FLIP_DISTANCES = 2.0
# Noise in rounds has this many times the size of the liar's own outer gradient: the most that a bound of 3 × the
# median norm lets through, with room for members that differ.
NOISE_FACTOR = 2.0
MEANS = ("weighted", "clipped", "trimmed", "geometric")
ATTACKS = {
    "none": "no attacker",
    "times -5": "rounds: its outer gradient, times -5",
    "flipped": "fragments: its weights towards those with flipped signs, as far as receivers accept",
    "zeros": "rounds and fragments of zeros",
    "noise": "rounds: noise of twice the norm; fragments: its weights and noise of the same size",
    "copy": "rounds and fragments of the first honest peer, as its own",
    "stale": f"rounds and fragments of its own state {STALE_ROUNDS} rounds before",
}
ROOT = Path(__file__).parent.parent
RESULTS, PICTURE, PAGE = (
    ROOT / "docs/understand" / name for name in ("security/harm.jsonl", "security/harm.png", "security.md")
)
BEGIN, END = "<!-- harm: made by python -m benchmarks.harm --report -->", "<!-- end of harm -->"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: `liars` of the eight peers, the last ones, attack."""

    attack: str
    liars: int
    mean: str
    seed: int


class Liars:
    """What the liars of one run know and send. The honest peers are watched, as a liar with all fragments could.

    Tensors are clones, and belong to this object.
    """

    def __init__(self, cell: Cell) -> None:
        self.attack = cell.attack
        self.liars = {f"peer-{number}" for number in range(PEERS - cell.liars, PEERS)}
        self.victim = "peer-0"
        self._rng = np.random.default_rng(cell.seed)
        self._snapshots: dict[str, deque[torch.Tensor]] = {}
        self._last_push: Push | None = None

    def note_snapshot(self, peer_id: str, weights: torch.Tensor) -> None:
        self._snapshots.setdefault(peer_id, deque(maxlen=STALE_ROUNDS + 1)).append(weights.clone())

    def note_push(self, peer_id: str, push: Push) -> None:
        if peer_id == self.victim:
            self._last_push = dataclasses.replace(push, values=push.values.clone())

    def gradient(self, peer_id: str, honest: np.ndarray, anchor: np.ndarray, start: int) -> np.ndarray:
        """The outer gradient of a chunk, (n, 64) float32, that a liar sends instead of `honest`."""
        stop = start + len(honest)
        match self.attack:
            case "times -5":
                return np.float32(-5) * honest
            case "zeros":
                return np.zeros_like(honest)
            case "noise":
                noise = self._rng.standard_normal(honest.shape, np.float32)
                return noise * np.float32(NOISE_FACTOR * np.sqrt(np.mean(honest**2)))
            case "copy" if self.victim in self._snapshots:
                copied: np.ndarray = anchor - self._snapshots[self.victim][-1][start:stop].numpy()
                return copied
            case "stale":
                stale: np.ndarray = anchor - self._snapshots[peer_id][0][start:stop].numpy()
                return stale
        return honest

    def push(self, peer_id: str, honest: Push) -> Push:
        """The fragment that a liar sends instead of `honest`."""
        values, blocks = honest.values, honest.plan.plan.blocks
        match self.attack:
            case "flipped" if self._distance(peer_id) > 0:
                size = float(values.square().mean().sqrt())
                lie = values * (1 - FLIP_DISTANCES * self._distance(peer_id) / max(size, 1e-9))
            case "zeros":
                lie = torch.zeros_like(values)
            case "noise":
                noise = torch.from_numpy(self._rng.standard_normal(tuple(values.shape), np.float32))
                lie = values + noise * values.square().mean().sqrt()
            case "copy" if self._last_push is not None:
                return dataclasses.replace(
                    honest,
                    plan=self._last_push.plan,
                    values=self._last_push.values.clone(),
                    epoch=self._last_push.epoch,
                )
            case "stale" if peer_id in self._snapshots:
                lie = self._snapshots[peer_id][0][torch.from_numpy(np.asarray(blocks))].clone()
            case _:
                return honest
        return dataclasses.replace(honest, values=lie)

    def _distance(self, peer_id: str) -> float:
        """The honest peers' median distance (rms) from a liar's weights at the last round; 0 before the first."""
        own = self._snapshots.get(peer_id)
        if own is None:
            return 0.0
        others = [taken[-1] for peer, taken in self._snapshots.items() if peer not in self.liars]
        return statistics.median(float((one - own[-1]).square().mean().sqrt()) for one in others) if others else 0.0


class LyingContribution(OwnContribution):
    """Encodes a liar's outer gradient, and leaves its own weights as if it had sent the honest one."""

    def __init__(self, honest: OwnContribution, liars: Liars, peer_id: str) -> None:
        super().__init__(honest.snapshot, honest.grid, error=honest.error, next_error=honest.next_error)
        self._liars = liars
        self._peer_id = peer_id

    def encode(self, anchor: np.ndarray, codec: Codec, bounds: tuple[int, int]) -> None:
        weights, (start, stop) = self.snapshot.weights.numpy(), bounds
        if start not in self.chunks:
            honest = np.subtract(anchor[start:stop], weights[start:stop])
            lie = self._liars.gradient(self._peer_id, honest, anchor[start:stop], start)
            weights[start:stop] = honest
            self.chunks[start] = codec.encode(lie)

    def land(self, codec: Codec, start: int, change: np.ndarray, averaged: np.ndarray) -> None:
        self.chunks[start] = codec.encode(self.snapshot.weights.numpy()[start : start + len(change)])
        super().land(codec, start, change, averaged)


@contextlib.contextmanager
def lying(liars: Liars) -> Iterator[None]:
    """In the block, the liars' nodes send lies."""
    arrive, send = SnapshotTaker.arrive, Gossip._send

    def lying_arrive(taker: SnapshotTaker, snapshot: Snapshot) -> None:
        peer_id = taker._context.peer_id
        liars.note_snapshot(peer_id, snapshot.weights)
        arrive(taker, snapshot)
        if peer_id in liars.liars and taker.own is not None:
            taker.own = LyingContribution(taker.own, liars, peer_id)

    async def lying_send(gossip: Gossip, push: Push) -> None:
        peer_id = gossip._context.peer_id
        liars.note_push(peer_id, push)
        await send(gossip, liars.push(peer_id, push) if peer_id in liars.liars else push)

    # By name, as types do not let methods be replaced.
    setattr(SnapshotTaker, "arrive", lying_arrive)  # noqa: B010
    setattr(Gossip, "_send", lying_send)  # noqa: B010
    try:
        yield
    finally:
        setattr(SnapshotTaker, "arrive", arrive)  # noqa: B010
        setattr(Gossip, "_send", send)  # noqa: B010


def run(cell: Cell, steps: int = STEPS) -> dict[str, Any]:
    """Simulate one cell: its settings, the honest peers' loss (null if it diverged), rounds, fragments, and seconds."""
    began_s = time.perf_counter()
    experiment = Experiment.of(
        peers=PEERS, steps=steps, sync_every=H, fragment_fraction=FRACTION, eval_every=steps, seed=cell.seed,
        round_mean=cell.mean,
    )  # fmt: skip
    liars = Liars(cell)
    with lying(liars):
        records = simulate(experiment)
    final, fragments = [], {"merged": 0, "clipped": 0}
    for events in records.events.values():
        if events[0]["peer_id"] in liars.liars:
            continue
        final.append([event["loss"] for event in events if event["event"] == "eval"][-1])
        for event in events:
            if event["event"] == "fragments":
                fragments["merged"] += event["merged"]
                fragments["clipped"] += event["skipped"].get("clipped", 0)
    contributed = [len(liars.liars.intersection(event["contributors"])) for event in records.rounds]
    return {
        **dataclasses.asdict(cell),
        "steps": steps,
        "loss": None if None in final else round(statistics.fmean(final), 5),
        "rounds": len(contributed),
        "lies_in_rounds": sum(contributed),
        **fragments,
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def read_results(path: Path) -> dict[Cell, dict[str, Any]]:
    """The runs in a file of results, each once: the last counts."""
    return {_cell(row): row for row in kept_runs.read(path)}


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(row["attack"], row["liars"], row["mean"], row["seed"])


def differences(results: dict[Cell, dict[str, Any]], attack: str, liars: int, mean: str) -> list[float]:
    """By seed, the loss beyond that of the default mean without attacker; infinite if it diverged."""
    found = []
    for cell, row in sorted(results.items(), key=lambda item: item[0].seed):
        base = results.get(Cell("none", 0, "weighted", cell.seed))
        if (cell.attack, cell.liars, cell.mean) == (attack, liars, mean) and base is not None:
            found.append(math.inf if row["loss"] is None else row["loss"] - base["loss"])
    return found


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Markdown: a row for each attack and number of liars, a column for each mean."""
    lines = [f"| attack | liars | {' | '.join(MEANS)} |", "|---|---|" + "---|" * len(MEANS)]
    for attack, liars in rows_of(results):
        cells = [_shown(differences(results, attack, liars, mean)) for mean in MEANS]
        lines.append(f"| {attack} | {liars} of {PEERS} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(results: dict[Cell, dict[str, Any]]) -> list[tuple[str, int]]:
    """Attacks and numbers of liars with results, in the order of `ATTACKS`."""
    order = list(ATTACKS)
    return sorted({(cell.attack, cell.liars) for cell in results}, key=lambda row: (order.index(row[0]), row[1]))


def _shown(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:+.3f} ({min(values):+.3f} to {max(values):+.3f})"


def draw(results: dict[Cell, dict[str, Any]], path: Path) -> None:
    """A point for each attack and mean, with lines from the least to the largest of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(results)
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(rows) + 1.6))
    for i, (mean, colour) in enumerate(zip(MEANS, ("#444444", "#1f77b4", "#d95f02", "#1b9e77"), strict=True)):
        for y, (attack, liars) in enumerate(rows):
            values = differences(results, attack, liars, mean)
            at = y + 0.18 * (i - 1.5)
            if values and all(map(math.isfinite, values)):
                axes.plot([min(values), max(values)], [at, at], color=colour, linewidth=1.5)
                axes.plot(statistics.fmean(values), at, "o", color=colour, markersize=5)
            elif values:
                axes.annotate("diverged →", (0.995, at), xycoords=("axes fraction", "data"), ha="right", va="center",
                              color=colour, fontsize=8)  # fmt: skip
    for i, (mean, colour) in enumerate(zip(MEANS, ("#444444", "#1f77b4", "#d95f02", "#1b9e77"), strict=True)):
        axes.plot([], [], "o-", color=colour, label=mean, zorder=i)
    axes.axvspan(-0.02, 0.02, color="#dddddd", alpha=0.6, zorder=0)
    axes.axvline(0, color="#888888", linewidth=0.8, zorder=0)
    axes.set_xscale("symlog", linthresh=0.05)
    axes.margins(x=0.04)
    axes.set_xticks(ticks := [-1, -0.1, -0.02, 0, 0.02, 0.1, 1, 10], [f"{tick:+g}" if tick else "0" for tick in ticks])
    axes.minorticks_off()
    for y in range(len(rows) - 1):
        axes.axhline(y + 0.5, color="#eeeeee", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(rows)), [attack if not n else f"{attack}, {n} of {PEERS}" for attack, n in rows])
    axes.invert_yaxis()
    axes.set_xlabel("loss beyond that of the default without attacker, nats (linear to 0.05; grey: ±0.02)")
    axes.legend(title="--round-mean", loc="upper center", bbox_to_anchor=(0.4, 1 + 0.8 / (0.42 * len(rows) + 1.6)),
                ncols=len(MEANS), frameon=False)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def report(results: dict[Cell, dict[str, Any]]) -> None:
    """Write the picture, and the table between its marks in the page."""
    draw(results, PICTURE)
    picture = f"![Loss beyond that without liars, by attack and mean](security/{PICTURE.name})"
    kept_runs.write_between(PAGE, BEGIN, END, [table(results), picture])


def cells(attacks: Sequence[str], liars: Sequence[int], means: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """The cells of a subset, all without attackers first."""
    found = [Cell("none", 0, mean, seed) for seed, mean in itertools.product(seeds, means)] if "none" in attacks else []
    others = [attack for attack in attacks if attack != "none"]
    return found + [
        Cell(attack, count, mean, seed) for seed, attack, count, mean in itertools.product(seeds, others, liars, means)
    ]


def _many(choices: Sequence[Any], **options: Any) -> Callable[[Any], Any]:
    kind = click.Choice(list(choices)) if isinstance(choices[0], str) else int
    return click.option(options.pop("name"), default=list(choices), multiple=True, type=kind, **options)


@click.command("python -m benchmarks.harm")
@_many(list(ATTACKS), name="--attack", help="An attack; may be repeated. All by default.")
@_many((1, 2), name="--liars", help="How many of the eight lie; may be repeated.")
@_many(MEANS, name="--mean", help="The run's --round-mean; may be repeated.")
@_many((0, 1, 2), name="--seed", help="May be repeated.")
@click.option("--jobs", default=os.cpu_count() or 1, help="Runs at once, one core each.", show_default=True)
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="File of one JSON line for each run.")
@click.option("--again", is_flag=True, help="Repeat runs that are in the file.")
@click.option(
    "--report", "only_report", is_flag=True, help="Run nothing: write table and picture, and print the table."
)
def main(
    attack: tuple[str, ...], liars: tuple[int, ...], mean: tuple[str, ...], seed: tuple[int, ...], jobs: int,
    results: Path, again: bool, only_report: bool,
) -> None:  # fmt: skip
    """Measure what lying members cost, and continue where an earlier call stopped."""
    done = read_results(results)
    if only_report:
        report(done)
        click.echo(table(done))
        return
    wanted = [cell for cell in cells(attack, liars, mean, seed) if again or cell not in done]
    if again:
        kept_runs.drop(results, lambda row: _cell(row) in wanted)
    click.echo(f"{len(wanted)} runs")
    # Each run sets torch's state of the process; fork would not copy its threads.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run, cell) for cell in wanted]
        for future in as_completed(futures):
            click.echo(json.dumps(future.result()))
            kept_runs.append(results, future.result())


if __name__ == "__main__":
    main()
