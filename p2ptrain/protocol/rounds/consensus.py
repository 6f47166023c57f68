"""The decision of one round: single-decree Paxos for each (lineage, round), as a pure function.

Lamport, "Paxos Made Simple" (2001). The voters of a round are the contributors of the one before it; each is a peer
with its incarnation (new at every start of the process). How our messages map to the terms of Paxos:

| ours | Paxos | who → whom |
|---|---|---|
| Call | prepare (phase 1a) | leader → all linked peers |
| Join | promise (1b), with the highest accepted record | acceptor → leader |
| Propose | accept request (2a) | leader → joined peers |
| Ready | accepted (2b) | acceptor → leader |
| Commit | learn | leader → all |
| Refuse | nack | acceptor → leader |
| Inquire, Accepted | a learner queries acceptors | learner → voters → learner |
| Attempt(counter, leader, incarnation) | proposal number | |

Between a quorum of promises and Propose the peers average, outside of the consensus. Promises and accepted records are
held in memory only. A restarted process, and each node that `NodeRunner` builds in one process, has another
incarnation, so it is not a voter and its attempts are new ones. An incarnation must never continue without its state.
`round_state.restarted` returns what it would have to keep; no node does that today, only the explorer and tests.

**The driver's contract.** `round_state.begin(...)` makes the state of a round. The driver calls
`step(state, event, now)` for each event, one at a time, keeps the new state, and carries out the effects in order. A
`Send` to our own id is returned as `Received` from ourselves. Between steps the driver may set `State.limits`, which
hold for the next Calls, and nothing else of a state. When a record is learned and has landed, `begin` makes the next
round's state. `events` documents events and effects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds import events as ev
from p2ptrain.protocol.rounds.learner import Learner
from p2ptrain.protocol.rounds.quorum import Voter, is_quorum, record_sha256
from p2ptrain.protocol.rounds.round_state import (
    MAX_COUNTERS_AHEAD,
    MAX_UNHELD,
    NO_ATTEMPT,
    Acceptor,
    Member,
    Proposer,
    State,
)
from p2ptrain.protocol.wire import messages as m
from p2ptrain.protocol.wire.transport import PeerId

Result = tuple[State, tuple[ev.Effect, ...]]
Joins = tuple[tuple[PeerId, m.Join], ...]


def unfinished(joins: Iterable[tuple[PeerId, m.Join]], voters: Collection[Voter]) -> m.Record | None:
    """The accepted record of the highest attempt: it may have been committed, and must be proposed unchanged."""
    held = [
        (join.ready_attempt, join.ready)
        for peer, join in joins
        if (peer, join.incarnation) in voters and join.ready_attempt is not None and join.ready is not None
    ]
    return max(held, key=lambda pair: pair[0])[1] if held else None


def heeded(state: State, joins: Joins) -> Joins:
    """The promises that an attempt counts: without those whose READY record is unavailable, if a quorum remains.

    Any quorum of promises will do, so leaving one out is like never having received it. Otherwise one voter that
    reports a record that no peer has would stop all rounds.
    """

    def is_unheld(peer: PeerId, join: m.Join) -> bool:
        return join.ready is not None and (peer in state.doubted or record_sha256(join.ready) in state.unheld)

    rest = tuple((peer, join) for peer, join in joins if not is_unheld(peer, join))
    return rest if is_quorum({(peer, join.incarnation) for peer, join in rest}, state.head.voters) else joins


def step(state: State, event: ev.Event, now: float) -> Result:
    """The new state and the effects of one event. Raises WireError if a message breaks a rule."""
    if isinstance(event, ev.Received) and isinstance(event.message, m.Inquire):
        return state, _answer(state, event.sender, event.message)
    if state.learner.record is not None:
        return state, ()
    match event:
        case ev.Received(sender, message):
            return _on_message(state, sender, message, now)
        case ev.Lead():
            return _lead(state, event, now)
        case ev.Prepared(attempt, join):
            return _join(state, attempt, join)
        case ev.Held(attempt, sha256):
            return _accept(state, attempt, sha256)
        case ev.MemberFailed(attempt, reason):
            return _withdraw(state, attempt, reason)
        case ev.Averaged(attempt, record):
            proposer = state.proposer
            if proposer is None or proposer.attempt != attempt or proposer.joining or proposer.record is not None:
                return state, ()
            assert _is_next(state, record), "averaged from another state than the head's"
            return _propose(state, proposer, record)
        case ev.LeaderFailed(attempt, reason):
            if state.proposer is None or state.proposer.attempt != attempt:
                return state, ()
            return _abort(state, state.proposer, reason)
        case ev.Lost(peer):
            return _lost(state, peer, now)
        case ev.Tick():
            return _tick(state, now)


def _on_message(state: State, sender: PeerId, message: m.Message, now: float) -> Result:
    match message:
        case m.Commit(record):
            return _hear(state, sender, record, now)
        case m.Propose(attempt, record):
            here = (record.lineage, record.round) == (state.head.lineage, state.round)
        case m.Call() | m.Join() | m.Refuse() | m.Roster() | m.Ready() | m.Abort() | m.Withdraw():
            attempt, here = message.attempt, (message.lineage, message.round) == (state.head.lineage, state.round)
        case m.Accepted():
            attempt, here = NO_ATTEMPT, (message.lineage, message.round) == (state.head.lineage, state.round)
        case _:
            raise WireError(f"{type(message).__name__} is no message of the consensus")
    if isinstance(message, m.Call | m.Roster | m.Propose | m.Abort) and attempt.leader != sender:
        raise WireError(f"a {type(message).__name__} in another peer's name")
    if not here:
        return state, ()
    proposer = state.proposer
    match message:
        case m.Call():
            return _promise(state, message, now)
        case m.Propose():
            return _on_proposal(state, message, now)
        case m.Accepted():
            return _on_claim(state, sender, message)
        case m.Roster() | m.Abort() if state.member is not None and state.member.attempt == attempt:
            if isinstance(message, m.Abort):
                return _end_member(state, message.reason)
            if not state.member.planned:
                member = dataclasses.replace(state.member, planned=True, deadline_s=now + state.limits.attempt_s)
                return dataclasses.replace(state, member=member), ()
        case m.Join() if proposer is not None and proposer.attempt == attempt:
            return _on_join(state, proposer, sender, message, now)
        case m.Ready() if proposer is not None and proposer.attempt == attempt:
            return _on_ready(state, proposer, sender, message)
        case m.Refuse() if proposer is not None and proposer.attempt == attempt:
            if sender not in proposer.called or sender in proposer.gone:
                return state, ()
            # Bounded, and once per attempt: other peers refuse counters too far ahead, and a claim may be false.
            highest = max(state.highest, min(message.promised.counter, state.highest + MAX_COUNTERS_AHEAD // 2))
            reason = f"{sender} has promised attempt {message.promised.counter} to another leader"
            return _without(dataclasses.replace(state, highest=highest), proposer, sender, reason, now)
        case m.Withdraw() if proposer is not None and proposer.attempt == attempt:
            return _without(state, proposer, sender, f"{sender}: {message.reason}", now)
    return state, ()


def _is_next(state: State, record: m.Record) -> bool:
    """Whether a record follows our head."""
    head = state.head
    return (record.genesis, record.lineage, record.round, record.parent_sha256) == (
        head.genesis, head.lineage, state.round, head.state_sha256
    )  # fmt: skip


def _promise(state: State, call: m.Call, now: float) -> Result:
    attempt, acceptor, old = call.attempt, state.acceptor, state.member
    if attempt == acceptor.promised:
        return state, ()
    refuse = ev.Send(attempt.leader, m.Refuse(call.lineage, call.round, attempt, acceptor.promised))
    if not 0 <= attempt.counter <= state.highest + state.ahead:
        # The limit grows with each refusal, so that a peer that was away for long can take part again.
        return dataclasses.replace(state, ahead=state.ahead + MAX_COUNTERS_AHEAD), (refuse,)
    if attempt < acceptor.promised:
        return state, (refuse,)
    effects: list[ev.Effect] = []
    if old is not None:
        # So that the leader of the replaced attempt does not wait for us.
        effects.append(ev.Send(old.attempt.leader, m.Refuse(call.lineage, call.round, old.attempt, attempt)))
        effects.append(ev.MemberEnded(old.attempt, f"{attempt.leader} called a higher attempt"))
    window_s = min(max(0.0, call.window_s), state.limits.window_s)
    state = dataclasses.replace(
        state,
        acceptor=dataclasses.replace(acceptor, promised=attempt),
        member=Member(attempt, now + window_s + state.limits.grace_s),
        highest=max(state.highest, attempt.counter),
    )
    return state, (*effects, ev.Prepare(attempt, window_s))


def _join(state: State, attempt: m.Attempt, join: m.Join) -> Result:
    member = state.member
    if member is None or member.attempt != attempt or member.joined:
        return state, ()
    acceptor = state.acceptor
    join = dataclasses.replace(
        join, attempt=attempt, incarnation=state.incarnation, ready_attempt=acceptor.attempt, ready=acceptor.record
    )
    state = dataclasses.replace(state, member=dataclasses.replace(member, joined=True))
    return state, (ev.Send(attempt.leader, join),)


def _on_proposal(state: State, message: m.Propose, now: float) -> Result:
    attempt, record, acceptor, member = message.attempt, message.record, state.acceptor, state.member
    if attempt < acceptor.promised:
        return state, (ev.Send(attempt.leader, m.Refuse(record.lineage, record.round, attempt, acceptor.promised)),)
    if member is None or member.attempt != attempt or not member.joined:
        return state, ()
    if acceptor.attempt == attempt:
        # Sent again, in case it was lost.
        return state, (_ready(state, attempt, record),) if acceptor.record == record else ()
    if not _is_next(state, record):
        return _withdraw(state, attempt, "the record starts from another state than ours")
    if member.proposal is not None:
        return state, ()
    member = dataclasses.replace(member, proposal=record, deadline_s=now + state.limits.attempt_s)
    return dataclasses.replace(state, member=member), (ev.Fetch(attempt, record),)


def _accept(state: State, attempt: m.Attempt, sha256: str) -> Result:
    member = state.member
    if member is None or member.attempt != attempt or member.proposal is None or state.acceptor.attempt == attempt:
        return state, ()
    if record_sha256(member.proposal) != sha256:
        return state, ()
    # A higher promise would have ended this attempt for us.
    acceptor = Acceptor(attempt, attempt, member.proposal)
    state, effects = _settle(dataclasses.replace(state, acceptor=acceptor))
    return state, (_ready(state, attempt, member.proposal), *effects)


def _ready(state: State, attempt: m.Attempt, record: m.Record) -> ev.Send:
    ready = m.Ready(record.lineage, record.round, attempt, state.incarnation, record_sha256(record))
    return ev.Send(attempt.leader, ready)


def _withdraw(state: State, attempt: m.Attempt, reason: str) -> Result:
    if state.member is None or state.member.attempt != attempt:
        return state, ()
    if state.member.proposal is not None and state.acceptor.attempt != attempt:
        state = _note_unheld(state, attempt, record_sha256(state.member.proposal))
    state, effects = _end_member(state, reason)
    return state, (ev.Send(attempt.leader, m.Withdraw(state.head.lineage, state.round, attempt, reason)), *effects)


def _note_unheld(state: State, attempt: m.Attempt, sha256: str) -> State:
    """Remember an unavailable record and, in our own attempt, the peers that reported it as READY."""
    unheld = state.unheld if len(state.unheld) < MAX_UNHELD else frozenset()
    joins = state.proposer.joins if state.proposer is not None and state.proposer.attempt == attempt else ()
    doubted = {peer for peer, join in joins if join.ready is not None and record_sha256(join.ready) == sha256}
    return dataclasses.replace(state, unheld=unheld | {sha256}, doubted=state.doubted | doubted)


def _end_member(state: State, reason: str) -> Result:
    assert state.member is not None
    return dataclasses.replace(state, member=None), (ev.MemberEnded(state.member.attempt, reason),)


def _lead(state: State, event: ev.Lead, now: float) -> Result:
    if state.proposer is not None:
        return state, ()
    attempt = m.Attempt(max(state.highest, event.counter) + 1, state.peer, state.incarnation)
    deadline = now + event.window_s + event.grace_s
    proposer = Proposer(attempt, tuple(sorted(event.called)), event.window_s, event.attempt_s, deadline)
    call = m.Call(state.head.lineage, state.round, attempt, event.window_s)
    state = dataclasses.replace(state, proposer=proposer, highest=attempt.counter)
    return state, tuple(ev.Send(peer, call) for peer in proposer.called)


def _on_join(state: State, proposer: Proposer, sender: PeerId, join: m.Join, now: float) -> Result:
    if (join.ready is None) != (join.ready_attempt is None):
        raise WireError("a Join with half a READY record")
    # Accepted before this promise.
    ready, ready_attempt = join.ready, join.ready_attempt
    if ready and ready_attempt and (ready_attempt >= proposer.attempt or not _is_next(state, ready)):
        raise WireError("a Join with a READY record that cannot be")
    if not proposer.joining or sender not in proposer.called:
        return state, ()
    joins = tuple(sorted({**dict(proposer.joins), sender: join}.items(), key=lambda pair: pair[0]))
    return _go_on(state, dataclasses.replace(proposer, joins=joins), "", now)


def _without(state: State, proposer: Proposer, peer: PeerId, reason: str, now: float) -> Result:
    """Continue without a peer that refuses, withdraws or is lost, while a quorum of the others is possible."""
    return _go_on(state, dataclasses.replace(proposer, gone=proposer.gone | {peer}), reason, now)


def _go_on(state: State, proposer: Proposer, reason: str, now: float) -> Result:
    """Advance or abort the attempt after a peer joined or left."""
    state, voters = dataclasses.replace(state, proposer=proposer), state.head.voters
    if proposer.joining:
        awaited = set(proposer.called) - proposer.gone
        if not is_quorum({voter for voter in voters if voter[0] in awaited}, voters):
            return _abort(state, proposer, reason or "no quorum of voters was called")
        return _end_joining(state, proposer, now) if awaited <= dict(proposer.joins).keys() else (state, ())
    able = {(peer, join.incarnation) for peer, join in proposer.joins if peer not in proposer.gone}
    if not is_quorum(able | proposer.ready, voters):
        return _abort(state, proposer, reason or "no quorum can become READY without the lost members")
    return state, ()


def _end_joining(state: State, proposer: Proposer, now: float) -> Result:
    joins = heeded(state, tuple((peer, join) for peer, join in proposer.joins if peer not in proposer.gone))
    promised, voters = {(peer, join.incarnation) for peer, join in joins}, state.head.voters
    if not is_quorum(promised, voters):
        count = sum(voter in promised for voter in voters)
        return _abort(
            state, proposer,
            f"{count} of {len(voters)} voters joined within {proposer.window_s:.1f} s: no quorum",
        )  # fmt: skip
    proposer = dataclasses.replace(proposer, joining=False, joins=joins, deadline_s=now + proposer.attempt_s)
    record = unfinished(joins, voters)
    if record is not None:
        return _propose(state, proposer, record)
    return dataclasses.replace(state, proposer=proposer), (ev.Average(proposer.attempt, joins),)


def _propose(state: State, proposer: Proposer, record: m.Record) -> Result:
    state = dataclasses.replace(state, proposer=dataclasses.replace(proposer, record=record))
    proposal = m.Propose(proposer.attempt, record)
    return state, tuple(ev.Send(peer, proposal) for peer, _ in proposer.joins if peer not in proposer.gone)


def _on_ready(state: State, proposer: Proposer, sender: PeerId, message: m.Ready) -> Result:
    record, voters = proposer.record, state.head.voters
    if record is None or message.record_sha256 != record_sha256(record):
        return state, ()
    if (sender, message.incarnation) not in voters:
        return state, ()
    ready = proposer.ready | {(sender, message.incarnation)}
    if is_quorum(ready, voters):
        state, effects = _learn(dataclasses.replace(state, proposer=None), record)
        return state, (ev.Broadcast(m.Commit(record)), *effects)
    return dataclasses.replace(state, proposer=dataclasses.replace(proposer, ready=ready)), ()


def _abort(state: State, proposer: Proposer, reason: str, *, timed_out: bool = False) -> Result:
    abort = m.Abort(state.head.lineage, state.round, proposer.attempt, reason)
    tell = tuple(ev.Send(peer, abort) for peer in proposer.called)
    return dataclasses.replace(state, proposer=None), (*tell, ev.LeaderEnded(proposer.attempt, reason, timed_out))


def _hear(state: State, sender: PeerId, record: m.Record, now: float) -> Result:
    """On a Commit: learn the record if it is our READY record, else ask the voters."""
    if (record.lineage, record.round) != (state.head.lineage, state.round) or (sender, record) in state.learner.heard:
        return state, ()
    state, effects = _settle(dataclasses.replace(state, learner=state.learner.hear(sender, record, now)))
    return state, effects or _ask_voters(state)


def _ask_voters(state: State) -> tuple[ev.Effect, ...]:
    inquiry = m.Inquire(state.head.lineage, state.round)
    return tuple(ev.Send(peer, inquiry) for peer, _ in state.head.voters if peer != state.peer)


def _answer(state: State, sender: PeerId, inquiry: m.Inquire) -> tuple[ev.Effect, ...]:
    """Report what we accepted in this round, or committed in it or in the one before."""
    head, attempt, record = state.head, state.acceptor.attempt, state.acceptor.record
    if (inquiry.lineage, inquiry.round) == (head.lineage, state.round):
        committed = state.learner.record
    elif head.record is not None and (inquiry.lineage, inquiry.round) == (head.record.lineage, head.record.round):
        committed = head.record
    else:
        return ()
    if committed is not None:
        attempt, record = None, committed
    if record is None:
        return ()
    accepted = m.Accepted(inquiry.lineage, inquiry.round, state.incarnation, attempt, record_sha256(record))
    return (ev.Send(sender, accepted),)


def _on_claim(state: State, sender: PeerId, claim: m.Accepted) -> Result:
    voter = (sender, claim.incarnation)
    if voter not in state.head.voters:
        return state, ()
    return _settle(dataclasses.replace(state, learner=state.learner.claim(voter, claim)))


def _settle(state: State) -> Result:
    """Learn a record from a Commit once it is proven."""
    record = state.learner.shown(state.acceptor.record, state.head.voters)
    return (state, ()) if record is None else _learn(state, record)


def _learn(state: State, record: m.Record) -> Result:
    effects: tuple[ev.Effect, ...] = ()
    if state.proposer is not None:
        state, effects = _abort(state, state.proposer, "another attempt was decided")
    return dataclasses.replace(state, member=None, learner=Learner(record=record)), (*effects, ev.Learned(record))


def _lost(state: State, peer: PeerId, now: float) -> Result:
    effects: tuple[ev.Effect, ...] = ()
    if state.member is not None and state.member.attempt.leader == peer:
        state, effects = _end_member(state, "the leader was lost")
    if state.proposer is not None:
        state, more = _without(state, state.proposer, peer, "", now)
        effects += more
    return state, effects


def _tick(state: State, now: float) -> Result:
    effects: tuple[ev.Effect, ...] = ()
    member, proposer, learner = state.member, state.proposer, state.learner
    if member is not None and now >= member.deadline_s:
        state, more = _withdraw(state, member.attempt, "the leader did not answer in time")
        effects += more
    if proposer is not None and now >= proposer.deadline_s:
        if proposer.joining:
            state, more = _end_joining(state, proposer, now)
        else:
            reason = f"not decided within {proposer.attempt_s:.0f} s"
            state, more = _abort(state, proposer, reason, timed_out=True)
        effects += more
    if learner.heard and now >= learner.ask_again_s:
        effects += (ev.Unproven(learner.heard[-1][1]),) if learner.gives_up else _ask_voters(state)
        state = dataclasses.replace(state, learner=learner.asked(now))
    return state, effects
