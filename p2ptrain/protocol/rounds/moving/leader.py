"""Leading the averaging of one attempt: a roster, one contributor set, one record.

This happens between the promises and the proposal of the consensus. Leading needs no chunks: if only that is lost,
another peer leads, and members send the same chunks again.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import trio

from p2ptrain.errors import RoundFailedError, WireError
from p2ptrain.protocol.links.links import HELD_UP_S
from p2ptrain.protocol.rounds.context import AttemptEvents, RoundContext
from p2ptrain.protocol.rounds.deciding import guard, policy
from p2ptrain.protocol.rounds.deciding.averaging import Conclusion
from p2ptrain.protocol.rounds.deciding.record import check_arrived, proposal_of
from p2ptrain.protocol.rounds.deciding.timeouts import AVERAGING_SHARE, REPORT_S, SENDING_SHARE, SILENT_REDUCER_S
from p2ptrain.protocol.wire import messages as m
from p2ptrain.protocol.wire.transport import PeerId

logger = logging.getLogger(__name__)

MAX_INBOX = 1024


class AveragingLeader:
    """One attempt, led by this peer. `deliver` and `note_gone` are called while `run` runs."""

    def __init__(
        self, context: RoundContext, attempt: m.Attempt, head: m.Head, attempt_s: float, events: AttemptEvents
    ) -> None:
        self.attempt = attempt
        self.scope = trio.CancelScope()
        self._context = context
        self._silent_s = context.timeouts.reducer_s(context.liveness.round_trip_s())
        self._head = head
        self._attempt_s = attempt_s
        self._events = events
        self._plan: tuple[m.RosterPart, ...] = ()
        self._sends: dict[PeerId, set[int]] = {}
        self._contributors: tuple[m.Contributor, ...] = ()
        # Those that reducers average without an order; empty once they are known to be others.
        self._expected: tuple[m.Contributor, ...] = ()
        self._reports: dict[int, m.Reduced] = {}
        # By part, then by member: squared norms and Merkle roots, as the reducers report them.
        self._squares: dict[int, dict[PeerId, float]] = defaultdict(dict)
        self._roots: dict[int, dict[PeerId, bytes]] = defaultdict(dict)
        self._gone: dict[PeerId, str] = {}
        self._heard_s: dict[PeerId, float] = {}
        self._averaging: set[PeerId] = set()
        self._inbox: deque[tuple[PeerId, m.Message]] = deque()
        self._changed = trio.Event()

    def deliver(self, sender: PeerId, message: m.Message) -> None:
        """Queue an Arrived or Reduced of this attempt; dropped if the inbox is full. Raises WireError.

        Before the roster no honest member sends one, and nothing tells yet how many hashes it must have.
        """
        if not self._plan:
            return
        if isinstance(message, m.Arrived):
            context = self._context
            check_arrived(message, audited=context.audited, num_blocks=context.state.num_blocks)
        if isinstance(message, m.Reduced) and self._is_of_its_part(sender, message.part):
            senders = self._plan[message.part].senders
            contributors = self._expected if message.as_expected else self._contributors
            reduced = [c for c in contributors if not senders or c.peer_id in senders]
            if len(message.digests) != self._context.averaging.num_blobs(reduced):
                raise WireError(f"a Reduced with {len(message.digests)} hashes for {len(reduced)} contributors")
        if len(self._inbox) >= MAX_INBOX:
            logger.warning("leader of attempt %d: inbox full, message dropped", self.attempt.counter)
            return
        self._inbox.append((sender, message))
        self._changed.set()

    def note_gone(self, peer_id: PeerId, reason: str, avoided_s: float = SILENT_REDUCER_S) -> None:
        """A peer was lost, withdrew, or follows a higher attempt: a reducer is avoided for `avoided_s` or longer."""
        if peer_id in self._heard_s and peer_id not in self._gone:
            self._context.avoided.note(peer_id, trio.current_time(), avoided_s)
        self._gone.setdefault(peer_id, reason)
        self._changed.set()

    def note_timed_out(self) -> None:
        """The attempt timed out: avoid the reducers that have not reported their part."""
        for peer_id in self._averaging:
            logger.warning("round %d: reducer %s did not average its part in time", self._head.round + 1, peer_id)
            self._context.avoided.note(peer_id, trio.current_time(), SILENT_REDUCER_S)

    async def run(self, joins: dict[PeerId, m.Join]) -> m.Proposal:
        """Lead the averaging, and return what to propose. Raises RoundFailedError.

        Args:
            joins: the Join of each peer, including our own.
        """
        head = self._head
        # Who joined and withdrew at once is gone before this task begins.
        joins = {peer_id: join for peer_id, join in joins.items() if peer_id not in self._gone}
        for peer_id, join in joins.items():
            # The same round of a lineage has one state. What others claim does not count: identities are free.
            if join.state_hash != head.state_hash:
                logger.warning("%s has state %s, we %s", peer_id, join.state_hash[:12], head.state_hash[:12])
        members = policy.members_of(joins, head.state_hash, self._context.run.max_contributors)
        if not members:
            raise RoundFailedError("no member has a snapshot")
        struck = self._context.links.strikes.keys() & set(members)
        avoided = set(self._context.avoided.backed_off(trio.current_time())) | struck
        drawn = policy.averageable({peer_id: joins[peer_id] for peer_id in members}, avoided, head.voters)
        members = list(drawn)
        self._plan = tuple(self._context.averaging.plan(drawn, avoided, self._context.grid))
        self._sends = policy.parts_of(members, self._plan)
        if self._context.averaging.reduces:
            weights = policy.weights_of(self._context.run, list(drawn.values()))
            self._expected = tuple(
                m.Contributor(member, join.incarnation, weight, b"")
                for (member, join), weight in zip(drawn.items(), weights, strict=True)
            )
        roster = m.Roster(head.lineage, head.round + 1, self.attempt, tuple(members), self._plan, self._expected)
        self._heard_s = dict.fromkeys((part.reducer for part in self._plan), trio.current_time())
        for peer_id in joins:
            self._events.tell(peer_id, roster)
        included = await self._await_contributions()
        contributors = self._contributors = self._guarded(drawn, included)
        left = self._parts_left(included)
        if policy.without_roots(contributors) != self._expected:
            self._expected, self._reports = (), {}
            for part in left:
                order = m.Reduce(head.lineage, head.round + 1, self.attempt, contributors)
                self._events.tell(self._plan[part].reducer, order)
        self._averaging = {self._plan[part].reducer for part in left - self._reports.keys()}
        with trio.move_on_after(AVERAGING_SHARE * self._attempt_s) as averaging:
            conclusion = await self._await_reports(contributors)
        if averaging.cancelled_caught:
            self.note_timed_out()
            # The next attempt gets more time, as after one that timed out as a whole.
            self._context.timeouts.note_timed_out(self._attempt_s)
            raise RoundFailedError("a reducer did not average its part in time")
        # From here a lost reducer is not avoided, as its part is done. A lost contributor stays in the mean.
        self._averaging.clear()
        self._heard_s.clear()
        return proposal_of(self._context.run, head, joins, members, contributors, conclusion)

    async def _await_contributions(self) -> list[PeerId]:
        """Wait until each member is complete at its reducers or excluded, or time is up; return the complete ones.

        Reducers that contradict most others are blamed, not the members that they give up. If most members are
        incomplete at the end, some reducer is blamed; once time is up, still waiting for a member counts as giving it
        up.
        """
        sends = self._sends
        complete: dict[PeerId, set[int]] = {member: set() for member in sends}
        failed_at: dict[int, set[PeerId]] = {part: set() for part in range(len(self._plan))}
        until_s = trio.current_time() + SENDING_SHARE * self._attempt_s
        while trio.current_time() < until_s and policy.is_anyone_awaited(
            failed_at, sends, complete, self._parts_left(sends), self._gone
        ):
            for sender, message in await self._news(until_s):
                self._note_report(sender, message)
                if isinstance(message, m.Arrived) and self._is_of_its_part(sender, message.part):
                    for member, square, root in zip(message.complete, message.norms, message.roots, strict=True):
                        if message.part in sends.get(member, ()):
                            complete[member].add(message.part)
                            self._squares[message.part][member] = square
                            self._roots[message.part][member] = root
                    given_up = {member for member in message.failed if message.part in sends.get(member, ())}
                    failed_at[message.part] |= given_up - {sender}
            if trio.current_time() > until_s + HELD_UP_S:
                until_s = trio.current_time() + REPORT_S  # this process stood still, and reports may wait to be read
        staying = sends.keys() - self._gone.keys()
        done = sum(sends[member] <= complete[member] for member in staying)
        timed_out = trio.current_time() >= until_s
        if timed_out and 2 * done <= len(staying):
            # The next attempt gets more time, as after one that timed out as a whole.
            self._context.timeouts.note_timed_out(self._attempt_s)
        awaited = staying if timed_out and 2 * done < len(staying) else set[PeerId]()
        for part, members in policy.conflicts_of(self._roots, self._plan, self._context.peer_id).items():
            failed_at[part] |= members
        missing = {
            number: failed_at[number]
            | ({member for member in awaited if number in sends[member] - complete[member]} - {part.reducer})
            for number, part in enumerate(self._plan)
            if part.reducer != self._context.peer_id
        }
        parts, must_blame = self._parts_left(sends), 2 * done < len(staying)
        for number in sorted(policy.at_fault(missing, sends, complete, parts, must_blame=must_blame)):
            self.note_gone(self._plan[number].reducer, f"{len(missing[number])} members are not complete there")
        left = self._parts_left(sends)
        excluded = self._gone.keys() | {member for part in left for member in failed_at[part]}
        return policy.included(sends, complete, left, excluded)

    def _guarded(self, joins: Mapping[PeerId, m.Join], included: Sequence[PeerId]) -> tuple[m.Contributor, ...]:
        """The contributors with their weights, after the guard by norms."""
        run, left = self._context.run, self._parts_left(included)
        norms = guard.norms_of(self._plan, left, self._squares, included)
        # At parts that are left, all reducers report the same root of a contributor.
        roots = {member: root for part in left for member, root in self._roots[part].items()}
        kept: dict[PeerId, float] = {}
        own = self._context.peer_id if self._context.liveness.own in self._head.contributors else None
        for member, verdict in guard.guarded(run, joins, norms, own).items():
            if verdict.scale:
                kept[member] = verdict.scale
            if verdict.scale < 1:
                reason = f"the norm of its outer gradient, {verdict.norm:.3g}, is above the limit, {verdict.limit:.3g}"
                what = "scaled down" if verdict.scale else "left out"
                logger.warning("round %d: %s is %s: %s", self._head.round + 1, member, what, reason)
        weights = guard.scaled_down(policy.weights_of(run, [joins[member] for member in kept]), list(kept.values()))
        return tuple(
            m.Contributor(member, joins[member].incarnation, weight, roots[member])
            for member, weight in zip(kept, weights, strict=True)
        )

    async def _await_reports(self, contributors: Sequence[m.Contributor]) -> Conclusion:
        """The parts of the record, from the reports of the reducers."""
        while True:
            reports = policy.counted_reports(self._reports, self._plan, self._gone, self._context.peer_id)
            conclusion = self._context.averaging.conclude(self._plan, contributors, reports)
            if conclusion is not None:
                return conclusion
            self._parts_left([c.peer_id for c in contributors])
            for sender, message in await self._news(trio.current_time() + self._silent_s):
                self._note_report(sender, message)

    def _note_report(self, sender: PeerId, message: m.Message) -> None:
        """Take the report of a reducer that has averaged the expected contributors, or those that we have named."""
        if not isinstance(message, m.Reduced) or not self._is_of_its_part(sender, message.part):
            return
        if self._expected if message.as_expected else self._contributors:
            self._reports[message.part] = message
            self._averaging.discard(sender)

    def _is_of_its_part(self, sender: PeerId, part: int) -> bool:
        return 0 <= part < len(self._plan) and self._plan[part].reducer == sender

    def _parts_left(self, senders: Iterable[PeerId]) -> set[int]:
        """The parts of these senders whose reducers are not gone. Raises RoundFailedError if they do not suffice."""
        left = {
            part for sender in senders for part in self._sends[sender] if self._plan[part].reducer not in self._gone
        }
        if self._context.averaging.is_complete(self._plan, left):
            return left
        gone = next((part.reducer for part in self._plan if part.reducer in self._gone), None)
        if gone is not None:
            raise RoundFailedError(f"reducer {gone}: {self._gone[gone]}")
        raise RoundFailedError("no member's outer gradient arrived everywhere")

    async def _news(self, until_s: float) -> list[tuple[PeerId, m.Message]]:
        """New messages; waits for a message, a lost peer, or the time-out."""
        awaited = [at_s + self._silent_s for peer_id, at_s in self._heard_s.items() if peer_id not in self._gone]
        wake_s = min([until_s, *awaited])
        with trio.move_on_at(wake_s):
            await self._changed.wait()
        self._changed = trio.Event()
        now, news = trio.current_time(), list(self._inbox)
        self._inbox.clear()
        self._heard_s.update((sender, now) for sender, _ in news if sender in self._heard_s)
        if now - wake_s > HELD_UP_S:
            self._heard_s = dict.fromkeys(self._heard_s, now)
        for peer_id, at_s in self._heard_s.items():
            if peer_id not in self._gone and now >= at_s + self._silent_s:
                self._context.avoided.note(peer_id, now, SILENT_REDUCER_S)
                self._gone[peer_id] = f"it sent nothing for {now - at_s:.0f} s"
        return news
