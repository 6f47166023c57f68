"""The live view on a terminal: a frame at the bottom that is drawn anew, and everything that is said above it.

Log lines and what the program says are written above the frame and scroll away as they always do, so none is lost and
each can be copied. Whoever says something only queues it: all drawing is done by one thread, twice a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

# A frame takes 3 ms (measured), of a core that may have training to do; what is new is shown sooner.
REFRESH_S, SOONEST_S = 0.5, 0.1
CLOSE_TIMEOUT_S = 5.0
LEVEL_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}

logger = logging.getLogger(__name__)


class View(Protocol):
    """What can be drawn. `frame` is called on the terminal's thread.

    Attributes:
        begun: set once there is something to show.
        ended: set once nothing changes any more.
        changed: set when something should be seen at once; the terminal clears it.
    """

    begun: threading.Event
    ended: threading.Event
    changed: threading.Event

    def frame(self, width: int, height: int) -> RenderableType:
        """The picture of this moment, for a terminal of that many columns and lines."""
        ...

    def close(self) -> None:
        """Set `ended`. May be called twice."""
        ...


def is_worth_it(console: Console, environ: Mapping[str, str]) -> bool:
    """Whether there is a person in front of a terminal that can draw: not in CI, not in a pipe, not TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal and not environ.get("CI")


@contextmanager
def open_terminal(console: Console, view: View) -> Iterator[Terminal]:
    """Show `view` until the block is left or it has ended; then what was said last, and the last frame, stay.

    Whoever logs to the same terminal is heard above the frame meanwhile.
    """
    terminal = Terminal(console, view)
    root = logging.getLogger()
    handlers = root.handlers[:]
    root.handlers[:] = [_Above(terminal, handler) if _is_terminal(handler) else handler for handler in handlers]
    terminal.start()
    try:
        yield terminal
    finally:
        terminal.close()
        root.handlers[:] = handlers


class Terminal:
    """Owns the thread that draws."""

    def __init__(self, console: Console, view: View) -> None:
        self._console = console
        self._view = view
        # Without a bound, as nothing may be lost; it is emptied twice a second.
        self._lines: queue.SimpleQueue[Text] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="p2ptrain-terminal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, text: str, style: str = "") -> None:
        """Write a line above the frame; from any thread. Wide ones are wrapped by the terminal, so that they copy."""
        self._lines.put(Text(text, style))
        self._view.changed.set()
        if not self._thread.is_alive():  # the frame has been drawn for the last time
            self._print_lines()

    def close(self) -> None:
        """Draw for the last time. May be called twice."""
        self._view.close()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._print_lines()

    def _run(self) -> None:
        try:
            while not self._view.begun.is_set():
                if self._view.ended.is_set():
                    return
                self._wait()
                self._print_lines()
            # Not stderr where that is a file.
            live = Live(
                _Frame(self._view), console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()
            )
            with live:
                # Were we killed, the terminal would be left without one.
                self._console.show_cursor(True)
                while not self._view.ended.wait(SOONEST_S):
                    self._wait()
                    self._print_lines()
                    live.refresh()
                self._print_lines()
        except OSError:
            # Its window was closed: nobody looks any more, and training goes on.
            self._console.quiet = True
        except Exception:
            logger.exception("the live view failed: going on without")

    def _wait(self) -> None:
        self._view.changed.wait(REFRESH_S)
        self._view.changed.clear()

    def _print_lines(self) -> None:
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
        if lines:  # all at once: each print draws the frame anew
            self._console.print(Text("\n").join(lines), soft_wrap=True)


class _Frame:
    """The view as a renderable: as wide and as high as the terminal is now, whatever else is being printed."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = console.size
        yield from console.render(self._view.frame(width, height), console.options)


class _Above(logging.Handler):
    """Log records as lines above the frame, with the time; warnings and errors in colour."""

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
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return False
    try:
        return os.isatty(handler.stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
