"""`p2ptrain reproduce`: the papers' experiments, small."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import click

from p2ptrain.settings.extras import require_extra


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|FILE]...")
@click.option("--seeds", type=click.IntRange(1, 20), default=1, show_default=True, help="Repeat with so many seeds.")
@click.option("--headline", is_flag=True, help="Only the experiments that stand for the papers' main results.")
@click.option("--list", "list_only", is_flag=True, help="Say what there is, and stop.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="p2ptrain-reproduction",
              show_default=True, metavar="DIR", help="Where records, verdicts and pictures are written.")  # fmt: skip
def reproduce(names: tuple[str, ...], seeds: int, headline: bool, list_only: bool, out: Path) -> None:
    """Run experiments of the SPARTA and DiLoCo papers at a scale that two cores manage.

    Each simulates a few swarms of a small model, prints the paper's figure beside ours, and says in words whether the
    claim holds here. Without NAME all of them run, one after the other, each for some minutes.

    \b
    What large intervals cost with and without SPARTA:
        p2ptrain reproduce s7
    Everything, and a report:
        p2ptrain reproduce --out report
    """
    require_extra("simulate", "p2ptrain reproduce")
    from p2ptrain.simulation.report import progress_bars
    from p2ptrain.simulation.reproduction.experiments import known_reproductions, read_reproduction, run_reproduction
    from p2ptrain.simulation.reproduction.report import format_outcome, markdown_rows, write_outcome
    from p2ptrain.training.output_dir import check_writable

    chosen = [read_reproduction(name) for name in names or known_reproductions()]
    chosen = [reproduction for reproduction in chosen if reproduction.headline or not headline]
    if list_only:
        for reproduction in chosen:
            click.echo(f"{reproduction.name:12} {reproduction.title}")
        return
    logging.getLogger("p2ptrain").setLevel(logging.WARNING)  # what every single peer sees is in its records
    check_writable(out)
    for reproduction in chosen:
        check_writable(out / reproduction.name)
        for arm in reproduction.arms:
            check_writable(out / reproduction.name / arm.directory)
    rows = ["| row | the paper says | paper | here | verdict |", "|---|---|---|---|---|"]
    for reproduction in chosen:
        began_s = time.monotonic()
        with progress_bars([arm for _ in range(seeds) for arm in reproduction.arms]) as on_progress:
            outcome = run_reproduction(reproduction, range(seeds), on_progress)
        write_outcome(outcome, out)
        rows += markdown_rows(outcome)
        (out / "claims.md").write_text("\n".join(rows) + "\n", encoding="utf-8")
        click.echo(f"{reproduction.name}: {format_outcome(outcome)}")
        click.echo(f"{time.monotonic() - began_s:.0f} s; written to {out / reproduction.name}\n")
