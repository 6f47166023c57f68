"""Show the demo: a line for each notice and, on a terminal, a live table of the peers below them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from p2ptrain.monitor.formatting import clock, count, size
from p2ptrain.monitor.peerview import PeerView
from p2ptrain.monitor.swarmview import SwarmView
from p2ptrain.monitor.tables import fitting, loss_text, new_table, status_text
from p2ptrain.monitor.terminal import open_terminal

PROGRESS_LINE_EVERY_S = 10.0
# Terminal width from which all columns are shown; a progress bar is at most twice as wide.
WIDE = 110
NARROW_COLUMNS = ("peer", "step", "loss", "tokens/s", "frag out", "in", "round", "sent", "exch ms", "status")
WIDE_COLUMNS = (*NARROW_COLUMNS[:3], "held-out", *NARROW_COLUMNS[3:6], "skipped", *NARROW_COLUMNS[6:])

Show = Callable[[SwarmView], None]


@contextmanager
def open_display(console: Console, *, plain: bool) -> Iterator[Show]:
    """Yields a function that shows the state of the demo, to be called a few times a second.

    Args:
        console: where to show it.
        plain: print only lines, never wrapped, and a progress line every ten seconds; for files and pipes.
    """
    if plain:
        lines = _Lines(lambda text, style: console.print(Text(text, style), soft_wrap=True))
        yield lines.show_with_progress
        return
    table = _Table(console)
    with open_terminal(console, table) as terminal:
        lines = _Lines(terminal.say)

        def show(swarm: SwarmView) -> None:
            lines.show(swarm)
            table.show(swarm)

        yield show


class _Lines:
    """Prints each notice once."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._next_notice = 0
        self._next_s = PROGRESS_LINE_EVERY_S

    def show(self, swarm: SwarmView) -> None:
        for notice in swarm.notices:
            if notice.number >= self._next_notice:
                self._say(f"{clock(notice.at_s):>5}  {notice.text}", notice.style)
                self._next_notice = notice.number + 1

    def show_with_progress(self, swarm: SwarmView) -> None:
        self.show(swarm)
        elapsed_s = time.time() - swarm.began_s
        if elapsed_s >= self._next_s and swarm.up:
            self._next_s = elapsed_s + PROGRESS_LINE_EVERY_S
            self._say(f"{clock(elapsed_s):>5}  {progress_line(swarm)}", "")


class _Table:
    """A view for `open_terminal`: the last frame that `show` rendered."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._frame: RenderableType = Text()
        self.begun, self.ended, self.changed = (threading.Event() for _ in range(3))

    def show(self, swarm: SwarmView) -> None:
        # Render now: the view changes while the terminal's thread draws.
        self._frame = render(swarm, time.time(), width=self._console.width)
        self.begun.set()
        self.changed.set()

    def frame(self, width: int, height: int) -> RenderableType:
        return self._frame

    def close(self) -> None:
        self.ended.set()
        self.changed.set()


def progress_line(swarm: SwarmView) -> str:
    """The progress of the run in one line."""
    losses = " ".join(f"{peer.loss:.2f}" for peer in swarm.up if peer.loss is not None)
    correlations = swarm.correlations()
    together = f" · correlation {correlations[-1].value:.4f}" if correlations else ""
    speed = sum(peer.tokens_per_s for peer in swarm.up)
    return (
        f"step {swarm.step:,} of {swarm.total_steps:,} · {count(len(swarm.up), 'peer')} · losses {losses}"
        f"{together} · {speed:,.0f} tokens/s"
    )


def render(swarm: SwarmView, now_s: float, *, width: int) -> RenderableType:
    """The progress of the run and a row for each peer; `now_s` in seconds since the epoch, `width` in columns."""
    step = f"step {swarm.step:,}/{swarm.total_steps:,}"
    parts = [clock(now_s - swarm.began_s), count(len(swarm.up), "peer"), step]
    held_out = [peer.held_out_loss for peer in swarm.up if peer.held_out_loss is not None]
    if held_out:
        parts.append(f"held-out {sum(held_out) / len(held_out):.3f}")
    if correlations := swarm.correlations():
        parts.append(f"correlation {correlations[-1].value:.4f}")
    headline = fitting(parts, width)
    headline.stylize("bold")
    columns = WIDE_COLUMNS if width >= WIDE else NARROW_COLUMNS
    table = new_table()
    for name in columns:
        table.add_column(name, justify="left" if name in ("peer", "status") else "right", no_wrap=True)
    for peer in swarm.peers.values():
        cells = _cells(peer, wide=width >= WIDE)
        table.add_row(*(cells.get(name, "") for name in columns), style="dim" if peer.status == "killed" else "")
    bar = ProgressBar(total=swarm.total_steps, completed=swarm.step, width=min(width, 2 * WIDE))
    return Group(headline, bar, Text(), table)  # a bar does not end its line


def _cells(peer: PeerView, *, wide: bool) -> dict[str, str | Text]:
    """The known cells of a row, by column name."""
    doing = peer.doing or peer.status if peer.status == "training" else peer.status
    name = f"{peer.number}  {peer.peer_id[-6:]}" if wide else str(peer.number)
    cells: dict[str, str | Text] = {"peer": name, "status": status_text(doing)}
    if peer.own_steps:
        cells |= {
            "step": f"{peer.step:,}", "loss": loss_text(peer.loss), "held-out": loss_text(peer.held_out_loss),
            "frag out": f"{peer.sent:,}", "in": f"{peer.merged:,}", "skipped": f"{sum(peer.skipped.values()):,}",
            "round": str(peer.round), "sent": size(peer.bytes_sent),
        }  # fmt: skip
        if peer.is_up:
            cells |= {"tokens/s": f"{peer.tokens_per_s:,.0f}", "exch ms": f"{peer.exchange_ms:.1f}"}
    return cells
