"""How long the steps of a round take: timeouts, who is passed over for a while, and whether H is long enough. Pure.

**Timeouts** are several times what was measured, limited by the user's settings. After one that was too short, the next
one is longer.

**The interval** between two rounds must be long enough. Training goes on during a round, so that its result lands late.
That costs loss: with Muon, 5 of 25 steps late cost 0.04 nats, and 20 of them 0.16 (docs/evidence/late.md).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.formatting import seconds
from p2ptrain.protocol.rounds.deciding.events import Limits
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

# A sender without a chunk for this long is excluded, or for four round trips, or twice what one takes on the slowest
# line, if that is more: on a busy machine encoding and hashing stop for two to three seconds (measured: four peers on
# two cores).
STALL_S = 5.0
# The slowest line that is supported, 2 Mbit/s (guess).
SLOWEST_BYTES_S = 256 * 1024
# A limit is this many times the measured duration, as other links share the path (guess).
MARGIN = 3.0
# Decay of a sender's longest wait per round.
FADE = 0.5
# An attempt gets at least this long, so that a short stall of a machine does not end it (guess).
MIN_ATTEMPT_S = 60.0
# Contributions get this share of an attempt's time; then incomplete ones are left out. Fetching the mean takes about as
# long as sending.
SENDING_SHARE = 0.5
# Averaging gets this share, from the end of sending; then reducers that are not done are avoided (guess).
AVERAGING_SHARE = 0.25
# Rounds remembered.
ROUNDS = 8
# Interval of a reducer's reports to its leader; after three missing ones it is given up (guess).
REPORT_S = 5.0
# From the end of the joining window to the leader's next message, and from the attempt's end to its last (guess).
LEADER_GRACE_S, LAST_WORD_S = 10.0, 30.0
# A silent leader or reducer is passed over for this long, doubled each time up to an hour (guess).
SILENT_LEADER_S, SILENT_REDUCER_S, MAX_SILENT_S = 5.0, 600.0, 3600.0
# What we advise: H is at least ten times what a round takes (guess; a fifth cost 0.04 nats).
SHARE_OF_INTERVAL = 0.1
# With sections that is a tenth of the time between two rounds of one section, but above half of its interval a round
# leaves no room for a slow one (guess).
MOST_SHARE = 0.5
# Rounds that take more of their interval are warned of: below this, what lateness costs is near the noise.
WARNED_SHARE = 0.2
# The median of so many rounds counts: those while a peer joins are slow, and say nothing about H.
WATCHED_ROUNDS = 5
# The next codec to try, from those that did not raise the loss (docs/use/choosing.md).
SMALLER_CODEC = {"none": "int8", "fp16": "int8", "int8": "int4"}
# H cannot change in a run, so that more often would not help.
AGAIN_AFTER_S = 3600.0


class Timeouts:
    """Measured durations and the timeouts derived from them. The arguments are the user's limits."""

    def __init__(self, *, peer_timeout_s: float, round_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._round_timeout_s = round_timeout_s
        self._longest_s: dict[PeerId, float] = {}
        # By the share of the vector that they averaged; and the next round's share.
        self._rounds_s: dict[float, deque[float]] = {}
        self._share = 1.0

    def expect(self, share: float) -> None:
        """The next round averages this share of the vector. The run's last one may be many times a section."""
        self._share = share

    def note_wait(self, sender: PeerId, waited_s: float) -> None:
        """Record the wait for a sender's chunk, since the last chunk or the roster; also if the sender was excluded."""
        self._longest_s[sender] = max(waited_s, self._longest_s.get(sender, 0.0))

    def stall_s(self, sender: PeerId, rtt_s: float, slowest_s: float) -> float:
        """Timeout of a sender's next chunk, which takes `slowest_s` on the slowest line."""
        longest_s = MARGIN * self._longest_s.get(sender, 0.0)
        return min(max(STALL_S, 4 * rtt_s, 2 * slowest_s, longest_s), self._peer_timeout_s)

    def note_timed_out(self, took_s: float) -> None:
        """Record the duration of an attempt that timed out: the next one gets more time, never less."""
        if MARGIN * took_s > self.attempt_s():
            self._rounds_s.setdefault(self._share, deque(maxlen=ROUNDS)).append(took_s)

    def note_unsent(self, sending_s: float) -> None:
        """Record an attempt that ended after we had been sending for this long, unfinished. 0 changes nothing."""
        self.note_timed_out(sending_s / SENDING_SHARE)

    def note_round(self, took_s: float) -> None:
        """Record the duration of a committed round. Earlier waits for senders count for less from now on."""
        self._rounds_s.setdefault(self._share, deque(maxlen=ROUNDS)).append(took_s)
        self._longest_s = {sender: FADE * longest for sender, longest in self._longest_s.items() if longest > 0.1}

    def attempt_s(self) -> float:
        """Timeout of an attempt, from its roster to its commit.

        If no round of its share was measured, those of the largest share count, in proportion.
        """
        if not self._rounds_s:
            return self._round_timeout_s
        measured = self._share if self._share in self._rounds_s else max(self._rounds_s)
        longest_s = max(self._rounds_s[measured]) * self._share / measured
        return min(self._round_timeout_s, max(MIN_ATTEMPT_S, MARGIN * longest_s))

    def reducer_s(self, rtt_s: float) -> float:
        """How long a reducer may be silent."""
        return 3 * REPORT_S + 4 * rtt_s

    def limits(self, window_s: float, rtt_s: float) -> Limits:
        """Limits on other leaders: several times our own timeouts. `window_s` is our own joining window."""
        attempt_s = min(self._round_timeout_s, MARGIN * self.attempt_s()) + LAST_WORD_S
        return Limits(max(LEADER_GRACE_S, 4 * window_s), LEADER_GRACE_S + 4 * rtt_s, attempt_s)


class PeerBackoff:
    """Peers that failed, as leader for example, and until when they are passed over, twice as long each time."""

    def __init__(self, most_s: float = MAX_SILENT_S) -> None:
        self._most_s = most_s
        self._until: dict[PeerId, tuple[float, float]] = {}

    def note(self, peer_id: PeerId, now: float, least_s: float) -> None:
        """Pass a peer over for `least_s`, or twice as long as the last time.

        Peers that were not passed over for `most_s` are forgotten: ids cost nothing, so there may be many.
        """
        self._until = {peer: entry for peer, entry in self._until.items() if now <= entry[0] + self._most_s}
        until_s, lasts_s = self._until.get(peer_id, (0.0, 0.0))
        if now >= until_s:
            lasts_s = min(max(least_s, 2 * lasts_s), self._most_s)
            self._until[peer_id] = now + lasts_s, lasts_s

    def forget(self, peer_id: PeerId) -> None:
        """The peer succeeded: do not pass it over any more."""
        self._until.pop(peer_id, None)

    def is_backed_off(self, peer_id: PeerId, now: float) -> bool:
        """Whether a peer is passed over now."""
        return now < self._until.get(peer_id, (0.0, 0.0))[0]

    def backed_off(self, now: float) -> list[PeerId]:
        """Peers that are passed over now, those that failed most often first."""
        passed_over = {peer_id: lasts_s for peer_id, (until_s, lasts_s) in self._until.items() if now < until_s}
        return sorted(passed_over, key=lambda peer_id: -passed_over[peer_id])


def allowed_share(sections: int) -> float:
    """The share of its interval that a round may take where each averages one of so many sections."""
    return min(MOST_SHARE, SHARE_OF_INTERVAL * sections)


def fewest_steps(round_s: float, step_s: float, sections: int = 1) -> int:
    """The least H with which a round takes at most its `allowed_share`."""
    return math.ceil(round_s / allowed_share(sections) / step_s - 1e-9)


def changed(run: RunConfig, **settings: Any) -> RunConfig | None:
    """The run with these settings instead; None if its other ones do not allow them."""
    try:
        return dataclasses.replace(run, **settings)
    except ConfigError:
        return None


def with_smaller_codec(run: RunConfig) -> RunConfig | None:
    """The run with the next codec of those that did not raise the loss, if its other settings allow one."""
    smaller = SMALLER_CODEC.get(run.round_codec)
    return changed(run, round_codec=smaller) if smaller else None


class IntervalWatch:
    """Warns if this peer's rounds take too much of their intervals."""

    def __init__(self, run: RunConfig) -> None:
        self._sync_every = run.sync_every
        self._sections = run.round_sections
        smaller, sectioned = with_smaller_codec(run), changed(run, round_sections=run.round_sections + 1)
        self._remedies = [f"--round-codec {smaller.round_codec}"] if smaller else []
        self._remedies += ["more --round-sections"] if sectioned else []
        self._rounds_s: deque[float] = deque(maxlen=WATCHED_ROUNDS)
        self._intervals_s: deque[float] = deque(maxlen=WATCHED_ROUNDS)
        self._told_s = -math.inf

    def note(self, round_s: float, interval_s: float, now: float) -> str:
        """A round has landed. Returns a warning if rounds take too much of the interval; empty if not, or told lately.

        Args:
            round_s: from its first attempt to its landing.
            interval_s: what this peer's inner steps between two rounds take.
        """
        self._rounds_s.append(round_s)
        self._intervals_s.append(interval_s)
        usual_s, usual_interval_s = statistics.median(self._rounds_s), statistics.median(self._intervals_s)
        is_long_enough = usual_s <= max(WARNED_SHARE, allowed_share(self._sections)) * usual_interval_s
        if (
            is_long_enough
            or not usual_interval_s
            or len(self._rounds_s) < WATCHED_ROUNDS
            or now - self._told_s < AGAIN_AFTER_S
        ):
            return ""
        self._told_s = now
        enough = fewest_steps(usual_s, usual_interval_s / self._sync_every, self._sections)
        return (
            f"a round takes {seconds(usual_s)}, {100 * usual_s / usual_interval_s:.0f} % of its interval of "
            f"{seconds(usual_interval_s)}, and its result lands late, which costs loss. This run keeps its H = "
            f"{self._sync_every}; give the next one "
            + ", or ".join([*self._remedies, f"--sync-every {enough} or more"])
        )
