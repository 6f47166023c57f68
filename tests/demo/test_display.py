"""The live table and the plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from p2ptrain.demo.display import open_display, render
from p2ptrain.formatting import clock, count, size
from p2ptrain.monitor.swarmview import SwarmView
from tests.demo import metrics
from tests.demo.metrics import BEGAN_S, small_swarm
from tests.monitor.test_terminal import Recorder, terminal_console, terminal_text


def _screen(swarm: SwarmView, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(swarm, BEGAN_S + 65, width=width))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_table_fits_and_shows_every_peer(width: int) -> None:
    swarm = small_swarm()
    lines = _screen(swarm, width)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("1:05 · 0 peers · step 100/100")
    columns = lines[2].split()
    assert columns[:3] == ["peer", "doing", "step"]
    assert [line.split()[:2] for line in lines[3:]] == [
        ["1", "killed"], ["2", "finished"], ["3", "finished"], ["4", "finished"],
    ]  # fmt: skip
    assert lines[3].split()[2:8] == ["40", "3.734", "20", "18", "1", "4.0"]
    assert ("exch" in columns, "skipped" in columns) == (width >= 100, width >= 120)


def test_on_a_terminal_notices_are_above_the_last_table() -> None:
    output, swarm = Recorder(), small_swarm()
    with open_display(terminal_console(output), plain=False) as show:
        show(swarm)
        swarm.add_notice(1019, "a line that is wider than the terminal " * 5)
        show(swarm)
    lines = [line for line in terminal_text(output) if line]
    (committed,) = (at for at, line in enumerate(lines) if "round 1 committed" in line)
    (wide,) = (at for at, line in enumerate(lines) if line.startswith(" 0:19  a line that is wider"))
    tables = [at for at, line in enumerate(lines) if line.startswith("peer  doing")]
    assert committed < wide < tables[-1]
    assert [line.split()[1] for line in lines[-4:]] == ["killed", "finished", "finished", "finished"]


def test_a_peer_without_steps_has_an_empty_row() -> None:
    swarm = SwarmView(BEGAN_S, 100)
    swarm.started(1)
    for width in (80, 120):
        assert _screen(swarm, width)[3].split() == ["1", "starting"]


def test_plain_lines_are_not_wrapped_or_repeated() -> None:
    output = io.StringIO()
    console = Console(file=output, width=40)
    swarm = SwarmView(BEGAN_S, 100)
    swarm.started(1)
    swarm.apply(1, metrics.start(1, 1001))
    swarm.apply(1, metrics.step(20, 1002))
    with open_display(console, plain=True) as show:
        swarm.add_notice(1003, "something that is wider than forty columns has happened")
        show(swarm)
        show(swarm)
    notice, progress = output.getvalue().splitlines()
    assert notice == " 0:03  something that is wider than forty columns has happened"
    # The made-up run is long ago, so a progress line is due.
    assert progress.endswith("  step 20 of 100 · 1 peer · losses 2.00 · 0 tokens/s")


def test_formatting() -> None:
    assert [clock(seconds) for seconds in (0, 9.6, 65, 3600)] == ["0:00", "0:10", "1:05", "60:00"]
    assert [count(n, "peer") for n in (0, 1, 1200)] == ["0 peers", "1 peer", "1,200 peers"]
    sizes = [size(n) for n in (0, 640, 999, 1000, 3149, 9949, 9950, 27_600, 999_499, 999_500, 1.2e6, 5e15)]
    assert sizes == [
        "0 B", "640 B", "999 B", "1.0 kB", "3.1 kB", "9.9 kB", "10 kB", "28 kB", "999 kB", "1.0 MB", "1.2 MB",
        "5000 TB",
    ]  # fmt: skip
