"""The live view on a terminal: a frame at the bottom that is redrawn, with log and output lines above it.

The parts of a frame (headline, progress bar, table of peers) are the same for `p2ptrain join` and `p2ptrain demo`. Log
and output lines scroll as usual, so that none is lost and each can be copied. Callers only queue lines; one thread
does all the drawing, twice per second.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2ptrain.monitor.peerview import PeerState

MAX_BAR = 120
# Width of the column "doing", for a text such as "round 1234: fetching the mean". Columns of numbers leave it at least
# LEAST_DOING, and a fifth of the terminal.
DOING, LEAST_DOING = 28, 16
# Least width of a column of numbers, so that it stays in place while they grow.
MIN_NUMBER = 5
GAP = 2
STATE_STYLES = {
    PeerState.TRAINING: "green",
    PeerState.LAST_ROUND: "cyan",
    PeerState.FINISHED: "cyan",
    PeerState.KILLED: "bold red",
    PeerState.GONE: "bold red",
}
OTHER_STATE = "yellow"
# A frame takes 3 ms of CPU (measured) that training could use. Changes are shown after SOONEST_S.
REFRESH_S, SOONEST_S = 0.5, 0.1
CLOSE_TIMEOUT_S = 5.0
LEVEL_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}

logger = logging.getLogger(__name__)


class Drawing:
    """The picture that a terminal draws, and when to draw it. Any thread may use it.

    Attributes:
        draw: returns the current frame for a terminal of some columns and lines; called on the terminal's thread.
        begun: set once there is something to show.
        ended: set once nothing changes any more.
        changed: set to request a redraw; the terminal clears it.
    """

    def __init__(self, draw: Callable[[int, int], RenderableType]) -> None:
        self.draw = draw
        self.begun, self.ended, self.changed = (threading.Event() for _ in range(3))

    def update(self) -> None:
        """Draw the first frame, or the next one soon."""
        self.begun.set()
        self.changed.set()

    def close(self) -> None:
        """Draw the last frame. May be called twice."""
        self.ended.set()
        self.changed.set()


def is_worth_it(console: Console, environ: Mapping[str, str]) -> bool:
    """Whether to show a live view: on a terminal that can draw, but not in CI, a pipe or with TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal and not environ.get("CI")


@contextmanager
def open_terminal(console: Console, drawing: Drawing) -> Iterator[Terminal]:
    """Show `drawing` until it has ended or the block is left; the last frame stays.

    Log records for the same terminal are written above the frame.
    """
    terminal = Terminal(console, drawing)
    root = logging.getLogger()
    handlers = root.handlers[:]
    root.handlers[:] = [_Above(terminal, handler) if _is_terminal(handler) else handler for handler in handlers]
    try:
        yield terminal
    finally:
        terminal.close()
        root.handlers[:] = handlers


class Terminal:
    """Owns the drawing thread."""

    def __init__(self, console: Console, drawing: Drawing) -> None:
        self._console = console
        self._drawing = drawing
        # Unbounded, because no line may be lost; emptied twice per second.
        self._lines: queue.SimpleQueue[Text] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="p2ptrain-terminal", daemon=True)
        self._thread.start()

    def say(self, text: str, style: str = "") -> None:
        """Write a line above the frame, from any thread. The terminal wraps long lines, so they can be copied.

        Once the drawing has ended, this waits for the last frame, and writes the line below it.
        """
        if self._drawing.ended.is_set() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._lines.put(Text(text, style))
        self._drawing.changed.set()
        if not self._thread.is_alive():  # the last frame has been drawn
            self._print_lines()

    def close(self) -> None:
        """Draw the last frame. May be called twice."""
        self._drawing.close()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._print_lines()

    def _run(self) -> None:
        try:
            while not self._drawing.begun.is_set():
                if self._drawing.ended.is_set():
                    return
                self._wait()
                self._print_lines()
            live = Live(
                get_renderable=lambda: self._drawing.draw(*self._console.size),
                console=self._console,
                auto_refresh=False,
                redirect_stderr=sys.stderr.isatty(),  # a file is left alone
            )
            with live:
                # Keep the cursor visible: if we are killed, the terminal would stay without one.
                self._console.show_cursor(True)
                while not self._drawing.ended.wait(SOONEST_S):
                    self._wait()
                    self._print_lines()
                    live.refresh()
                self._print_lines()
        except OSError:
            # The terminal window was closed; with nohup, training goes on.
            self._console.quiet = True
        except Exception:
            logger.exception("the live view failed; training continues without it")

    def _wait(self) -> None:
        self._drawing.changed.wait(REFRESH_S)
        self._drawing.changed.clear()

    def _print_lines(self) -> None:
        lines = [self._lines.get() for _ in range(self._lines.qsize())]
        if lines:  # all in one call: each print redraws the frame
            self._console.print(Text("\n").join(lines), soft_wrap=True)


class _Above(logging.Handler):
    """Writes log records above the frame, with the time; warnings and errors in colour."""

    def __init__(self, terminal: Terminal, instead_of: logging.Handler) -> None:
        super().__init__(instead_of.level)
        self.setFormatter(instead_of.formatter)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        try:
            text = self.format(record)
        except Exception:  # a message that does not fit its arguments must not end the program
            self.handleError(record)
        else:
            self._terminal.say(f"{moment}  {text}", LEVEL_STYLES.get(record.levelno, ""))


def _is_terminal(handler: logging.Handler) -> bool:
    stream: Any = getattr(handler, "stream", None)
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False


@dataclass(frozen=True)
class Row:
    """One peer in the table. `state` chooses the colour of `doing`; `numbers` are by column."""

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
