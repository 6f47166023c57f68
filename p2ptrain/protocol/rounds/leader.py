"""Driving one attempt at a round: call, roster, one contributor set, one record, a quorum of READYs, commit.

The leader only orders what others do; it holds no data, and nothing is lost with it. Every wait has a deadline, and
whatever goes wrong ends in Abort: the members then try again under another leader, with the same snapshots.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from p2ptrain.algorithms.averaging import token_weights
from p2ptrain.algorithms.metrics import mean_cosine, mean_norm
from p2ptrain.algorithms.schedules import outer_lr_scale, scaled_interval, scheduled_interval
from p2ptrain.errors import RoundFailedError
from p2ptrain.protocol.rounds.ballot import highest_ready, is_quorum, record_sha256
from p2ptrain.protocol.rounds.contribution import split_parts
from p2ptrain.protocol.wire.messages import (
    Abort,
    Arrived,
    Attempt,
    Call,
    Commit,
    Contributor,
    Head,
    Join,
    Leave,
    Message,
    Part,
    Propose,
    Ready,
    Record,
    Reduce,
    Reduced,
    Refuse,
    Roster,
    RosterPart,
    Withdraw,
)
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

logger = logging.getLogger(__name__)

# A round has at most this many contributors; the others adopt its outcome as left-out members (DESIGN.md).
MAX_CONTRIBUTORS = 64
# A JOIN is sent at the end of the window at the latest; on a busy machine it is under way this long (guess).
JOIN_GRACE_S = 0.5
# Contributions have this share of an attempt's time; then those that are whole go on without the others. The mean comes
# back in about as long as they took.
SENDING_SHARE = 0.5


class RoundTimeoutError(RoundFailedError):
    """The attempt's time was out."""


class LeaderHost(Protocol):
    """What a leader needs of its peer."""

    head: Head

    @property
    def peer_id(self) -> PeerId: ...
    @property
    def run(self) -> RunConfig: ...
    @property
    def num_blocks(self) -> int: ...

    def tell(self, peer_id: PeerId, message: Message) -> None: ...

    def live(self) -> Sequence[PeerId]: ...

    def note_spread(self, spread_s: float) -> None: ...


