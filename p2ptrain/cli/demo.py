"""`p2ptrain demo`: see it work."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from p2ptrain.settings.extras import require_extra

FAILED = 1


@click.command()
@click.option("--peers", type=click.IntRange(2, 64), default=4, show_default=True, help="Peers that train at once.")
@click.option(
    "--minutes", type=click.FloatRange(min=0.25, max=24 * 60), default=2.0, show_default=True,
    help="About how long it should take.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Another seed, another run.")
@click.option(
    "--out", default="p2ptrain-demo", show_default=True, metavar="DIR",
    help="Where everything is written; an earlier demo there is replaced.",
)  # fmt: skip
@click.option("--plain", is_flag=True, help="Print lines instead of a live table; the default without a terminal.")
def demo(peers: int, minutes: float, seed: int, out: str, plain: bool) -> None:
    """Watch peers train together on this machine, lose one, and gain one.

    Every peer is a process of its own, as `p2ptrain join` starts it, with its own libp2p daemon, on 127.0.0.1.
    Together they train a small GPT on the source text of Python's own library. On the way one is killed, and later
    another joins; training goes on. At the end: losses, correlation, bytes, a picture, and the commands to do the
    same across machines. Ctrl-C ends everything.

    \b
    The whole story in two minutes:
        p2ptrain demo
    Three peers, a quarter of an hour, results elsewhere:
        p2ptrain demo --peers 3 --minutes 15 --out long-demo
    """
    require_extra("simulate", "p2ptrain demo")
    began_s = time.time()
    click.echo(f"p2ptrain demo: {peers} peers train a small GPT on the source of Python's library.")
    click.echo("Each is a process with its own libp2p daemon, on 127.0.0.1. Getting ready …")

    from rich.console import Console

    from p2ptrain.demo.demo import DemoOptions, run_demo
    from p2ptrain.demo.orchestrator import DemoFailedError
    from p2ptrain.monitor.terminal import is_worth_it

    console = Console()
    options = DemoOptions(peers, minutes, seed, Path(out), plain or not is_worth_it(console, os.environ))
    try:
        run_demo(options, console, began_s=began_s)
    except DemoFailedError as error:
        click.echo(f"p2ptrain: error: {error}", err=True)
        sys.exit(FAILED)
