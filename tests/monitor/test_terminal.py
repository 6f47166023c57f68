"""The live view in a terminal emulator: no line is lost."""

from __future__ import annotations

import io
import logging
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager

import pyte
import pytest
from rich.console import Console

from p2ptrain.monitor.terminal import is_worth_it, open_terminal
from tests.monitor.test_liveview import LINE, _view

WIDTH, HEIGHT = 80, 24


class Recorder(io.StringIO):
    """A console output that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_console(output: io.StringIO) -> Console:
    return Console(file=output, width=WIDTH, height=HEIGHT, force_terminal=True, color_system="truecolor")


def terminal_text(output: io.StringIO) -> list[str]:
    """All lines on the terminal, including those scrolled away."""
    screen = pyte.HistoryScreen(WIDTH, HEIGHT, history=10_000)
    stream = pyte.Stream(screen)
    stream.feed(output.getvalue().replace("\n", "\r\n"))
    above = ["".join(line[column].data for column in range(WIDTH)) for line in screen.history.top]
    return [line.rstrip() for line in [*above, *screen.display]]


@contextmanager
def _logging_to_a_terminal() -> Iterator[logging.Logger]:
    """Give the root logger one handler that writes to a terminal; yields a child logger."""
    keyboard, screen = pty.openpty()
    root, level = logging.getLogger(), logging.getLogger().level
    before = root.handlers[:]
    with os.fdopen(screen, "w") as stream:
        handler = logging.StreamHandler(stream)
        root.handlers[:] = [handler]
        root.setLevel(logging.INFO)
        try:
            yield logging.getLogger("p2ptrain.of.the.test")
            assert root.handlers == [handler]
        finally:
            root.handlers[:] = before
            root.setLevel(level)
            os.close(keyboard)


def test_output_and_log_lines_stay_above_the_last_frame() -> None:
    output, view = Recorder(), _view()
    with _logging_to_a_terminal() as logger, open_terminal(terminal_console(output), view.drawing) as terminal:
        view.say_status("training")
        terminal.say("other peers join with:")
        terminal.say(LINE)
        for number in range(100):
            logger.info("round %d committed", number)
        logger.warning("the disk is nearly full")
        logger.info("%d %d", 1)  # wrong number of arguments: logging reports it on stderr
        view.write("stop", reason="finished")
        terminal.say("finished at step 1200, saved in p2ptrain-novels")
    lines = terminal_text(output)
    rounds = [line for line in lines if line.endswith(" committed")]
    assert [line.split("  ")[1] for line in rounds] == [f"round {number} committed" for number in range(100)]
    assert any(line.endswith("  the disk is nearly full") for line in lines)
    assert "\x1b[33m" in output.getvalue()  # a warning is yellow
    shown = [line for line in lines if line]
    assert shown[-1] == "finished at step 1200, saved in p2ptrain-novels"
    assert shown[-2].startswith("this one  left: finished")


def test_a_wide_line_is_wrapped_by_the_terminal_alone_and_so_copies_as_one() -> None:
    output, view = Recorder(), _view()
    with open_terminal(terminal_console(output), view.drawing) as terminal:
        view.say_status("training")
        terminal.say(LINE)
    assert f"{LINE}\n" in output.getvalue()
    lines = terminal_text(output)
    at = lines.index(LINE[:WIDTH])
    assert lines[at + 1] == LINE[WIDTH:]


def test_before_there_is_something_to_show_only_lines_are_printed() -> None:
    output, view = Recorder(), _view()
    view.drawing.begun.clear()
    with pytest.raises(ValueError, match="the port is taken"):
        with open_terminal(terminal_console(output), view.drawing) as terminal:
            terminal.say("looking for the run")
            raise ValueError("the port is taken")
    assert output.getvalue() == "looking for the run\n"


def test_a_view_that_fails_ends_alone() -> None:
    output, view = Recorder(), _view()
    with _logging_to_a_terminal(), open_terminal(terminal_console(output), view.drawing) as terminal:
        view._me = None  # type: ignore[assignment]
        view.drawing.begun.set()
        terminal._thread.join(10)
        terminal.say("training goes on")
    assert "the live view failed; training continues without it" in output.getvalue()
    assert output.getvalue().endswith("training goes on\n")


@pytest.mark.parametrize(
    ("terminal", "variables", "worth"),
    [
        (True, {"TERM": "xterm-256color"}, True),
        (True, {"TERM": "xterm-256color", "NO_COLOR": "1"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm-256color", "CI": "true"}, False),
        (False, {"TERM": "xterm-256color"}, False),
    ],
)
def test_a_live_view_is_for_people(terminal: bool, variables: dict[str, str], worth: bool) -> None:
    console = Console(file=Recorder() if terminal else io.StringIO(), _environ=variables)
    assert is_worth_it(console, variables) == worth
