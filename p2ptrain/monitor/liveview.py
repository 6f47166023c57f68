"""The live view of `p2ptrain join`: progress of this peer, and what every other peer does now.

A view is a metrics sink: it receives this peer's events on any thread, and draws frames for the thread that shows them
(`terminal`). The trainer gives the time left. The state of other peers comes from their heartbeats, through the peer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2ptrain.formatting import count, duration, short_id, size, speed_text
from p2ptrain.monitor.peerview import PeerState, PeerView
from p2ptrain.monitor.terminal import Drawing, Row, fitting, loss_text, peer_table, progress
from p2ptrain.protocol.membership.status import PeerStatus

if TYPE_CHECKING:
    from p2ptrain.peer.peer import Peer

COLUMNS = ("step", "rounds", "steps/s", "round trip")
# Lines of the terminal reserved for the log: at least LOG_LINES, or height / LOG_SHARE.
LOG_LINES, LOG_SHARE = 4, 4
# Rows for this many peers take precedence over the join command.
FEW_PEERS = 4
# Short texts for the reasons of skipped fragments (docs/use/metrics.md).
REASONS = {
    "epoch": "from another round",
    "too_old": "too old",
    "superseded": "superseded",
    "clipped": "too far off",
    "newcomer": "of a newcomer",
    "inbox_full": "inbox full",
    "shed": "link too slow",
    "not_finite": "not finite",
    "failed": "failed",
}
# Window of the speed of this peer in the table; long enough to contain rounds.
SPEED_WINDOW_S = 60.0


class LiveView:
    """The live view of one peer. `write`, `follow` and the `say_` methods may be called from any thread.

    Attributes:
        drawing: the argument for `open_terminal`; begins with the first status and ends when the peer has left.
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
        self._peer: Peer | None = None
        self._join_line = ""
        self._doing = "starting"
        self._skipped_round = ""
        self._steps: deque[tuple[float, int]] = deque()
        self._left_s: float | None = None
        self.drawing = Drawing(self.frame)

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
        self.drawing.close()

    def follow(self, peer: Peer, join_line: str) -> None:
        """From now on show the other peers and the join command."""
        with self._lock:
            self._peer, self._join_line = peer, join_line

    def say_status(self, status: str) -> None:
        """Show the status of a peer that is still joining."""
        with self._lock:
            self._doing = status
        self.drawing.update()

    def say_time_left(self, left_s: float | None) -> None:
        """From now on show that the run ends in so many seconds; None: unknown."""
        with self._lock:
            self._left_s = left_s

    def _note_step(self, now: float, step: int) -> None:
        if not self._steps or now - self._steps[-1][0] >= 1:
            self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[0][0] > SPEED_WINDOW_S:
            self._steps.popleft()

    def frame(self, width: int, height: int) -> RenderableType:
        """Draw the current state for a terminal of `width` columns and `height` lines."""
        with self._lock:
            peer, me = self._peer, self._me
            others = list(peer.others) if peer is not None else []
            doing = peer.status if peer is not None else self._doing
            lines = progress(self._headline(len(others)), me.step, me.total_steps, width)
            lines += [*self._lines(width), Text()]
            paste = _pasted(self._join_line, width) if peer is not None else []
            room = height - max(LOG_LINES, height // LOG_SHARE) - len(lines) - 2
            if room - len(paste) < min(FEW_PEERS, 1 + len(others)):
                paste = []  # the log has it too
            rows = max(1, room - len(paste))
            return Group(Text(), *lines, self._table(doing, others, rows, width), *paste)

    def _headline(self, others: int) -> list[str]:
        me = self._me
        step = f"step {me.step:,}" + (f"/{me.total_steps:,}" if me.total_steps else "")
        parts = [f"run {self._run_id}" if self._run_id else "p2ptrain", step]
        if self._left_s is not None and me.step < me.total_steps:
            parts.append(f"{duration(self._left_s)} left")
        return [*parts, count(1 + others, "peer"), count(me.round, "round")]

    def _speed(self) -> float:
        """Steps of the run per second over SPEED_WINDOW_S; 0 if unknown."""
        if len(self._steps) < 2:
            return 0.0
        (began_s, first), (now, last) = self._steps[0], self._steps[-1]
        return max(0, last - first) / (now - began_s)

    def _lines(self, width: int) -> Iterator[Text]:
        """The lines about this peer, as far as its numbers are known."""
        me = self._me
        if me.own_steps:
            losses = [("loss", me.loss), ("held-out", me.held_out_loss)]
            parts = [f"{name} {loss_text(loss)}" for name, loss in losses if loss is not None]
            if me.is_up:
                parts += [f"{me.tokens_per_s:,.0f} tokens/s", f"exchange {me.exchange_ms:.1f} ms a step"]
            yield fitting(parts, width)
            yield fitting([f"fragments {me.sent:,} out, {me.merged:,} in", f"{size(me.bytes_sent)} sent"], width)
        if me.spread is not None:
            apart = f"anchors {100 * me.spread:.1f} % apart: close, not equal"
            yield fitting([count(me.pairs, "step") + " with a partner", apart], width)
        if me.skipped:
            reasons = (f"{number:,} {REASONS.get(reason, reason)}" for reason, number in me.skipped.most_common())
            yield fitting([f"skipped {me.skipped.total():,}: {', '.join(reasons)}"], width)
        if self._skipped_round:
            yield Text(self._skipped_round, "yellow", no_wrap=True, overflow="ellipsis")

    def _table(self, doing: str, others: list[PeerStatus], rows: int, width: int) -> Table:
        me, speed = self._me, self._speed()
        numbers = {"step": f"{me.step:,}", "rounds": str(me.round), "steps/s": speed_text(speed)}
        shown = others if len(others) < rows else others[: max(1, rows - 2)]
        table = peer_table([Row("this one", doing, me.state, numbers), *map(_row, shown)], COLUMNS, width)
        if len(shown) < len(others):
            table.add_row("", Text(f"and {len(others) - len(shown)} more", "dim"))
        return table


def _row(other: PeerStatus) -> Row:
    numbers = {
        "step": f"{other.step:,}",
        "rounds": str(other.round),
        "steps/s": speed_text(other.speed),
        "round trip": f"{1e3 * other.rtt_s:.0f} ms",
    }
    # The status is only text, so the speed shows whether it trains.
    state = PeerState.TRAINING if other.speed else PeerState.JOINING
    return Row(short_id(other.peer_id), other.status, state, numbers)


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
