"""`p2ptrain demo`: train with several peers on this machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from p2ptrain.cli.options import NumberRange
from p2ptrain.settings.extras import require_extra

FAILED = 1


@click.command()
@click.option("--peers", type=click.IntRange(2, 64), default=4, help="Number of peers.")
@click.option("--minutes", type=NumberRange(min=0.25, max=24 * 60), default=2.0, help="Approximate duration.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, help="Seed of the run.")
@click.option("--out", default="p2ptrain-demo", metavar="DIR", help="Output directory; replaces an earlier demo.")
@click.option("--plain", is_flag=True, help="Print lines instead of a live table; default without a terminal.")
def demo(peers: int, minutes: float, seed: int, out: str, plain: bool) -> None:
    """Train with several peers on this machine.

    Each peer is a `p2ptrain join` process with its own libp2p daemon, on 127.0.0.1. They train a small GPT on the
    source code of Python's library. During the run one peer is killed, and later another one joins; training goes on.
    At the end the demo prints losses, correlation, bytes and the commands to do the same across machines, and saves a
    plot. Ctrl-C stops all processes.

    \b
    Four peers, two minutes:
        p2ptrain demo
    Three peers, 15 minutes, another output directory:
        p2ptrain demo --peers 3 --minutes 15 --out long-demo
    """
    require_extra("simulate", "p2ptrain demo")
    began_s = time.time()
    click.echo(f"p2ptrain demo: {peers} peers train a small GPT on the source code of Python's library.")
    click.echo("Each is a process with its own libp2p daemon, on 127.0.0.1. Starting …")

    from rich.console import Console

    from p2ptrain.demo.demo import run_demo
    from p2ptrain.demo.orchestrator import DemoFailedError
    from p2ptrain.monitor.terminal import is_worth_it

    console = Console()
    plain = plain or not is_worth_it(console, os.environ)
    try:
        run_demo(console, peers=peers, minutes=minutes, seed=seed, out=Path(out), plain=plain, began_s=began_s)
    except DemoFailedError as error:
        click.echo(f"p2ptrain: error: {error}", err=True)
        sys.exit(FAILED)
