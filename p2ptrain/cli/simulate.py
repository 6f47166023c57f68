"""`p2ptrain simulate`: a swarm in one process and virtual time; `p2ptrain reproduce`: the papers' experiments in it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import click

from p2ptrain.cli.options import takes
from p2ptrain.errors import ConfigError
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.table import SETTINGS
from p2ptrain.simulation.experiment import SIMULATED, Experiment, read_experiments

DIRECTORY = click.Path(file_okay=False, path_type=Path)


class SimulateCommand(click.Command):
    """Answers an unknown option that is a setting of a run with the `--set` that gives it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name not in SIMULATED:
                raise
            message = f"No such option {error.option_name!r}; give --set {name}=VALUE"
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None


@click.command(cls=SimulateCommand)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--steps", metavar="N", help="Length of the run in inner steps. [default: 600]")
@click.option("--sync-every", metavar="H", help="Inner steps between two rounds. [default: 100]")
@click.option("--fragment-fraction", metavar="P", help="Share of the weights sent at each step. [default: 0.02]")
@click.option("--set", "extra", multiple=True, metavar="NAME=VALUE", help="Any other run setting; repeatable.")
@takes(Experiment)
@click.option("--out", type=DIRECTORY, default="p2ptrain-simulation", metavar="DIR", help="Output directory.")
def simulate(file: Path | None, out: Path, **options: Any) -> None:
    """Simulate a swarm in this process, in virtual time.

    The peers run the code of `p2ptrain join` on a network in memory. Days on many machines take minutes here, and the
    same seed gives the same records, byte for byte. FILE is a TOML file of settings; it may hold several variants
    ([[arm]] tables), which are simulated and plotted together. Flags override the file.

    \b
    Eight peers, 600 steps, a round every 100:
        p2ptrain simulate
    No fragments, one round at the end, a slow and lossy uplink:
        p2ptrain simulate --fragment-fraction 0 --sync-every 600 --bandwidth 10 --drop 0.3
    Peer 2 crashes at step 200, peer 8 joins at 300, peer 1 is half as fast from 400 on:
        p2ptrain simulate --schedule 200:crash:2,300:join:8,400:speed:1:0.5
    Several variants in one plot:
        p2ptrain simulate examples/simulate.toml --out variants
    32 peers with 125 random faults per hour:
        p2ptrain simulate --peers 32 --step-time 1 --faults-per-hour 125

    \b
    Events of --schedule, each STEP:ACTION:PEER[:VALUE]:
        join, leave, crash (leave without a message), pause, resume, speed (VALUE: factor),
        cut (VALUE: group; peers reach only their own group), mend, narrow (VALUE: Mbit/s), widen
    Kinds of --faults:
        crash (and restart), pause (the whole process), partition (up to half of the peers
        from the rest), slow (a link of 2 Mbit/s)
    Results with faults:
        goodput (inner steps compared with a run without faults), steps lost (in no round),
        rounds, contributors, repairs (states replaced), joins
    Files in --out:
        PEER.jsonl (metrics of each peer, times in virtual seconds), schedule.csv,
        table.csv (losses, correlation, disagreement, bytes), curves.png

    The simulation stops with an error if two peers hold different bytes for one round.
    """
    require_extra("simulate", "p2ptrain simulate")
    settings = _settings(options)
    if file is None:
        title, experiments = "simulation", [Experiment.of(**{"steps": 600, **settings})]
    else:
        title, experiments = read_experiments(file, **settings)

    from p2ptrain.simulation.plot import save_plot
    from p2ptrain.simulation.records import format_run_audits, format_table
    from p2ptrain.simulation.variants import progress_bars, simulate_variants
    from p2ptrain.training.output_dir import check_writable, writing_to

    logging.getLogger("p2ptrain").setLevel(logging.WARNING)  # each peer's own log is in its records
    logging.getLogger("p2ptrain.protocol.rounds.deciding.timeouts").setLevel(logging.ERROR)  # each peer would warn
    directories = [out / experiment.directory if len(experiments) > 1 else out for experiment in experiments]
    for directory in (out, *directories):
        check_writable(directory)
    with progress_bars(experiments) as on_progress:
        variants = simulate_variants(experiments, on_progress)
    click.echo(format_table(variants))  # first, as the disk may be full
    if any(variant.experiment.scheduled_events for variant in variants):
        click.echo(format_run_audits(variants))
    with writing_to(out):
        for variant, directory in zip(variants, directories, strict=True):
            variant.write(directory)
        save_plot(title, variants, out / "curves.png")
    click.echo(f"written to {out}: records, table.csv, schedule.csv, curves.png")


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as arguments of `Experiment.of`."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    for name in {"steps", "sync_every", "fragment_fraction"} & set(given):
        given[name] = SETTINGS[name].parse(given[name], SETTINGS[name].flag)
    for text in given.pop("extra", ()):
        name, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"--set {text}: must be NAME=VALUE, such as round_codec=int8")
        given[name.strip().replace("-", "_")] = _literal(value.strip())
    if "speeds" in given:
        try:
            given["speeds"] = [float(speed) for speed in str(given["speeds"]).split(",")]
        except ValueError:
            raise ConfigError(f"--speeds {given['speeds']}: must be numbers such as 1,0.5") from None
    for name in {"schedule", "faults"} & set(given):
        given[name] = str(given[name]).split(",")
    return given


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|FILE]...")
@click.option("--seeds", type=click.IntRange(1, 20), default=1, help="Seeds per experiment.")
@click.option("--headline", is_flag=True, help="Run only the papers' main results.")
@click.option("--list", "list_only", is_flag=True, help="List the experiments and exit.")
@click.option(
    "--out",
    type=DIRECTORY,
    default="p2ptrain-reproduction",
    metavar="DIR",
    help="Output directory for records, verdicts and plots.",
)
def reproduce(names: tuple[str, ...], seeds: int, headline: bool, list_only: bool, out: Path) -> None:
    """Repeat the SPARTA and DiLoCo papers' experiments, scaled down.

    Each experiment simulates a few swarms with a small model, prints the paper's numbers beside ours, and states
    whether the paper's claim holds here. Without NAME all experiments run, one after the other, for some minutes each.

    \b
    One experiment: the cost of large intervals, with and without SPARTA:
        p2ptrain reproduce s7
    All experiments, into another directory:
        p2ptrain reproduce --out report
    """
    from p2ptrain.simulation.reproduction import experiments

    chosen = [experiments.read_reproduction(name) for name in names or experiments.known_reproductions()]
    chosen = [reproduction for reproduction in chosen if reproduction.headline or not headline]
    if list_only:
        for reproduction in chosen:
            click.echo(f"{reproduction.name:12} {reproduction.title}")
        return
    require_extra("simulate", "p2ptrain reproduce")
    from p2ptrain.simulation.variants import progress_bars
    from p2ptrain.training.output_dir import check_writable, writing_to

    logging.getLogger("p2ptrain").setLevel(logging.WARNING)  # each peer's own log is in its records
    check_writable(out)
    for reproduction in chosen:
        check_writable(out / reproduction.name)
        for variant in reproduction.variants:
            check_writable(out / reproduction.name / variant.directory)
    rows: list[dict[str, str]] = []
    for reproduction in chosen:
        began_s = time.monotonic()
        with progress_bars([variant for _ in range(seeds) for variant in reproduction.variants]) as on_progress:
            outcome = experiments.run_reproduction(reproduction, range(seeds), on_progress)
        click.echo(f"{reproduction.name}: {experiments.format_outcome(outcome)}")  # first, as the disk may be full
        rows += experiments.claim_rows(outcome)
        with writing_to(out):
            experiments.write_outcome(outcome, out)
            (out / "claims.md").write_text(experiments.as_markdown(rows), encoding="utf-8")
        click.echo(f"{time.monotonic() - began_s:.0f} s; written to {out / reproduction.name}\n")
