"""The current attempts: at most one that we take part in, and one that we lead.

Each runs in its own task. An error in one is reported to the consensus, and affects no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

import trio

from p2ptrain.errors import RoundFailedError, WireError
from p2ptrain.protocol.rounds import policy
from p2ptrain.protocol.rounds.context import RoundContext, Tell
from p2ptrain.protocol.rounds.events import Average, Averaged, Event, Fetch, LeaderFailed, MemberFailed, Prepare
from p2ptrain.protocol.rounds.leader import AveragingLeader
from p2ptrain.protocol.rounds.member import Participation
from p2ptrain.protocol.rounds.snapshot import SnapshotTaker
from p2ptrain.protocol.rounds.timeouts import SILENT_LEADER_S, Silences
from p2ptrain.protocol.wire import messages as m
from p2ptrain.protocol.wire.transport import PeerId


class Attempts:
    """Starts and ends attempts, and delivers messages to them.

    Args:
        fetch: fetches all parts of a record; raises RoundFailedError, PeerLostError or WireError.
        apply: passes an event to the consensus.
    """

    def __init__(
        self, context: RoundContext, taker: SnapshotTaker, silences: Silences, *,
        fetch: Callable[[m.Record], Awaitable[None]], tell: Tell, apply: Callable[[Event], None],
    ) -> None:  # fmt: skip
        self._context = context
        self._taker = taker
        self._silences = silences
        self._fetch = fetch
        self._tell = tell
        self._apply = apply
        self._member: Participation | None = None
        self._leader: AveragingLeader | None = None
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Start tasks in this nursery from now on."""
        self._nursery = nursery

    @property
    def followed(self) -> m.Attempt | None:
        """The attempt that we take part in."""
        return self._member.attempt if self._member is not None else None

    @property
    def stage(self) -> str:
        """The stage of the attempt that we take part in, as text; empty if there is none."""
        return self._member.stage if self._member is not None else ""

    def take_part(self, effect: Prepare, head: m.Head) -> None:
        """Take part in this attempt only."""
        assert self._nursery is not None
        self.end_member()
        self._member = Participation(
            self._context, effect.attempt, head, self._taker, fetch=self._fetch, tell=self._tell, apply=self._apply
        )
        self._nursery.start_soon(self._member.run, effect.window_s)

    def fetch(self, effect: Fetch) -> None:
        """Fetch the proposed record."""
        if self._member is not None and self._member.attempt == effect.attempt:
            self._member.deliver(effect)

    def lead(self, effect: Average, head: m.Head, attempt_s: float, rtt_s: float) -> None:
        """Lead the averaging of our attempt."""
        assert self._nursery is not None
        self.end_leader()
        self._leader = AveragingLeader(
            self._context, self._silences, effect.attempt, head, attempt_s=attempt_s, rtt_s=rtt_s, tell=self._tell
        )
        self._nursery.start_soon(self._average, self._leader, dict(effect.joins))

    async def _average(self, leader: AveragingLeader, joins: dict[PeerId, m.Join]) -> None:
        with leader.scope:
            try:
                self._apply(Averaged(leader.attempt, await leader.run(joins)))
            except RoundFailedError as error:
                self._apply(LeaderFailed(leader.attempt, str(error)))
            except Exception as error:
                self._context.errors.note(f"attempt {leader.attempt.counter} of ours ended", error)
                self._apply(LeaderFailed(leader.attempt, f"unexpected error: {error!r}"))

    def end_member(self) -> None:
        """Stop taking part."""
        if self._member is not None:
            self._member.scope.cancel()
            self._member = None

    def end_leader(self) -> None:
        """Stop leading."""
        if self._leader is not None:
            self._leader.scope.cancel()
            self._leader = None

    def deliver(self, sender: PeerId, message: m.Message, payload: bytes) -> None:
        """Deliver a message to its attempt. Raises WireError if it breaks the protocol."""
        member, leader = self._member, self._leader
        match message:
            case m.Roster(attempt=attempt) | m.Reduce(attempt=attempt):
                if member is not None and attempt == member.attempt and sender == attempt.leader:
                    if isinstance(message, m.Roster):
                        policy.check_roster(message, self._context.peer_id)
                        self._context.averaging.check_plan(message, self._context.state.num_blocks)
                    member.deliver(message)
            case m.Contribution(attempt=attempt):
                if member is not None and attempt == member.attempt:
                    with self._containing(member):
                        member.contribute(sender, message, payload)
            case m.Arrived(attempt=attempt) | m.Reduced(attempt=attempt):
                if leader is not None and attempt == leader.attempt:
                    leader.deliver(sender, message)
            case m.Withdraw(attempt=attempt):
                if leader is not None and attempt == leader.attempt:
                    leader.note_gone(sender, message.reason)
            case m.Refuse(attempt=attempt):
                if leader is not None and attempt == leader.attempt:
                    leader.note_gone(sender, "it follows another leader", SILENT_LEADER_S)

    def note_lost(self, peer_id: PeerId) -> None:
        """The link to a peer broke."""
        if self._member is not None:
            with self._containing(self._member):
                self._member.note_lost(peer_id)
        if self._leader is not None:
            self._leader.note_gone(peer_id, "it was lost")

    def give_up_stalled(self) -> None:
        """Exclude senders that make no progress; called a few times a second."""
        if self._member is not None:
            with self._containing(self._member):
                self._member.give_up_stalled()

    @contextlib.contextmanager
    def _containing(self, member: Participation) -> Iterator[None]:
        """Turn an unexpected error into the failure of this attempt."""
        try:
            yield
        except WireError:
            raise
        except Exception as error:
            self._context.errors.note(f"attempt {member.attempt.counter} ended for us", error)
            self._apply(MemberFailed(member.attempt, f"unexpected error: {error!r}"))
