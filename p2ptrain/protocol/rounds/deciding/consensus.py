"""The decision of one round: single-decree Paxos for each (lineage, round), as a pure function.

Lamport, "Paxos Made Simple" (2001). The record of the round before names the voters of a round (`voters`); each is
a peer with its incarnation (new at every start of the process). How our messages map to the terms of Paxos:

| ours | Paxos | who → whom |
|---|---|---|
| Call | prepare (phase 1a) | leader → voters, and peers drawn for the round |
| Join | promise (1b), with the highest accepted record | acceptor → leader |
| Propose | accept request (2a) | leader → joined peers |
| Ready | accepted (2b) | acceptor → leader |
| Commit | learn, with the READY of a quorum | leader → all |
| Refuse | nack | acceptor → leader |
| Attempt(counter, leader, incarnation) | proposal number | |

Between a quorum of promises and Propose the peers average, outside of the consensus. Promises and accepted records are
held in memory only. A restarted process, and each node that `NodeRunner` builds in one process, has another
incarnation, so it is not a voter and its attempts are new ones. A node that has lost its promises must have a new one.

**What the caller must do** (`Attempts`). A round begins with a new `State`. The caller calls `step` for each event, one
at a time, keeps the new state, and carries out the effects in order; `events` documents both. A `Send` to our own id
comes back as `Received` from ourselves. Between steps it may set `State.limits`, which hold for the next Calls,
and nothing else of a state. It signs each Ready that is sent. It passes on only those messages of which it has checked
what they prove (`proof`): the signatures of a Ready or Commit, and the views and voters of a Join or Propose.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec

from p2ptrain.errors import WireError
from p2ptrain.protocol.rounds.deciding import events as ev
from p2ptrain.protocol.rounds.deciding.events import MAX_COUNTERS_AHEAD, MAX_UNHELD, Acceptor, Member, Proposer, State
from p2ptrain.protocol.rounds.deciding.voters import Voter, is_quorum
from p2ptrain.protocol.wire import messages as m
from p2ptrain.protocol.wire.transport import PeerId

Result = tuple[State, tuple[ev.Effect, ...]]
Joins = tuple[tuple[PeerId, m.Join], ...]


def unfinished(joins: Joins, voters: Collection[Voter]) -> m.Proposal | None:
    """The accepted proposal of the highest attempt: it may have been committed, and must be proposed unchanged."""
    held = [
        (join.ready_attempt, join.ready)
        for peer, join in joins
        if (peer, join.incarnation) in voters and join.ready_attempt is not None and join.ready is not None
    ]
    return max(held, key=lambda pair: pair[0])[1] if held else None


def heeded(state: State, joins: Joins) -> Joins:
    """The promises that an attempt counts: without those that report a record that nobody has, if a quorum remains.

    Leaving out a promise is like never having received it, and any quorum will do. Otherwise one voter that reports a
    record that no peer has would stop all rounds.
    """

    def is_unheld(peer: PeerId, join: m.Join) -> bool:
        return join.ready is not None and (peer in state.doubted or join.ready.record.sha256 in state.unheld)

    rest = tuple((peer, join) for peer, join in joins if not is_unheld(peer, join))
    return rest if is_quorum({(peer, join.incarnation) for peer, join in rest}, state.head.voters) else joins


def step(state: State, event: ev.Event, now: float) -> Result:
    """The new state and the effects of one event. Raises WireError if a message breaks a rule."""
    if state.learned is not None:
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
            member = _member_of(state, attempt)
            return _withdraw(state, member, reason) if member is not None else (state, ())
        case ev.Averaged(attempt, proposal):
            proposer = _proposer_of(state, attempt)
            if proposer is None or proposer.joining or proposer.proposal is not None:
                return state, ()
            assert _is_next(state, proposal.record), "averaged from another state than the head's"
            return _propose(state, proposer, proposal)
        case ev.LeaderFailed(attempt, reason):
            proposer = _proposer_of(state, attempt)
            return _abort(state, proposer, reason) if proposer is not None else (state, ())
        case ev.Lost(peer):
            return _lost(state, peer, now)
        case ev.Tick():
            return _tick(state, now)


def _on_message(state: State, sender: PeerId, message: m.Message, now: float) -> Result:
    match message:
        case m.Commit(record) | m.Propose(_, m.Proposal(record)):
            place = record.lineage, record.round
        case m.Call() | m.Join() | m.Refuse() | m.Roster() | m.Ready() | m.Abort() | m.Withdraw():
            place = message.lineage, message.round
        case _:
            raise WireError(f"{type(message).__name__} is no message of the consensus")
    if isinstance(message, m.Call | m.Roster | m.Propose | m.Abort) and message.attempt.leader != sender:
        raise WireError(f"a {type(message).__name__} in another peer's name")
    if place != (state.head.lineage, state.round):
        return state, ()
    match message:
        case m.Commit():
            return _learn(state, message)
        case m.Call():
            return _promise(state, message, now)
        case m.Propose():
            return _on_proposal(state, message, now)
        case m.Roster() | m.Abort():
            return _on_order(state, message, now)
    proposer = _proposer_of(state, message.attempt)
    if proposer is None:
        return state, ()
    match message:
        case m.Join():
            return _on_join(state, proposer, sender, message, now)
        case m.Ready():
            return _on_ready(state, proposer, sender, message)
        case m.Refuse() if sender in proposer.called and sender not in proposer.gone:
            # Bounded, and once per attempt: other peers refuse counters too far ahead, and a claim may be false.
            highest = max(state.highest, min(message.promised.counter, state.highest + MAX_COUNTERS_AHEAD // 2))
            reason = f"{sender} has promised attempt {message.promised.counter} to another leader"
            return _without(replace(state, highest=highest), proposer, sender, reason, now)
        case m.Withdraw():
            return _without(state, proposer, sender, f"{sender}: {message.reason}", now)
    return state, ()


def _member_of(state: State, attempt: m.Attempt) -> Member | None:
    return state.member if state.member is not None and state.member.attempt == attempt else None


def _proposer_of(state: State, attempt: m.Attempt) -> Proposer | None:
    return state.proposer if state.proposer is not None and state.proposer.attempt == attempt else None


def _is_next(state: State, record: m.Record) -> bool:
    """Whether a record follows our head."""
    place = (state.head.genesis, state.head.lineage, state.round, state.head.state_hash)
    return (record.genesis, record.lineage, record.round, record.parent_hash) == place


def _promise(state: State, call: m.Call, now: float) -> Result:
    attempt, acceptor, old = call.attempt, state.acceptor, state.member
    if attempt == acceptor.promised:
        return state, ()
    if not 0 <= attempt.counter <= state.highest + state.ahead:
        # The limit grows with each refusal, so that a peer that was away for long can take part again.
        return replace(state, ahead=state.ahead + MAX_COUNTERS_AHEAD), (_refuse(state, attempt),)
    if attempt < acceptor.promised:
        return state, (_refuse(state, attempt),)
    window_s = min(max(0.0, call.window_s), state.limits.window_s)
    state = replace(
        state,
        acceptor=replace(acceptor, promised=attempt),
        member=Member(attempt, now + window_s + state.limits.grace_s),
        highest=max(state.highest, attempt.counter),
    )
    prepare = ev.Prepare(attempt, window_s)
    if old is None:
        return state, (prepare,)
    # So that the leader of the replaced attempt does not wait for us.
    ended = ev.MemberEnded(old.attempt, f"{attempt.leader} called a higher attempt")
    return state, (_refuse(state, old.attempt), ended, prepare)


def _refuse(state: State, attempt: m.Attempt) -> ev.Send:
    return ev.Send(attempt.leader, m.Refuse(state.head.lineage, state.round, attempt, state.acceptor.promised))


def _on_order(state: State, message: m.Roster | m.Abort, now: float) -> Result:
    member = _member_of(state, message.attempt)
    if member is None:
        return state, ()
    if isinstance(message, m.Abort):
        return _end_member(state, member, message.reason)
    if not member.planned:
        member = replace(member, planned=True, deadline_s=now + state.limits.attempt_s)
    return replace(state, member=member), ()


def _join(state: State, attempt: m.Attempt, join: m.Join) -> Result:
    member, acceptor = _member_of(state, attempt), state.acceptor
    if member is None or member.joined:
        return state, ()
    join = msgspec.structs.replace(
        join, attempt=attempt, incarnation=state.incarnation, ready_attempt=acceptor.attempt, ready=acceptor.proposal
    )
    return replace(state, member=replace(member, joined=True)), (ev.Send(attempt.leader, join),)


def _on_proposal(state: State, message: m.Propose, now: float) -> Result:
    attempt, record, member = message.attempt, message.proposal.record, _member_of(state, message.attempt)
    if attempt < state.acceptor.promised:
        return state, (_refuse(state, attempt),)
    if member is None or not member.joined:
        return state, ()
    if state.acceptor.attempt == attempt:
        # Sent again, in case it was lost.
        accepted = state.acceptor.proposal
        is_same = accepted is not None and accepted.record.sha256 == record.sha256
        return state, (_ready(state, attempt, record),) if is_same else ()
    if not _is_next(state, record):
        return _withdraw(state, member, "the record starts from another state than ours")
    if member.proposal is not None:
        return state, ()
    member = replace(member, proposal=message.proposal, deadline_s=now + state.limits.attempt_s)
    return replace(state, member=member), (ev.Fetch(attempt, record),)


def _accept(state: State, attempt: m.Attempt, sha256: str) -> Result:
    member = _member_of(state, attempt)
    if member is None or member.proposal is None or member.proposal.record.sha256 != sha256:
        return state, ()
    if state.acceptor.attempt == attempt:
        return state, ()
    state = replace(state, member=replace(member, held=True))
    proposer = _proposer_of(state, attempt)
    return (state, ()) if proposer is not None and _waits(state, proposer) else _become_ready(state, member)


def _waits(state: State, proposer: Proposer) -> bool:
    """Whether we lead, and hold our own READY back until it completes a quorum.

    A leader accepts its own record even where the others refuse it. If it were READY alone, each later leader that
    needs its promise would have to propose that record, in vain.
    """
    own, voters = (state.peer, state.incarnation), state.head.voters
    return own in voters and not is_quorum({own, *dict(proposer.ready)}, voters)


def _become_ready(state: State, member: Member) -> Result:
    # A higher promise would have ended this attempt for us.
    assert member.proposal is not None
    state = replace(state, acceptor=Acceptor(member.attempt, member.attempt, member.proposal))
    return state, (_ready(state, member.attempt, member.proposal.record),)


def _ready(state: State, attempt: m.Attempt, record: m.Record) -> ev.Send:
    ready = m.Ready(record.lineage, record.round, attempt, state.incarnation, record.sha256, b"")
    return ev.Send(attempt.leader, ready)


def _withdraw(state: State, member: Member, reason: str) -> Result:
    attempt = member.attempt
    if member.proposal is not None and not member.held:
        state = _note_unheld(state, attempt, member.proposal.record.sha256)
    state, effects = _end_member(state, member, reason)
    withdraw = m.Withdraw(state.head.lineage, state.round, attempt, reason)
    return state, (ev.Send(attempt.leader, withdraw), *effects)


def _note_unheld(state: State, attempt: m.Attempt, sha256: str) -> State:
    """Remember an unavailable record and, in our own attempt, the peers that reported it as READY."""
    unheld = state.unheld if len(state.unheld) < MAX_UNHELD else frozenset()
    proposer = _proposer_of(state, attempt)
    joins = proposer.joins if proposer is not None else ()
    doubted = {peer for peer, join in joins if join.ready is not None and join.ready.record.sha256 == sha256}
    return replace(state, unheld=unheld | {sha256}, doubted=state.doubted | doubted)


def _end_member(state: State, member: Member, reason: str) -> Result:
    return replace(state, member=None), (ev.MemberEnded(member.attempt, reason),)


def _lead(state: State, event: ev.Lead, now: float) -> Result:
    if state.proposer is not None:
        return state, ()
    attempt = m.Attempt(max(state.highest, event.counter) + 1, state.peer, state.incarnation)
    deadline = now + event.window_s + event.grace_s
    proposer = Proposer(attempt, tuple(sorted(event.called)), event.window_s, event.attempt_s, deadline)
    call = m.Call(state.head.lineage, state.round, attempt, event.window_s)
    state = replace(state, proposer=proposer, highest=attempt.counter)
    return state, tuple(ev.Send(peer, call) for peer in proposer.called)


def _on_join(state: State, proposer: Proposer, sender: PeerId, join: m.Join, now: float) -> Result:
    if (join.ready is None) != (join.ready_attempt is None):
        raise WireError("a Join with half a READY record")
    # Accepted before this promise.
    ready, ready_attempt = join.ready, join.ready_attempt
    if ready and ready_attempt and (ready_attempt >= proposer.attempt or not _is_next(state, ready.record)):
        raise WireError("a Join with a READY record that cannot be")
    if not proposer.joining or sender not in proposer.called:
        return state, ()
    joins = tuple(sorted({**dict(proposer.joins), sender: join}.items(), key=lambda pair: pair[0]))
    return _go_on(state, replace(proposer, joins=joins), "", now)


def _without(state: State, proposer: Proposer, peer: PeerId, reason: str, now: float) -> Result:
    """Continue without a peer that refuses, withdraws or is lost, while a quorum of the others is possible."""
    return _go_on(state, replace(proposer, gone=proposer.gone | {peer}), reason, now)


def _go_on(state: State, proposer: Proposer, reason: str, now: float) -> Result:
    """After a peer joined or left: end the joining if nobody is awaited, abort if no quorum is possible, else wait."""
    state, voters = replace(state, proposer=proposer), state.head.voters
    if proposer.joining:
        awaited = set(proposer.called) - proposer.gone
        if not is_quorum({voter for voter in voters if voter[0] in awaited}, voters):
            return _abort(state, proposer, reason or "no quorum of voters was called")
        return _end_joining(state, proposer, now) if awaited <= dict(proposer.joins).keys() else (state, ())
    able = {(peer, join.incarnation) for peer, join in proposer.joins if peer not in proposer.gone}
    if not is_quorum(able | dict(proposer.ready).keys(), voters):
        return _abort(state, proposer, reason or "no quorum can become READY without the lost members")
    return state, ()


def _end_joining(state: State, proposer: Proposer, now: float) -> Result:
    joins = heeded(state, tuple((peer, join) for peer, join in proposer.joins if peer not in proposer.gone))
    promised, voters = {(peer, join.incarnation) for peer, join in joins}, state.head.voters
    if not is_quorum(promised, voters):
        count = sum(voter in promised for voter in voters)
        reason = f"{count} of {len(voters)} voters joined within {proposer.window_s:.1f} s: no quorum"
        return _abort(state, proposer, reason)
    proposer = replace(proposer, joining=False, joins=joins, deadline_s=now + proposer.attempt_s)
    proposal = unfinished(joins, voters)
    if proposal is not None:
        return _propose(state, proposer, proposal)
    return replace(state, proposer=proposer), (ev.Average(proposer.attempt, joins),)


def _propose(state: State, proposer: Proposer, proposal: m.Proposal) -> Result:
    state = replace(state, proposer=replace(proposer, proposal=proposal))
    message = m.Propose(proposer.attempt, proposal)
    return state, tuple(ev.Send(peer, message) for peer, _ in proposer.joins if peer not in proposer.gone)


def _on_ready(state: State, proposer: Proposer, sender: PeerId, message: m.Ready) -> Result:
    proposal, voter, voters = proposer.proposal, (sender, message.incarnation), state.head.voters
    if proposal is None or message.record_sha256 != proposal.record.sha256 or voter not in voters:
        return state, ()
    ready = {**dict(proposer.ready), voter: message.signature}
    proposer = replace(proposer, ready=tuple(sorted(ready.items())))
    if not is_quorum(ready.keys(), voters):
        state, own = replace(state, proposer=proposer), _member_of(state, proposer.attempt)
        completes = own is not None and own.held and state.acceptor.attempt != own.attempt
        return _become_ready(state, own) if own and completes and not _waits(state, proposer) else (state, ())
    votes = tuple(m.Vote(peer, incarnation, signature) for (peer, incarnation), signature in proposer.ready)
    commit = m.Commit(proposal.record, proposer.attempt, votes)
    state, effects = _learn(replace(state, proposer=None), commit)
    return state, (ev.Broadcast(commit), *effects)


def _abort(state: State, proposer: Proposer, reason: str, *, timed_out: bool = False) -> Result:
    abort = m.Abort(state.head.lineage, state.round, proposer.attempt, reason)
    tell = tuple(ev.Send(peer, abort) for peer in proposer.called)
    return replace(state, proposer=None), (*tell, ev.LeaderEnded(proposer.attempt, reason, timed_out))


def _learn(state: State, commit: m.Commit) -> Result:
    effects: tuple[ev.Effect, ...] = ()
    if state.proposer is not None:
        state, effects = _abort(state, state.proposer, "another attempt was decided")
    return replace(state, member=None, learned=commit), (*effects, ev.Learned(commit))


def _lost(state: State, peer: PeerId, now: float) -> Result:
    effects: tuple[ev.Effect, ...] = ()
    if state.member is not None and state.member.attempt.leader == peer:
        state, effects = _end_member(state, state.member, "the leader was lost")
    if state.proposer is not None:
        state, more = _without(state, state.proposer, peer, "", now)
        effects += more
    return state, effects


def _tick(state: State, now: float) -> Result:
    effects: tuple[ev.Effect, ...] = ()
    member, proposer = state.member, state.proposer
    if member is not None and now >= member.deadline_s:
        state, more = _withdraw(state, member, "the leader did not answer in time")
        effects += more
    if proposer is not None and now >= proposer.deadline_s:
        if proposer.joining:
            state, more = _end_joining(state, proposer, now)
        else:
            state, more = _abort(state, proposer, f"not decided within {proposer.attempt_s:.0f} s", timed_out=True)
        effects += more
    return state, effects
