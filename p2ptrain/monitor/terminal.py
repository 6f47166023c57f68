"""The live view on a terminal: a frame at the bottom that is redrawn, with log and output lines above it.

Log and output lines scroll as usual, so that none is lost and each can be copied. Callers only queue lines; one thread
does all the drawing, twice per second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

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
    """Whether a live view makes sense: a terminal that can draw; not CI, a pipe or TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal and not environ.get("CI")


@contextmanager
def open_terminal(console: Console, drawing: Drawing) -> Iterator[Terminal]:
    """Show `drawing` until the block is left or it has ended; the last lines and the last frame stay.

    Meanwhile log records for the same terminal are written above the frame.
    """
    terminal = Terminal(console, drawing)
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
    """Owns the drawing thread."""

    def __init__(self, console: Console, drawing: Drawing) -> None:
        self._console = console
        self._drawing = drawing
        # Unbounded, because no line may be lost; emptied twice per second.
        self._lines: queue.SimpleQueue[Text] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="p2ptrain-terminal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, text: str, style: str = "") -> None:
        """Write a line above the frame, from any thread. The terminal wraps long lines, so they can be copied.

        Once nothing changes any more, the line comes below the last frame: waits until that is drawn.
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
            # The terminal window was closed; training goes on.
            self._console.quiet = True
        except Exception:
            logger.exception("the live view failed; training continues without it")

    def _wait(self) -> None:
        self._drawing.changed.wait(REFRESH_S)
        self._drawing.changed.clear()

    def _print_lines(self) -> None:
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait())
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
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return False
    try:
        return os.isatty(handler.stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
