"""Explores every reachable state of a few peers that decide one round, with `consensus.step` itself.

The network is the set of all messages ever sent: each may be delivered now, again, or never. So reordering, loss and
repetition need no moves of their own, and neither does a crash, after which nothing is delivered to a peer. Driver work
(snapshot, averaging, fetching) takes any time as well: its events are in the same set. Moves of a peer are to lead, to
time out, to restart with its memory, and to restart without it (as another incarnation, which is not a voter).

Peer states and events are numbered, and the effect of an event on a peer state is computed once, so a global state is
one integer: the peers' numbers, and a bit for each message sent. States that differ only by exchanging two equivalent
peers are merged. The search is breadth first, so it finds a shortest path.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from p2ptrain.protocol.rounds.deciding import consensus
from p2ptrain.protocol.rounds.deciding import events as ev
from p2ptrain.protocol.rounds.deciding.events import (
    Average,
    Averaged,
    Broadcast,
    Effect,
    Event,
    Fetch,
    Held,
    Lead,
    Learned,
    Limits,
    MemberFailed,
    Prepare,
    Prepared,
    Received,
    Send,
    State,
    Tick,
)
from p2ptrain.protocol.rounds.deciding.voters import is_quorum
from p2ptrain.protocol.wire.messages import Abort, Attempt, Commit, Head, Join, Proposal, Record, Refuse, Withdraw
from tests.protocol.renaming import Renaming, renamed

# A peer's number in a state of the whole has so many bits.
BITS = 20
# A member's times are out at 1, a leader's at once, so that either can be alone.
LIMITS = Limits(window_s=0.0, grace_s=1.0, attempt_s=1.0)


@dataclass(frozen=True)
class Scenario:
    """Who is there, and how often each may do what else is never over.

    Attributes:
        voters: of the round; they bear the names a, b, c, ...
        leaders: who may lead: voters, or others.
        leads: attempts of each leader and incarnation.
        kept: times that each of `frail` is built anew and keeps its memory.
        forgotten: times that each of `frail` is started anew and remembers nothing.
        lean: leave out what only ends an attempt sooner, as what is lost does as well (Refuse, Withdraw, Abort,
            times that are out but the joining window), and let drivers answer at once.
        unheld: what is fetched may also turn out to be nowhere.
        liar: somebody tells each of them that a record was committed which was not.
    """

    voters: str
    leaders: str
    leads: int = 1
    kept: int = 0
    forgotten: int = 0
    frail: str = ""
    lean: bool = False
    liar: bool = False
    unheld: bool = False

    @cached_property
    def peers(self) -> str:
        return "".join(dict.fromkeys(self.voters + self.leaders))

    @cached_property
    def head(self) -> Head:
        voters = tuple((peer, "1") for peer in self.voters)
        return Head("genesis", "lineage", 0, "state", "anchor", voters, 0, 0, None)

    def symmetries(self) -> list[dict[str, str]]:
        """Renamings that change nothing: of voters that do not lead, and do not decide a tie as the first listed."""
        fixed = self.leaders + self.frail + (self.voters[0] if len(self.voters) % 2 == 0 else "")
        alike = [peer for peer in self.voters if peer not in fixed]
        return [dict(zip(alike, order, strict=True)) for order in itertools.permutations(alike)][1:]


@dataclass(frozen=True)
class Local:
    """One peer: its state of the round, and what it may still do."""

    state: State
    leads: int
    kept: int
    forgotten: int


@dataclass(frozen=True)
class Envelope:
    """An event on its way to a peer. One of the driver's own is for that incarnation only."""

    to: str
    event: Event
    incarnation: str | None = None


@dataclass(frozen=True)
class Found:
    """What came of a search.

    Attributes:
        states: so many were seen.
        decided: in so many of them somebody has learned a record.
        complete: whether that is all there are.
        conflict: the way to a state in which two records were learned.
    """

    states: int
    decided: int
    complete: bool
    conflict: list[str] | None = None


