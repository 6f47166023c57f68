"""How the demo is shown: a live table on a terminal, lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from p2ptrain.demo.screen import render
from p2ptrain.monitor.formatting import clock, count
from p2ptrain.monitor.swarmview import Happening, SwarmView

PROGRESS_LINE_EVERY_S = 10.0


class Display(Protocol):
    """Where the state of the demo is shown; `update` is called a few times a second."""

    def update(self, swarm: SwarmView) -> None: ...


@contextmanager
def open_display(console: Console, *, plain: bool) -> Iterator[Display]:
    """Yields a display on `console`; when it closes, what it showed last stays."""
    if plain:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield Screen(live)


class Screen:
    """The live table."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, swarm: SwarmView) -> None:
        size = self._live.console.size
        self._live.update(render(swarm, time.time(), width=size.width, height=size.height), refresh=True)


class Lines:
    """A line for everything that happens, and one of progress every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0
        self._next_s = PROGRESS_LINE_EVERY_S

    def update(self, swarm: SwarmView) -> None:
        for happening in swarm.happenings:
            if happening.number >= self._told:
                self._print(happening_line(happening))
                self._told = happening.number + 1
        elapsed_s = time.time() - swarm.began_s
        if elapsed_s >= self._next_s and swarm.up:
            self._next_s = elapsed_s + PROGRESS_LINE_EVERY_S
            self._print(Text(f"{clock(elapsed_s):>5}  {progress_line(swarm)}"))

    def _print(self, text: Text) -> None:
        # Never wrapped: these lines are for files and pipes.
        self._console.print(text, soft_wrap=True)


def happening_line(happening: Happening) -> Text:
    """One scheduled event with its time."""
    return Text.assemble((f"{clock(happening.at_s):>5}", "dim"), "  ", (happening.text, happening.style))


def progress_line(swarm: SwarmView) -> str:
    """Where the run stands, in one line."""
    losses = " ".join(f"{peer.loss:.2f}" for peer in swarm.up if peer.loss is not None)
    correlations = swarm.correlations()
    together = f" · correlation {correlations[-1].value:.4f}" if correlations else ""
    speed = sum(peer.tokens_per_s for peer in swarm.up)
    return (
        f"step {swarm.step:,} of {swarm.total_steps:,} · {count(len(swarm.up), 'peer')} · losses {losses}"
        f"{together} · {speed:,.0f} tokens/s"
    )
