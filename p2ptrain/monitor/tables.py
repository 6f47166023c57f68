"""Shared parts of the live tables of `p2ptrain join` and `p2ptrain demo`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

STATUS_STYLES = {
    "training": "green", "last round": "cyan", "finished": "cyan", "killed": "bold red", "gone": "bold red",
}  # fmt: skip


def new_table() -> Table:
    """An empty table without borders, to save space."""
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)


def status_text(status: str) -> Text:
    """A status in its colour; unknown ones are yellow."""
    return Text(status, STATUS_STYLES.get(status, "yellow"), no_wrap=True, overflow="ellipsis")


def loss_text(loss: float | None) -> str:
    """`2.104`, or an empty text."""
    return "" if loss is None else f"{loss:.3f}"


def fitting(parts: list[str], width: int) -> Text:
    """One line of the first parts, as many as fit into `width` columns."""
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts = parts[:-1]
    return Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")
