"""The live table: progress above, one row per peer, what happened below."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2ptrain.monitor.formatting import clock, count, size
from p2ptrain.monitor.peerview import PeerView
from p2ptrain.monitor.swarmview import Happening, SwarmView
from p2ptrain.monitor.tables import loss_text, new_table, status_text

# From this width on there is room for everything.
WIDE = 110
MIN_HAPPENINGS = 3


def render(swarm: SwarmView, now_s: float, *, width: int, height: int) -> RenderableType:
    """The whole picture.

    Args:
        swarm: what to show.
        now_s: seconds since the epoch.
        width: of the terminal, in columns.
        height: of the terminal, in lines; old scheduled events make room.
    """
    table = _table(swarm, wide=width >= WIDE)
    room = height - len(swarm.peers) - 7
    happenings = swarm.happenings[-max(MIN_HAPPENINGS, room) :]
    return Group(
        _headline(swarm, now_s),
        _progress(swarm, width),
        Text(),  # a bar does not end its line
        table,
        Text(),
        *(_happening(happening, width) for happening in happenings),
    )


def _headline(swarm: SwarmView, now_s: float) -> Text:
    step = f"step {swarm.step:,}/{swarm.total_steps:,}"
    parts = [clock(now_s - swarm.began_s), count(len(swarm.up), "peer"), step]
    held_out = [peer.held_out_loss for peer in swarm.up if peer.held_out_loss is not None]
    if held_out:
        parts.append(f"held-out {sum(held_out) / len(held_out):.3f}")
    correlations = swarm.correlations()
    if correlations:
        parts.append(f"correlation {correlations[-1].value:.4f}")
    return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")


def _progress(swarm: SwarmView, width: int) -> RenderableType:
    return ProgressBar(total=swarm.total_steps, completed=swarm.step, width=min(width, 2 * WIDE))


def _table(swarm: SwarmView, *, wide: bool) -> Table:
    table = new_table()
    table.add_column("peer", no_wrap=True)
    for name in ("step", "loss", *(["held-out"] if wide else []), "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("frag out", "in", *(["skipped"] if wide else []), "round", "sent", "exch ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for peer in swarm.peers.values():
        table.add_row(*_row(peer, wide=wide), style="dim" if peer.status == "killed" else "")
    return table


def _row(peer: PeerView, *, wide: bool) -> list[str | Text]:
    status = status_text(peer.doing or peer.status if peer.status == "training" else peer.status)
    name = f"{peer.number}  {peer.peer_id[-6:]}" if wide else str(peer.number)
    if peer.own_steps == 0:
        return [name, *[""] * (10 if wide else 8), status]
    speed = f"{peer.tokens_per_s:,.0f}" if peer.is_up else ""
    exchange = f"{peer.exchange_ms:.1f}" if peer.is_up else ""
    fragments = [f"{number:,}" for number in (peer.sent, peer.merged, sum(peer.skipped.values()))]
    cells = [
        name, f"{peer.step:,}", loss_text(peer.loss), loss_text(peer.held_out_loss), speed, *fragments,
        str(peer.round), size(peer.bytes_sent), exchange,
    ]  # fmt: skip
    if not wide:
        del cells[7], cells[3]
    return [*cells, status]


def _happening(happening: Happening, width: int) -> Text:
    line = Text.assemble((f"{clock(happening.at_s):>5}", "dim"), "  ", (happening.text, happening.style))
    line.truncate(width, overflow="ellipsis")
    return line
