"""When this peer says that it is due, and when it calls the others to a round."""

from __future__ import annotations

from p2ptrain.protocol.rounds.context import RoundContext
from p2ptrain.protocol.rounds.events import Lead
from p2ptrain.protocol.rounds.leader_election import LeaderElection
from p2ptrain.protocol.rounds.liveness import Liveness
from p2ptrain.protocol.rounds.timeouts import Silences
from p2ptrain.protocol.wire.messages import Due, Head

# Due, and nobody calls: say it again, to the next leader in line.
DUE_AGAIN_S = 3.0
# One who is alone lets a round wait this long for joiners that make progress. 124M parameters and a moment come in 90 s
# at 100 Mbit/s, in a quarter of an hour at 10 Mbit/s.
JOINERS_PATIENCE_S = 1000.0
# A JOIN is sent at the end of the window at the latest; on a busy machine it is under way this long (guess).
JOIN_GRACE_S = 0.5


class Caller:
    """Decides; sends nothing. `election` knows who else is due."""

    def __init__(self, context: RoundContext, liveness: Liveness, silences: Silences) -> None:
        self.election = LeaderElection()
        self._context = context
        self._liveness = liveness
        self._silences = silences
        self._due_from_s = 0.0
        self._said_s = 0.0
        self._said_for = ("", -2, 0)

    def waits(self, now: float) -> bool:
        """Whether a round had better wait for peers that are taking over the state, as it would change under them.

        Only alone: where there are others to agree with, a slow joiner holds nobody up.
        """
        exchange = self._context.exchange
        if not exchange.due:
            self._due_from_s = now
        if exchange.at_length or not self._liveness.alone() or not self._liveness.joiners():
            return False
        return now - self._due_from_s < JOINERS_PATIENCE_S

    def due(self, head: Head, attempts_failed: int, now: float) -> Due | None:
        """What to tell all, ourselves among them, when we are due; None when there is nothing new to say."""
        this = (head.lineage, head.round, attempts_failed)
        if not self._context.exchange.due or (this == self._said_for and now - self._said_s <= DUE_AGAIN_S):
            return None
        self.election.counter += this == self._said_for
        self._said_s, self._said_for = now, this
        return Due(head.lineage, head.round + 1, self.election.counter)

    def is_ours_to_lead(self, head: Head, now: float) -> bool:
        """Whether it is our turn to call."""
        passed_over = self._silences.passed_over(now)
        present = {voter for voter in self._liveness.present() if voter[0] not in passed_over}
        return self.election.is_ours(self._context.peer_id, head, present, self._liveness.reaches(head))

    def lead(self) -> Lead:
        """The attempt that we would lead now."""
        return Lead(
            (*self._liveness.trainers(), self._context.peer_id),
            self.window_s(),
            max(JOIN_GRACE_S, 2 * self._liveness.round_trip_s()),
            self._context.timeouts.attempt_s(),
            self.election.counter,
        )

    def window_s(self) -> float:
        """How long we would give the others to join."""
        speeds = [beat.speed for beat in self._liveness.beats().values()]
        return self.election.window_s(self._context.run.sync_every, self._context.exchange.step_s, speeds)
