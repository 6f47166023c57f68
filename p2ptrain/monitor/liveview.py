"""The live view of `p2ptrain join`: progress of this peer, and what every other peer does now.

A view is a metrics sink: it receives this peer's events on any thread, and draws frames for the thread that shows them
(`terminal`). The state of other peers comes from their heartbeats, through the peer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2ptrain.monitor.formatting import count, duration, short_id, size
from p2ptrain.monitor.peerview import PeerView
from p2ptrain.monitor.tables import fitting, loss_text, new_table, status_text
from p2ptrain.protocol.membership.peer_status import PeerStatus

# Terminal widths from which more columns are shown.
WIDE, MIDDLE = 100, 72
# Widths of a name and of a status such as "round 1234: fetching the mean"; least width of a number.
NAME, DOING, MIN_NUMBER = 8, 28, 7
MAX_BAR = 120
# Lines of the terminal reserved for the log: at least LOG_LINES, or height / LOG_SHARE.
LOG_LINES, LOG_SHARE = 4, 4
# Rows for this many peers take precedence over the join command.
FEW_PEERS = 4
# Short texts for the reasons of skipped fragments (docs/metrics.md).
REASONS = {
    "epoch": "from another round", "too_old": "too old", "superseded": "superseded", "clipped": "too far off",
    "inbox_full": "inbox full", "shed": "link too slow", "not_finite": "not finite",
}  # fmt: skip
# Window of the speed that the remaining time is estimated from; long enough to contain rounds.
SPEED_WINDOW_S = 60.0


class WatchedPeer(Protocol):
    """The part of a peer that a view reads, from the view's thread."""

    @property
    def peer_id(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def others(self) -> Sequence[PeerStatus]: ...


class LiveView:
    """The live view of one peer. `write` and `follow` may be called from any thread.

    Attributes:
        begun: set once there is something to show.
        ended: set once the peer has left.
        changed: set to request a redraw; the drawing thread clears it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: seconds since the epoch.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._me = PeerView(1)
        self._run_id = ""
        self._peer: WatchedPeer | None = None
        self._join_line = ""
        self._doing = "starting"
        self._skipped_round = ""
        self._steps: deque[tuple[float, int]] = deque()
        self.begun, self.ended, self.changed = (threading.Event() for _ in range(3))

    # --- events -------------------------------------------------------------------------------------------------

    def write(self, event: str, /, **fields: Any) -> None:
        """Process one event of the peer."""
        with self._lock:
            now = self._clock()
            self._me.apply({"event": event, "t": now, **fields})
            match event:
                case "start":
                    self._run_id = fields["run_id"]
                case "step":
                    self._note_step(now, fields["step"])
                case "round":
                    skipped = fields["status"] == "skipped"
                    self._skipped_round = f"round {fields['round']} skipped: {fields['reason']}" if skipped else ""
                case "stop":
                    self._doing, self._peer = f"left: {fields['reason']}", None
                    self.close()

    def close(self) -> None:
        """Note that the peer has left."""
        self.ended.set()
        self.changed.set()

    def follow(self, peer: WatchedPeer, join_line: str) -> None:
        """From now on show the other peers and the join command."""
        with self._lock:
            self._peer, self._join_line = peer, join_line

    def say_status(self, status: str) -> None:
        """Show the status of a peer that is still joining."""
        with self._lock:
            self._doing = status
        self.begun.set()
        self.changed.set()

    def _note_step(self, now: float, step: int) -> None:
        if not self._steps or now - self._steps[-1][0] >= 1:
            self._steps.append((now, step))
        while now - self._steps[0][0] > SPEED_WINDOW_S:
            self._steps.popleft()

    # --- frames -------------------------------------------------------------------------------------------------

    def frame(self, width: int, height: int) -> RenderableType:
        """Draw the current state for a terminal of `width` columns and `height` lines."""
        with self._lock:
            peer, me = self._peer, self._me
            others = list(peer.others) if peer is not None else []
            doing = peer.status if peer is not None else self._doing
            lines: list[RenderableType] = [self._headline(width, len(others))]
            if me.total_steps:
                lines += [ProgressBar(total=me.total_steps, completed=me.step, width=min(width, MAX_BAR)), Text()]
            if me.own_steps:
                lines += [self._training(width), self._fragments(width)]
            for skipped, style in ((self._skipped_fragments(), ""), (self._skipped_round, "yellow")):
                if skipped:
                    lines.append(Text(skipped, style, no_wrap=True, overflow="ellipsis"))
            lines.append(Text())
            paste = _pasted(self._join_line, width) if peer is not None else []
            room = height - max(LOG_LINES, height // LOG_SHARE) - len(lines) - 2
            if room - len(paste) < min(FEW_PEERS, 1 + len(others)):
                paste = []  # the log has it too
            rows = max(1, room - len(paste))
            return Group(Text(), *lines, _table(me, doing, self._speed(), others, rows, width), *paste)

    def _headline(self, width: int, others: int) -> Text:
        me = self._me
        step = f"step {me.step:,}" + (f"/{me.total_steps:,}" if me.total_steps else "")
        parts = [f"run {self._run_id}" if self._run_id else "p2ptrain", step]
        if (left := self._time_left_s()) is not None:
            parts.append(f"{duration(left)} left")
        text = fitting([*parts, count(1 + others, "peer"), count(me.round, "round")], width)
        text.stylize("bold")
        return text

    def _time_left_s(self) -> float | None:
        left = self._me.total_steps - self._me.step
        return left / speed if left > 0 and (speed := self._speed()) else None

    def _speed(self) -> float:
        """Steps of the run per second over SPEED_WINDOW_S; 0 if unknown."""
        if len(self._steps) < 2:
            return 0.0
        (began_s, first), (now, last) = self._steps[0], self._steps[-1]
        return max(0, last - first) / (now - began_s)

    def _training(self, width: int) -> Text:
        me = self._me
        losses = [("loss", me.loss), ("held-out", me.held_out_loss)]
        parts = [f"{name} {loss_text(loss)}" for name, loss in losses if loss is not None]
        if me.is_up:
            parts += [f"{me.tokens_per_s:,.0f} tokens/s", f"exchange {me.exchange_ms:.1f} ms a step"]
        return fitting(parts, width)

    def _fragments(self, width: int) -> Text:
        me = self._me
        return fitting([f"fragments {me.sent:,} out, {me.merged:,} in", f"{size(me.bytes_sent)} sent"], width)

    def _skipped_fragments(self) -> str:
        skipped = self._me.skipped
        reasons = ", ".join(f"{number:,} {REASONS.get(reason, reason)}" for reason, number in skipped.most_common())
        return f"skipped {sum(skipped.values()):,}: {reasons}" if skipped else ""


def _table(me: PeerView, doing: str, own_speed: float, others: list[PeerStatus], rows: int, width: int) -> Table:
    table = new_table()
    names = ["step", *(["rounds", "steps/s"] if width >= MIDDLE else []), *(["round trip"] if width >= WIDE else [])]
    numbers = [max(len(name), MIN_NUMBER) for name in names]
    table.add_column("peer", width=NAME, no_wrap=True)
    # A fixed width keeps the columns to the right in place.
    room = width - NAME - sum(numbers) - 2 * (len(numbers) + 2)
    table.add_column("doing", width=max(MIN_NUMBER, min(DOING, room)))
    for name, columns in zip(names, numbers, strict=True):
        table.add_column(name, width=columns, justify="right", no_wrap=True)

    def add(name: str, doing: str, *cells: str) -> None:
        table.add_row(name, status_text(doing), *cells[: len(names)])

    add("this one", doing, f"{me.step:,}", str(me.round), f"{own_speed:.1f}" if own_speed else "")
    shown = others if len(others) < rows else others[: max(1, rows - 2)]
    for other in shown:
        speed, trip = (f"{other.speed:.1f}" if other.speed else ""), f"{1e3 * other.rtt_s:.0f} ms"
        add(short_id(other.peer_id), other.status, f"{other.step:,}", str(other.round), speed, trip)
    if len(shown) < len(others):
        table.add_row("", Text(f"and {len(others) - len(shown)} more", "dim"))
    return table


def _pasted(line: str, width: int) -> list[RenderableType]:
    """The join command, split with backslashes if it is wider than the terminal."""
    if not line or "'" in line:  # inside quotes a shell keeps the backslashes
        return []
    pieces = []
    while len(line) > width:
        pieces.append(line[: width - 1] + "\\")
        line = line[width - 1 :]
    shown = [Text(piece, no_wrap=True, overflow="crop") for piece in (*pieces, line)]
    return [Text(), Text("other peers join with:", "dim", no_wrap=True, overflow="ellipsis"), *shown]
