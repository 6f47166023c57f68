"""Shows the demo: a line for each notice and, on a terminal, a live table of the peers below the lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console, Group, RenderableType
from rich.text import Text

from p2ptrain.formatting import clock, count, size
from p2ptrain.monitor.peerview import PeerView
from p2ptrain.monitor.swarmview import SwarmView, Tone
from p2ptrain.monitor.terminal import Drawing, Row, loss_text, open_terminal, peer_table, progress

PROGRESS_LINE_EVERY_S = 10.0
TONE_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.BAD: "bold red"}
# The first of these that fit are shown.
COLUMNS = (
    "step", "loss", "tokens/s", "frag out", "in", "rounds", "sent", "exch ms", "held-out", "skipped", "id",
)  # fmt: skip

Show = Callable[[SwarmView], None]


@contextmanager
def open_display(console: Console, *, plain: bool) -> Iterator[Show]:
    """Yield a function that shows the state of the demo; call it a few times a second. It prints each notice once.

    Args:
        console: where to show it.
        plain: print only lines, never wrapped, and a progress line every ten seconds; for files and pipes.
    """
    frame: RenderableType = Text()
    drawing = Drawing(lambda width, height: frame)
    next_notice, next_s = 0, PROGRESS_LINE_EVERY_S

    def print_line(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    with ExitStack() as stack:
        say = print_line if plain else stack.enter_context(open_terminal(console, drawing)).say

        def show(swarm: SwarmView) -> None:
            nonlocal frame, next_notice, next_s
            for notice in swarm.notices:
                if notice.number >= next_notice:
                    say(f"{clock(notice.at_s):>5}  {notice.text}", TONE_STYLES[notice.tone])
                    next_notice = notice.number + 1
            elapsed_s = time.time() - swarm.began_s
            if not plain:
                # Render now: the swarm changes while the terminal's thread draws.
                frame = render(swarm, time.time(), width=console.width)
                drawing.update()
            elif elapsed_s >= next_s and swarm.up:
                next_s = elapsed_s + PROGRESS_LINE_EVERY_S
                say(f"{clock(elapsed_s):>5}  {progress_line(swarm)}")

        yield show


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
    if held_out := [peer.held_out_loss for peer in swarm.up if peer.held_out_loss is not None]:
        parts.append(f"held-out {sum(held_out) / len(held_out):.3f}")
    if correlations := swarm.correlations():
        parts.append(f"correlation {correlations[-1].value:.4f}")
    rows = [_row(peer) for peer in swarm.peers.values()]
    return Group(*progress(parts, swarm.step, swarm.total_steps, width), peer_table(rows, COLUMNS, width))


def _row(peer: PeerView) -> Row:
    numbers = {"id": peer.peer_id[-6:]}
    if peer.own_steps:
        numbers |= {
            "step": f"{peer.step:,}",
            "loss": loss_text(peer.loss),
            "held-out": loss_text(peer.held_out_loss),
            "frag out": f"{peer.sent:,}",
            "in": f"{peer.merged:,}",
            "skipped": f"{sum(peer.skipped.values()):,}",
            "rounds": str(peer.round),
            "sent": size(peer.bytes_sent),
        }
        if peer.is_up:
            numbers |= {"tokens/s": f"{peer.tokens_per_s:,.0f}", "exch ms": f"{peer.exchange_ms:.1f}"}
    return Row(str(peer.number), peer.doing, peer.state, numbers)
