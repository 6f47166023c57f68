"""`p2ptrain reproduce`: the papers' experiments at small scale."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import click

from p2ptrain.settings.extras import require_extra


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|FILE]...")
@click.option("--seeds", type=click.IntRange(1, 20), default=1, show_default=True, help="Seeds per experiment.")
@click.option("--headline", is_flag=True, help="Run only the papers' main results.")
@click.option("--list", "list_only", is_flag=True, help="List the experiments and exit.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="p2ptrain-reproduction",
    show_default=True,
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
    from p2ptrain.training.output_dir import check_writable

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
        experiments.write_outcome(outcome, out)
        rows += experiments.claim_rows(outcome)
        (out / "claims.md").write_text(experiments.as_markdown(rows), encoding="utf-8")
        click.echo(f"{reproduction.name}: {experiments.format_outcome(outcome)}")
        click.echo(f"{time.monotonic() - began_s:.0f} s; written to {out / reproduction.name}\n")
