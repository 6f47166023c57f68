"""How long the steps of a round take with these peers over these links, and so how long to wait for them.

Nobody has to guess a number: a limit is several times what was seen, also where that is that the last limit was too
short. The user's settings bound it.
"""

from __future__ import annotations

from collections import deque

from p2ptrain.protocol.rounds.round_state import Limits
from p2ptrain.protocol.wire.transport import PeerId

# A sender without a chunk for this long is left out, or for four round trips where that is more (DESIGN.md).
STALL_S = 2.0
# Before its first chunk a sender may still be encoding behind a busy training thread (guess).
FIRST_CHUNK_S = 5.0
# What came in one second last time may take three this time: others' links share the path (guess).
MARGIN = 3.0
# A sender's longest wait of long ago counts half as much after each round.
FADE = 0.5
# An attempt has at least this long, so that one slow moment of a machine does not end it (guess).
MIN_ATTEMPT_S = 60.0
# Rounds remembered.
ROUNDS = 8
# A reducer reports to its leader this often, whether there is news or not; after three reports that do not come it is
# given up (guess).
REPORT_S = 5.0
# From the end of the joining window to a living leader's next word, and from its attempt's end to its last (guess).
LEADER_GRACE_S, LAST_WORD_S = 10.0, 30.0
# Who kept silent as leader or as reducer is passed over for this long, twice as long each time, up to an hour (guess).
SILENT_LEADER_S, SILENT_REDUCER_S, MAX_SILENT_S = 5.0, 600.0, 3600.0


class Timeouts:
    """What one peer has seen of how fast others are. `peer_timeout_s` and `round_timeout_s` are the user's bounds."""

    def __init__(self, *, peer_timeout_s: float, round_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._round_timeout_s = round_timeout_s
        self._longest_s: dict[PeerId, float] = {}
        self._rounds_s: deque[float] = deque(maxlen=ROUNDS)

    def note_wait(self, sender: PeerId, waited_s: float) -> None:
        """A chunk came so long after the one before, or the roster; or none, and its sender was left out then."""
        self._longest_s[sender] = max(waited_s, self._longest_s.get(sender, 0.0))

    def stall_s(self, sender: PeerId, rtt_s: float, *, first: bool) -> float:
        """How long a sender may take for its next chunk."""
        usual_s = max(STALL_S, 4 * rtt_s, MARGIN * self._longest_s.get(sender, 0.0))
        return min(max(usual_s, FIRST_CHUNK_S) if first else usual_s, self._peer_timeout_s)

    def note_round(self, took_s: float) -> None:
        """A round was committed after so long; or an attempt at one was given up then."""
        self._rounds_s.append(took_s)
        self._longest_s = {sender: FADE * longest for sender, longest in self._longest_s.items() if longest > 0.1}

    def attempt_s(self) -> float:
        """How long an attempt may take from its roster to its commit."""
        if not self._rounds_s:
            return self._round_timeout_s
        return min(self._round_timeout_s, max(MIN_ATTEMPT_S, MARGIN * max(self._rounds_s)))

    def reducer_s(self, rtt_s: float) -> float:
        """How long a reducer may say nothing to its leader."""
        return 3 * REPORT_S + 4 * rtt_s

    def limits(self, window_s: float, rtt_s: float) -> Limits:
        """How long a leader may keep us: several times what we would take as leaders ourselves.

        Args:
            window_s: how long we would give others to join.
        """
        attempt_s = min(self._round_timeout_s, MARGIN * self.attempt_s()) + LAST_WORD_S
        return Limits(max(LEADER_GRACE_S, 4 * window_s), LEADER_GRACE_S + 4 * rtt_s, attempt_s)


class Silences:
    """Who kept silent as a leader or reducer though its link was up, and for how long it is passed over."""

    def __init__(self) -> None:
        self._until: dict[PeerId, tuple[float, float]] = {}

    def note(self, peer_id: PeerId, now: float, least_s: float) -> None:
        """It was waited for in vain: pass it over for `least_s`, or twice as long as the last time."""
        until_s, lasts_s = self._until.get(peer_id, (0.0, 0.0))
        if now >= until_s:
            lasts_s = min(max(least_s, 2 * lasts_s), MAX_SILENT_S)
            self._until[peer_id] = now + lasts_s, lasts_s

    def forget(self) -> None:
        """Pass over nobody."""
        self._until.clear()

    def passed_over(self, now: float) -> set[PeerId]:
        """Who is neither followed nor asked to average now."""
        return {peer_id for peer_id, (until_s, _) in self._until.items() if now < until_s}
