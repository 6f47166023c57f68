"""When this peer announces that it is due, and when it calls a round."""

from __future__ import annotations

from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.events import Lead
from p2ptrain.protocol.rounds.leader_election import LeaderElection
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.rounds.timeouts import Silences
from p2ptrain.protocol.wire.messages import Due, Head

# Without a Call, announce it again: the next leader in the order may then call.
DUE_AGAIN_S = 3.0
# A peer that is alone delays a round by at most this for joiners that make progress. 124M parameters and a moment take
# 90 s at 100 Mbit/s, a quarter of an hour at 10 Mbit/s.
JOINERS_PATIENCE_S = 1000.0
# A Join is sent by the end of the window; on a busy machine it may take this long to arrive (guess).
JOIN_GRACE_S = 0.5


class Caller:
    """Decides, but sends nothing. `election` records which peers are due."""

    def __init__(self, context: RoundContext, liveness: Liveness, silences: Silences) -> None:
        self.election = LeaderElection()
        self._context = context
        self._liveness = liveness
        self._silences = silences
        self._due_from_s = 0.0
        self._sent_s = 0.0
        self._sent_for = ("", -2, 0)

    def waits(self, now: float) -> bool:
        """Whether to delay a round for joiners, as it would change the state that they download.

        Only if this peer is alone: a slow joiner must not delay other members.
        """
        exchange = self._context.exchange
        if not exchange.due:
            self._due_from_s = now
        if exchange.at_length or not self._liveness.alone() or not self._liveness.peers.joiners():
            return False
        return now - self._due_from_s < JOINERS_PATIENCE_S

    def due(self, head: Head, attempts_failed: int, now: float) -> Due | None:
        """The Due to send to all peers, including ourselves; None if we are not due or have just sent it."""
        this = (head.lineage, head.round, attempts_failed)
        if not self._context.exchange.due or (this == self._sent_for and now - self._sent_s <= DUE_AGAIN_S):
            return None
        self.election.counter += this == self._sent_for
        self._sent_s, self._sent_for = now, this
        return Due(head.lineage, head.round + 1, self.election.counter)

    def is_ours_to_lead(self, head: Head, now: float) -> bool:
        """Whether we should call now."""
        passed_over = self._silences.passed_over(now)
        present = {voter for voter in self._liveness.present() if voter[0] not in passed_over}
        return self.election.is_ours(self._context.peer_id, head, present, self._liveness.reaches(head))

    def lead(self) -> Lead:
        """The attempt to lead now."""
        return Lead(
            (*self._liveness.peers.trainers(), self._context.peer_id),
            self.window_s(),
            max(JOIN_GRACE_S, 2 * self._liveness.round_trip_s()),
            self._context.timeouts.attempt_s(),
            self.election.counter,
        )

    def window_s(self) -> float:
        """The joining window of an attempt that we lead."""
        speeds = [beat.speed for beat in self._liveness.beats().values()]
        return self.election.window_s(self._context.run.sync_every, self._context.exchange.step_s, speeds)
