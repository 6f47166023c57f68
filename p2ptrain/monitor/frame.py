"""The parts of a live view's frame, for `p2ptrain join` and `p2ptrain demo`: headline, progress bar, table of peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2ptrain.monitor.peerview import PeerState

MAX_BAR = 120
# Width of a text such as "round 1234: fetching the mean". Columns of numbers leave it at least LEAST_DOING, and a fifth
# of the terminal.
DOING, LEAST_DOING = 28, 16
# Least width of a number, so that columns stay in place while it grows.
MIN_NUMBER = 5
GAP = 2
STATE_STYLES = {
    PeerState.TRAINING: "green", PeerState.LAST_ROUND: "cyan", PeerState.FINISHED: "cyan",
    PeerState.KILLED: "bold red", PeerState.GONE: "bold red",
}  # fmt: skip
OTHER_STATE = "yellow"


@dataclass(frozen=True)
class Row:
    """One peer in the table: its name, what it does in words, its state for the colour, and its numbers by column."""

    name: str
    doing: str
    state: PeerState
    numbers: Mapping[str, str]


def peer_table(rows: Sequence[Row], columns: Iterable[str], width: int) -> Table:
    """A table of peers with as many of the columns, in their order, as fit into `width`."""
    name_width = max([len("peer"), *(len(row.name) for row in rows)])
    room = width - name_width - GAP
    shown: dict[str, int] = {}
    for title in columns:
        needed = GAP + max(MIN_NUMBER, len(title), *(len(row.numbers.get(title, "")) for row in rows))
        if room - needed < max(LEAST_DOING, width // 5):
            break
        room -= needed
        shown[title] = needed - GAP
    # Without borders, to save space. A fixed width of `doing` keeps the columns to the right in place.
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("peer", width=name_width, no_wrap=True)
    table.add_column("doing", width=max(MIN_NUMBER, min(DOING, room)))
    for title, columns_wide in shown.items():
        table.add_column(title, width=columns_wide, justify="right", no_wrap=True)
    for row in rows:
        doing = Text(row.doing, STATE_STYLES.get(row.state, OTHER_STATE), no_wrap=True, overflow="ellipsis")
        numbers = [row.numbers.get(title, "") for title in shown]
        table.add_row(row.name, doing, *numbers, style="dim" if row.state is PeerState.KILLED else "")
    return table


def progress(parts: list[str], step: int, total_steps: int, width: int) -> list[RenderableType]:
    """A headline of the first parts that fit and, if the run has an end, a progress bar."""
    headline = fitting(parts, width)
    headline.stylize("bold")
    bar = ProgressBar(total=total_steps, completed=step, width=min(width, MAX_BAR))
    return [headline, bar, Text()] if total_steps else [headline]  # a bar does not end its line


def loss_text(loss: float | None) -> str:
    """`2.104`, or an empty text."""
    return "" if loss is None else f"{loss:.3f}"


def fitting(parts: list[str], width: int) -> Text:
    """One line of the first parts, as many as fit into `width` columns."""
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts = parts[:-1]
    return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")