class Explorer:
    """Numbers what comes up. One for each scenario (and each version of the rules)."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._locals: list[Local] = []
        self._local_ids: dict[Local, int] = {}
        self._envelopes: list[Envelope] = []
        self._envelope_ids: dict[Envelope, int] = {}
        self._mail = dict.fromkeys(scenario.peers, 0)
        self._deliveries: dict[tuple[int, int], tuple[int, int, str] | None] = {}
        self._moves: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
        self._records: list[str] = [""]
        self._renamings = [
            Renaming(
                names, scenario.peers,
                lambda number, names=names: self._intern(renamed(self._locals[number], names)),  # type: ignore[misc]
                lambda number, names=names: self._post(renamed(self._envelopes[number], names)),  # type: ignore[misc]
            )
            for names in scenario.symmetries()
        ]  # fmt: skip

    def search(self, limit: int) -> Found:
        """Breadth first, to the end, to a double commit, or until so many states have been seen."""
        sent = 0
        if self.scenario.liar:
            lie = Received("liar", Commit(record_of(self.scenario.head, 0, "liar", "1"), Attempt(9, "liar", "1"), ()))
            sent = sum(1 << self._post(Envelope(peer, lie)) for peer in self.scenario.peers)
        first = self._pack([self._intern(self._fresh(peer, "1")) for peer in self.scenario.peers], 0, sent)
        seen: dict[int, int] = {first: 0}
        frontier, shift, decided = [first], BITS * len(self.scenario.peers), 0
        while frontier:
            reached: list[int] = []
            for packed in frontier:
                for state, _ in self._successors(packed):
                    if state < 0:
                        return Found(len(seen), decided, False, [*self._way(seen, packed), *self._last(packed)])
                    if state not in seen:
                        seen[state] = packed
                        reached.append(state)
                        decided += state >> shift & 255 > 0
                if len(seen) >= limit:
                    return Found(len(seen), decided, False)
            frontier = reached
        return Found(len(seen), decided, True)

    # --- the whole ----------------------------------------------------------------------------------------------

    def _pack(self, numbers: list[int], learned: int, sent: int) -> int:
        packed = sent << 8 | learned
        for number in numbers:
            packed = packed << BITS | number
        return packed

    def _unpack(self, packed: int) -> tuple[list[int], int, int]:
        count, mask = len(self.scenario.peers), (1 << BITS) - 1
        numbers = [packed >> BITS * (count - 1 - i) & mask for i in range(count)]
        rest = packed >> BITS * count
        return numbers, rest & 255, rest >> 8

    def _successors(self, packed: int) -> Iterator[tuple[int, str]]:
        """The states after each move, each as the least of those that are alike; -1 for two committed records."""
        numbers, learned, sent = self._unpack(packed)
        for index, peer in enumerate(self.scenario.peers):
            number = numbers[index]
            for after, added, record in self._moves_of(number, sent & self._mail[peer]):
                if after == number and not added & ~sent:
                    continue
                now_learned = learned
                if record:
                    now_learned = self._record(record)
                    if learned not in (0, now_learned):
                        yield -1, f"{peer} learns another record"
                        return
                yield self._least([*numbers[:index], after, *numbers[index + 1 :]], now_learned, sent | added), peer

    def _least(self, numbers: list[int], learned: int, sent: int) -> int:
        packed = self._pack(numbers, learned, sent)
        for renaming in self._renamings:
            packed = min(packed, self._pack(renaming.locals(numbers), learned, renaming.sent(sent)))
        return packed

    def _record(self, sha256: str) -> int:
        if sha256 not in self._records:
            self._records.append(sha256)
        return self._records.index(sha256)

    # --- one peer -----------------------------------------------------------------------------------------------

    def _fresh(self, peer: str, incarnation: str) -> Local:
        scenario, frail = self.scenario, peer in self.scenario.frail
        state = ev.State(peer, incarnation, scenario.head, LIMITS)
        leads = scenario.leads if peer in scenario.leaders else 0
        return Local(state, leads, scenario.kept * frail, scenario.forgotten * frail)

    def _moves_of(self, number: int, mail: int) -> list[tuple[int, int, str]]:
        """What a peer can do with this mail: its number after it, what it sends, and the record that it learns."""
        moves = self._moves.get((number, mail))
        if moves is None:
            moves, rest = list(self._own_moves(number)), mail
            while rest:
                bit = rest & -rest
                rest ^= bit
                if (move := self._deliver(number, bit.bit_length() - 1)) is not None:
                    moves.append(move)
            moves = self._moves[number, mail] = list(dict.fromkeys(moves))
        return moves

    def _deliver(self, number: int, envelope_id: int) -> tuple[int, int, str] | None:
        key = (number, envelope_id)
        if key not in self._deliveries:
            local, envelope = self._locals[number], self._envelopes[envelope_id]
            commit = envelope.event.message if isinstance(envelope.event, Received) else None
            unproven = isinstance(commit, Commit) and not is_proven(commit, self.scenario.head)
            if envelope.incarnation not in (None, local.state.incarnation) or unproven:
                self._deliveries[key] = None
            else:
                self._deliveries[key] = self._step(local, envelope.event, 0.0)
        return self._deliveries[key]

    def _own_moves(self, number: int) -> Iterator[tuple[int, int, str]]:
        local = self._locals[number]
        state = local.state
        if not self.scenario.lean or (state.proposer is not None and state.proposer.joining):
            yield self._step(local, Tick(), 0.0 if state.proposer is not None else 1.0)
        if local.leads and state.proposer is None and state.learned is None:
            lead = Lead(tuple(self.scenario.voters), 0.0, 0.0, 0.0)
            yield self._step(dataclasses.replace(local, leads=local.leads - 1), lead, 0.0)
        if local.kept:
            kept = dataclasses.replace(local, state=restarted(state), kept=local.kept - 1)
            yield self._intern(kept), 0, ""
        if local.forgotten:
            fresh = self._fresh(state.peer, str(int(state.incarnation) + 1))
            yield self._intern(dataclasses.replace(fresh, kept=local.kept, forgotten=local.forgotten - 1)), 0, ""

    def _step(self, local: Local, event: Event, now: float) -> tuple[int, int, str]:
        state, sent, learned, events = local.state, 0, "", [event]
        while events:
            state, effects = consensus.step(state, events.pop(0), now)
            for effect in effects:
                if isinstance(effect, Learned):
                    learned = effect.commit.record.sha256
                for envelope in self._carry_out(state, effect):
                    may_fail = self.scenario.unheld and isinstance(effect, Fetch)
                    if self.scenario.lean and envelope.incarnation is not None and not may_fail:
                        events.append(envelope.event)
                    else:
                        sent |= 1 << self._post(envelope)
        return self._intern(dataclasses.replace(local, state=state)), sent, learned

    def _carry_out(self, state: State, effect: Effect) -> Iterator[Envelope]:
        """The driver's part of the contract, by stand-ins: each attempt averages to a record of its own."""
        me, incarnation = state.peer, state.incarnation
        match effect:
            case Send(_, Refuse() | Abort() | Withdraw()) if self.scenario.lean:
                pass
            case Send(to, Abort() | Withdraw() as message):
                # Why is for people.
                yield Envelope(to, Received(me, msgspec.structs.replace(message, reason="")))
            case Send("liar", _):
                pass
            case Send(to, message):
                yield Envelope(to, Received(me, message))
            case Broadcast(message):
                yield from (Envelope(peer, Received(me, message)) for peer in self.scenario.peers if peer != me)
            case Prepare(attempt):
                join = Join(
                    state.head.lineage, state.round, attempt, incarnation, "state", True, 0, 0, 0, 0.0, 0.0, (), False,
                    None, None, None,
                )  # fmt: skip
                yield Envelope(me, Prepared(attempt, join), incarnation)
            case Fetch(attempt, record):
                yield Envelope(me, Held(attempt, record.sha256), incarnation)
                if self.scenario.unheld:
                    yield Envelope(me, MemberFailed(attempt, ""), incarnation)
            case Average(attempt):
                record = record_of(self.scenario.head, attempt.counter, me, incarnation)
                yield Envelope(me, Averaged(attempt, Proposal(record, ())), incarnation)

    # --- numbers ------------------------------------------------------------------------------------------------

    def _intern(self, local: Local) -> int:
        number = self._local_ids.setdefault(local, len(self._locals))
        if number == len(self._locals):
            assert number < 1 << BITS
            self._locals.append(local)
        return number

    def _post(self, envelope: Envelope) -> int:
        number = self._envelope_ids.setdefault(envelope, len(self._envelopes))
        if number == len(self._envelopes):
            self._envelopes.append(envelope)
            self._mail[envelope.to] |= 1 << number
        return number

    # --- the way there ------------------------------------------------------------------------------------------

    def _way(self, seen: dict[int, int], packed: int) -> list[str]:
        states = [packed]
        while seen[states[-1]]:
            states.append(seen[states[-1]])
        states.reverse()
        return [self._what(before, after) for before, after in itertools.pairwise(states)]

    def _what(self, before: int, after: int) -> str:
        (_, _, old), (_, _, new) = self._unpack(before), self._unpack(after)
        peer = next(peer for state, peer in self._successors(before) if state == after)
        sends = [self._envelopes[i] for i in range((new & ~old).bit_length()) if new & ~old & 1 << i]
        return f"{peer}: sends " + ", ".join(f"{_short(envelope.event)} to {envelope.to}" for envelope in sends)

    def _last(self, packed: int) -> list[str]:
        return [move for state, move in self._successors(packed) if state < 0]


def restarted(state: State) -> State:
    """The state with which an incarnation may continue after a restart: all but its current attempts."""
    return dataclasses.replace(state, member=None, proposer=None)


def is_proven(commit: Commit, head: Head) -> bool:
    """The driver's check of a Commit; here a vote is one that was sent, as nobody can make one up."""
    return is_quorum({(vote.peer_id, vote.incarnation) for vote in commit.votes}, head.voters)


def record_of(head: Head, counter: int, leader: str, incarnation: str) -> Record:
    """A stand-in for what an attempt averages to: no two attempts come to the same."""
    return Record(
        head.genesis, head.lineage, head.round + 1, head.state_hash, (), (), leader, 0.0, 0.0, counter,
        int(incarnation), (), 0.0, 0.0, (),
    )  # fmt: skip


def _short(event: Event) -> str:
    message = event.message if isinstance(event, Received) else event
    attempt = getattr(message, "attempt", None)
    return f"{type(message).__name__}" + (f"({attempt.counter}{attempt.leader})" if attempt else "")
