"""The frames of the live view: their content, and that they fit into narrow terminals."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from p2ptrain.formatting import duration
from p2ptrain.monitor.liveview import REASONS, LiveView
from p2ptrain.protocol.membership.status import PeerStatus
from p2ptrain.protocol.wire.text import shown

ROOT = Path(__file__).parents[2]
ME = "QmZz4Ge1naYkNEwL9Rfdu1nDKsdRKtqjiugZbvH9g5Y4wb"
LINE = f"p2ptrain join --initial-peers /ip4/192.168.1.5/tcp/40123/p2p/{ME}"
OTHERS = (
    PeerStatus("QmAx2f81kq", "training", 1204, 7, 38.2, 0.012),
    PeerStatus("QmA9h5Y4wq", "round 7: sending 3/4", 1201, 7, 37.0, 0.104),
    PeerStatus("QmB7h2kLmq", "downloading state 61 %", 0, 0, 0.0, 0.034),
)


@dataclass
class Peer:
    peer_id: str = ME
    status: str = "round 7: averaging"
    others: list[PeerStatus] = field(default_factory=lambda: list(OTHERS))


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def _view(*, total_steps: int = 2000, peer: Peer | None = None) -> LiveView:
    """The view of a peer that has made two hundred steps in five seconds."""
    clock = Clock()
    view = LiveView(clock=clock)
    view.write("start", run_id="novels", peer_id=ME, maddrs=[], run={"total_steps": total_steps, "model": "gpt-demo"})
    view.write("adopt", reason="adopted the swarm's state", run_step=1000, round=5)
    for n in range(1, 201):
        clock.now += 0.025
        view.write("step", step=1000 + n, loss=2.104, tokens=256, step_s=0.024, exchange_s=0.0004)
    view.write("eval", step=1200, loss=2.079)
    view.write(
        "fragments", step=1200, sent=331, merged=326, skipped={"superseded": 7, "epoch": 2}, bytes_sent=5_336_891,
        bytes_received=5_000_000, staleness=0.0,
    )  # fmt: skip
    view.follow(peer or Peer(), LINE)
    view.say_time_left(20.4 if total_steps else None)
    return view


def _shown(view: LiveView, width: int = 120, height: int = 40, *, colour: bool = False) -> list[str]:
    output = io.StringIO()
    console = Console(file=output, width=width, height=height, force_terminal=colour, no_color=not colour)
    console.print(view.frame(width, height))
    return output.getvalue().splitlines()


def test_slow_steps_have_a_speed() -> None:
    clock = Clock()
    view = LiveView(clock=clock)
    view.write("start", run_id="novels", peer_id=ME, maddrs=[], run={"total_steps": 10, "model": "gpt-demo"})
    for step in range(1, 5):
        clock.now += 70
        view.write("step", step=step, loss=2.1, tokens=256, step_s=70.0, exchange_s=0.0004)
    assert view._speed() == pytest.approx(1 / 70)
    assert any(line.split()[-1:] == ["0.014"] for line in _shown(view))


def test_it_shows_progress_and_the_status_of_each_peer() -> None:
    assert [line.rstrip() for line in _shown(_view())] == [
        "",
        "run novels · step 1,200/2,000 · 20 s left · 4 peers · 6 rounds",
        "━" * 72,
        "loss 2.104 · held-out 2.079 · 10,240 tokens/s · exchange 0.4 ms a step",
        "fragments 331 out, 326 in · 5.3 MB sent",
        "skipped 9: 7 superseded, 2 from another round",
        "",
        "peer      doing                          step  rounds  steps/s  round trip",
        "this one  round 7: averaging            1,200       6     40.0",
        "…2f81kq   training                      1,204       7     38.2       12 ms",
        "…h5Y4wq   round 7: sending 3/4          1,201       7     37.0      104 ms",
        "…h2kLmq   downloading state 61 %            0       0                34 ms",
        "",
        "other peers join with:",
        LINE,
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [10, 24, 50])
def test_it_fits_into_every_terminal_and_leaves_room_for_the_log(width: int, height: int) -> None:
    peer = Peer(others=list(OTHERS) * 10)
    lines = _shown(_view(peer=peer), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height - 4, 11)
    text = "\n".join(lines)
    for needed in ("run novels · step 1,200/2,000", "loss 2.104", "skipped 9: 7 superseded", "this one", " more"):
        assert needed in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_join_command_is_whole_for_a_shell(width: int) -> None:
    text = "\n".join(line.rstrip() for line in _shown(_view(), width, 24))
    assert LINE in text.replace("\\\n", "")


def test_without_colour_no_escape_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("\x1b" in line for line in _shown(_view()))
    assert any("\x1b[" in line for line in _shown(_view(), colour=True))
    monkeypatch.setenv("NO_COLOR", "1")
    output = io.StringIO()
    Console(file=output, width=100, force_terminal=True).print(_view().frame(100, 40))
    assert "\x1b[32m" not in output.getvalue()  # not green


def test_a_skipped_round_is_shown_with_its_reason_until_a_round_is_committed() -> None:
    view = _view()
    fields = {"round": 6, "bytes_sent": 0, "tokens_discarded": 0}
    view.write("round", status="skipped", reason="no JOINs from a quorum", **fields)
    assert "round 6 skipped: no JOINs from a quorum" in "\n".join(_shown(view))
    view.write("round", status="committed", reason="", **fields)
    assert "no JOINs" not in "\n".join(_shown(view))


def test_it_says_that_peers_with_pairwise_steps_are_close_not_equal() -> None:
    view = _view()
    fields = {"step": 1200, "partner": "QmB", "reason": "", "bytes_sent": 10, "bytes_received": 10, "wall_s": 0.2}
    view.write("pair", status="paired", spread=0.042, distance=1.5, **fields)
    view.write("pair", status="alone", spread=None, distance=None, **fields)
    assert "1 step with a partner · anchors 4.2 % apart: close, not equal" in "\n".join(_shown(view))


def test_a_run_without_end_has_neither_a_bar_nor_time_left() -> None:
    text = "\n".join(_shown(_view(total_steps=0)))
    assert "step 1,200 ·" in text
    assert "━" not in text
    assert "left" not in text


def test_a_joining_and_a_leaving_peer() -> None:
    view = LiveView()
    assert not view.drawing.begun.is_set()
    view.say_status("downloading state 61 %")
    assert view.drawing.begun.is_set()
    assert "downloading state 61 %" in "\n".join(_shown(view))
    view = _view()
    view.write("stop", reason="finished")
    assert view.drawing.ended.is_set()
    text = "\n".join(_shown(view))
    assert "left: finished" in text
    assert "peers join with" not in text


def test_text_from_peers_cannot_move_the_cursor() -> None:
    assert shown("\x1b[2Jgone\r\n" + "x" * 100) == r"\x1b[2Jgone\r\n" + "x" * 45
    assert shown("\u2028" * 100) == r"\u2028" * 10
    assert shown("\ud800") == r"\ud800"


def test_time_left_is_rounded() -> None:
    assert [duration(seconds) for seconds in (0, 48, 99, 130, 5940, 11_100, 200_000)] == [
        "0 s", "48 s", "99 s", "2 min", "99 min", "3 h 05 min", "2 d 07 h",
    ]  # fmt: skip


def test_reasons_are_worded_as_documented_here_and_on_the_page() -> None:
    page = (ROOT / "docs/use/metrics.md").read_text(encoding="utf-8")
    table = page.partition("## Reasons why")[2].partition("\n## ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    script = (ROOT / "p2ptrain/monitor/dashboard/static/peers.js").read_text(encoding="utf-8")
    listed = script.partition("const REASONS = {")[2].partition("}")[0]
    assert dict(re.findall(r'(\w+): "(.+?)"', listed)) == documented
    assert documented == {**REASONS, "lost": "lost"}  # only the simulation loses any