class Leader:
    """One attempt, led by this peer. `deliver` takes the messages addressed to it while `run` is under way.

    Cancel `scope` when the round is decided otherwise.
    """

    def __init__(
        self, host: LeaderHost, attempt: Attempt, *, window_s: float, attempt_s: float, round_trip_s: float
    ) -> None:
        self.attempt = attempt
        self.scope = trio.CancelScope()
        self._host = host
        self._window_s = window_s
        self._attempt_s = attempt_s
        self._round_trip_s = round_trip_s
        self._called_s = 0.0
        self._lost: set[PeerId] = set()
        self._lineage = host.head.lineage
        self._round = host.head.round + 1
        self._send, self._receive = trio.open_memory_channel[tuple[PeerId, Message]](1024)

    def deliver(self, sender: PeerId, message: Message) -> None:
        """Queue a message of this attempt, or a Leave for a peer that was lost; dropped when the leader is overrun."""
        try:
            self._send.send_nowait((sender, message))
        except trio.WouldBlock:
            logger.warning("leader of attempt %s is overrun", self.attempt)

    async def run(self) -> Record:
        """Lead the attempt to its end and return the committed record; ends in an Abort however else it ends.

        Raises RoundFailedError.
        """
        called = [*self._host.live(), self._host.peer_id]
        reason: str | None = "its leader gave it up"
        try:
            joined = await self._collect_joins(called)
            with self._deadline():
                record = self._unfinished(joined)
                if record is None:
                    record = await self._reduce(self._members(joined), joined)
                await self._collect_ready(record, joined)
            reason = None
        except RoundFailedError as error:
            reason = str(error)
            raise
        finally:
            if reason is not None:
                for peer_id in called:
                    self._host.tell(peer_id, Abort(self._lineage, self._round, self.attempt, reason))
        for peer_id in dict.fromkeys([*called, *self._host.live()]):
            self._host.tell(peer_id, Commit(record))
        return record

    # --- joining ------------------------------------------------------------------------------------------------

    async def _collect_joins(self, called: Sequence[PeerId]) -> dict[PeerId, Join]:
        call = Call(self._lineage, self._round, self.attempt, self._window_s)
        for peer_id in called:
            self._host.tell(peer_id, call)
        joined: dict[PeerId, Join] = {}
        self._called_s = trio.current_time()
        with trio.move_on_after(self._window_s + max(JOIN_GRACE_S, 2 * self._round_trip_s)):
            while set(called) - joined.keys() - self._lost:
                sender, message = await self._next()
                if isinstance(message, Join):
                    joined[sender] = message
        joined = {peer_id: join for peer_id, join in joined.items() if peer_id not in self._lost}
        present = {(peer_id, join.incarnation) for peer_id, join in joined.items()}
        if not is_quorum(present, self._host.head.voters):
            raise RoundFailedError(
                f"{sum(v in present for v in self._host.head.voters)} of {len(self._host.head.voters)} voters joined "
                f"within {self._window_s:.1f} s: no quorum"
            )
        return joined

    def _unfinished(self, joined: dict[PeerId, Join]) -> Record | None:
        """A record that may have been committed already; it must be finished unchanged."""
        voters = dict(self._host.head.voters)
        return highest_ready(
            (join.ready_attempt, join.ready) for peer, join in joined.items() if voters.get(peer) == join.incarnation
        )

    def _members(self, joined: dict[PeerId, Join]) -> list[PeerId]:
        """Those who contribute: with a snapshot, on the state that most voters hold."""
        states = [join.state_sha256 for join in joined.values()]
        agreed = max(set(states), key=lambda state: (states.count(state), state == self._host.head.state_sha256))
        for peer_id, join in joined.items():
            if join.state_sha256 != agreed:
                logger.warning("%s stands on state %s, the others on %s", peer_id, join.state_sha256[:12], agreed[:12])
        members = sorted(p for p, join in joined.items() if join.has_snapshot and join.state_sha256 == agreed)
        if not members:
            raise RoundFailedError("nobody has a snapshot")
        if agreed != self._host.head.state_sha256:
            raise RoundFailedError("this leader's own state differs from that of most")
        return members[:MAX_CONTRIBUTORS]

    # --- averaging ----------------------------------------------------------------------------------------------

    async def _reduce(self, members: list[PeerId], joined: dict[PeerId, Join]) -> Record:
        parts = self._plan_parts(members, joined)
        roster = Roster(self._lineage, self._round, self.attempt, tuple(members), tuple(parts))
        for peer_id in members:
            self._host.tell(peer_id, roster)
        included = await self._await_contributions(members, parts)
        weights = self._weights([joined[peer_id] for peer_id in included])
        contributors = tuple(
            Contributor(peer_id, joined[peer_id].incarnation, weight)
            for peer_id, weight in zip(included, weights, strict=True)
        )
        for reducer in dict.fromkeys(part.reducer for part in parts):
            self._host.tell(reducer, Reduce(self._lineage, self._round, self.attempt, contributors))
        hashes: dict[int, str] = {}
        products: list[npt.NDArray[np.float64]] = []
        while len(hashes) < len(parts):
            sender, message = await self._next()
            match message:
                case Reduced(part=part) if 0 <= part < len(parts) and parts[part].reducer == sender:
                    hashes[part] = message.sha256
                    products.append(np.array(message.gram))
                case Leave() | Withdraw():
                    self._require_not(sender, parts)
        measures = _measures(products, weights)
        return self._record(parts, hashes, contributors, {p: joined[p] for p in members}, measures)

    def _weights(self, joined: list[Join]) -> list[float]:
        """What each outer gradient counts by."""
        match self._host.run.round_weights:
            case "equal":
                return [1.0] * len(joined)
            case "shard":
                return token_weights([join.shard_tokens for join in joined])
        return token_weights([join.tokens for join in joined])

    def _plan_parts(self, members: list[PeerId], joined: dict[PeerId, Join]) -> list[RosterPart]:
        """One part per member that all others are linked to; the best-connected first where there are fewer parts."""
        reachable = [
            reducer
            for reducer in members
            if all(reducer in joined[other].linked for other in members if other != reducer)
        ]
        if not reachable:
            raise RoundFailedError("no member is linked to all others, so none can average")
        reachable.sort(key=lambda peer_id: (-joined[peer_id].rate, peer_id))
        bounds = split_parts(self._host.num_blocks, len(reachable))
        return [RosterPart(start, stop, reachable[i]) for i, (start, stop) in enumerate(bounds)]

    async def _await_contributions(self, members: list[PeerId], parts: list[RosterPart]) -> list[PeerId]:
        """The one contributor set: members complete at every reducer. Ends when all others have been given up."""
        part_count = len(parts)
        complete: dict[PeerId, set[int]] = {member: set() for member in members}
        failed: set[PeerId] = set()
        with trio.move_on_after(SENDING_SHARE * self._attempt_s):
            while any(len(done) < part_count and member not in failed for member, done in complete.items()):
                sender, message = await self._next()
                match message:
                    case Arrived(part=part) if 0 <= part < part_count and parts[part].reducer == sender:
                        for member in message.complete:
                            complete.get(member, set()).add(part)
                        failed.update(member for member in message.failed if member in complete)
                    case Withdraw():
                        raise RoundFailedError(f"{sender}: {message.reason}")
                    case Leave():
                        self._require_not(sender, parts)
        included = [member for member, done in complete.items() if len(done) == part_count and member not in failed]
        if not included:
            raise RoundFailedError("no member's outer gradient arrived everywhere")
        return included

    @staticmethod
    def _require_not(lost: PeerId, parts: list[RosterPart]) -> None:
        if lost in {part.reducer for part in parts}:
            raise RoundFailedError(f"reducer {lost} was lost")

    def _record(
        self,
        parts: list[RosterPart],
        hashes: dict[int, str],
        contributors: tuple[Contributor, ...],
        joined: dict[PeerId, Join],
        measures: tuple[float, float],
    ) -> Record:
        run, head = self._host.run, self._host.head
        included = [joined[c.peer_id] for c in contributors]
        ends = 2 * sum(join.at_length for join in included) >= len(included) and run.total_steps > 0
        speeds = sorted(join.speed for join in included)
        median_speed = speeds[len(speeds) // 2]
        steps = sorted(join.run_step for join in included)
        run_step = run.total_steps if ends else steps[len(steps) // 2]
        progress = run_step / run.total_steps if run.total_steps else 0.0
        sync_every = scheduled_interval(run.sync_schedule, run.sync_every, progress)
        return Record(
            genesis=head.genesis,
            lineage=self._lineage,
            round=self._round,
            parent_sha256=head.state_sha256,
            contributors=contributors,
            parts=tuple(Part(p.start, p.stop, hashes[i], p.reducer) for i, p in enumerate(parts)),
            # The last round is a plain average: with few rounds Nesterov overshoots (measured: 2.255 → 2.323).
            outer_optimizer="sgd" if ends else run.outer_optimizer,
            outer_lr=1.0 if ends else run.outer_lr * outer_lr_scale(run.outer_lr_schedule, progress),
            outer_momentum=0.0 if ends else run.outer_momentum,
            run_step=run_step,
            tokens_total=head.tokens_total + sum(join.tokens for join in included),
            intervals=tuple(
                (peer_id, scaled_interval(sync_every, join.speed, median_speed)) for peer_id, join in joined.items()
            ),
            cosine=measures[0],
            mean_norm=measures[1],
        )

    # --- deciding -----------------------------------------------------------------------------------------------

    async def _collect_ready(self, record: Record, joined: dict[PeerId, Join]) -> None:
        for peer_id in joined:
            self._host.tell(peer_id, Propose(self.attempt, record))
        name = record_sha256(record)
        # Somebody may have gone since the contributions came.
        voters, awaited = self._host.head.voters, set(joined) - self._lost
        ready: set[tuple[PeerId, str]] = set()
        while not is_quorum(ready, voters):
            if not is_quorum(ready | {(peer, joined[peer].incarnation) for peer in awaited}, voters):
                raise RoundFailedError("without those who have gone no quorum can become READY")
            sender, message = await self._next()
            match message:
                case Ready(record_sha256=sha256) if sha256 == name:
                    ready.add((sender, message.incarnation))
                case Leave() | Withdraw():
                    awaited.discard(sender)

    async def _next(self) -> tuple[PeerId, Message]:
        """The next message to this attempt. Raises RoundFailedError when a voter has promised a higher one."""
        sender, message = await self._receive.receive()
        if isinstance(message, Join):
            # Also one that comes after the window: the next window is longer.
            self._host.note_spread(trio.current_time() - self._called_s)
        if isinstance(message, Leave):
            self._lost.add(sender)
        if isinstance(message, Refuse):
            raise RoundFailedError(f"{sender} has promised attempt {message.promised.counter} to another leader")
        return sender, message

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """The attempt's time. Raises RoundTimeoutError when it is out."""
        with trio.move_on_after(self._attempt_s) as scope:
            yield
        if scope.cancelled_caught:
            raise RoundTimeoutError(f"not decided within {self._attempt_s:.0f} s")


def _measures(products: list[npt.NDArray[np.float64]], weights: Sequence[float]) -> tuple[float, float]:
    """Average cosine of the outer gradients and norm of their mean, from the parts' Gram matrices; 0 if unknown."""
    size = len(weights)
    if any(part.size != size * size for part in products):
        return 0.0, 0.0
    total = np.sum(products, axis=0).reshape(size, size)
    measures = mean_cosine(total) if size > 1 else 0.0, mean_norm(total, weights)
    return measures if all(map(math.isfinite, measures)) else (0.0, 0.0)
